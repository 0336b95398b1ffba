"""Why accumulation is not exact, in plain sentences: what it is, what it does to the gradient, what to do."""

from __future__ import annotations

from collections.abc import Sequence

NOT_A_NUMBER = "The loss or its gradient is NaN on this batch, so nothing can be compared. Check another batch."

NO_GRADIENT = "The gradient of the whole batch is zero, so nothing can be compared. Check another batch, or the loss."

RANDOM = (
    "Two runs of the same batch give different gradients: the model or the loss draws random numbers (noise, masks, "
    "stochastic depth) or keeps a state of its own, so no split can be compared with the whole. Turn that off and check "
    "again."
)


def batch_norm(names: Sequence[str], momentum: float | None, steps: int) -> str:
    """BatchNorm, with the momentum that repairs its running averages and only those; None where they are plain means."""
    text = (
        f"{_listed('Layer', names)}: BatchNorm normalises by the micro-batch it sees, so the gradient is that of smaller "
        "batches. No accumulation repairs that; GroupNorm, LayerNorm or BatchNorm in eval mode would be exact."
    )
    if momentum is None:
        return text
    corrected = 1 - (1 - momentum) ** (1 / steps)
    return (
        f"{text} Its running averages move once per micro-batch: with {steps} of them, momentum={corrected:.4g}, which is "
        f"1-(1-{momentum:g})^(1/{steps}), lets those move as with the whole batch, but leaves the gradient as it is."
    )


def hooks_on_gradients(names: Sequence[str]) -> str:
    """Tensor hooks that are not linear."""
    return (
        f"{_listed('Parameter', names)}: a hook changes the gradient of every micro-batch by itself, and not in proportion "
        "(clamping, normalising). Use max_grad_norm=, or change the gradient once, before the step."
    )


def optimizer_in_backward(names: Sequence[str]) -> str:
    """Hooks that run after a gradient was accumulated."""
    return (
        f"{_listed('Parameter', names)}: a hook runs after each gradient is accumulated, so once per micro-batch. An "
        "optimizer in the backward pass would step with every part of the batch. Remove it: the window steps once."
    )


def carried_over(names: Sequence[str]) -> str:
    """State that one micro-batch leaves to the next."""
    what = _listed("Buffer", names) if names else "Something outside of the buffers"
    return (
        f"{what}: every micro-batch changes it, and the next one is computed with what it has become (power iterations of "
        "spectral_norm, running averages in use), where the whole batch changes it once. No accumulation repairs that; "
        "freeze it in the forward pass and update it once per step."
    )


def same_labels(name: str) -> str:
    """A batch that cannot show a wrong weight."""
    return (
        f"all values of {name} are the same, so a weight by label (class weights, ignored labels) was not put to the test."
    )


def mixing_layer(name: str, kind: str) -> str:
    """A layer that lets rows see each other."""
    return (
        f"Layer {name or 'the model itself'} ({kind}): its output for a row depends on the other rows of the micro-batch. "
        "No accumulation repairs that; for this layer the micro-batch is the batch that counts."
    )


def compares_rows(loss: str) -> str:
    """A loss that is not made up of its parts."""
    return (
        f"{loss} compares the rows of a micro-batch with each other (in-batch negatives, a Dice or a rank over the batch, a "
        "penalty on batch statistics): the whole is not made up of its parts. No accumulation repairs that; for this loss "
        "the micro-batch is the batch that counts."
    )


def is_a_sum(loss: str) -> str:
    """A loss that is not a mean over its micro-batch."""
    return (
        f"{loss} is a sum, or is already divided by a number that belongs to the whole batch (its size, the number of "
        "steps): its parts add up as they are, and are scaled here once more. Return the mean over the micro-batch."
    )


def already_divided(divisor: float) -> str:
    """A loss that is divided by the number of micro-batches."""
    return (
        f"The loss is already divided by {divisor:g}, the number of micro-batches. Every micro-batch is scaled here, so the "
        "step would be that much too small. Return the mean loss of the micro-batch, undivided."
    )


def perhaps_divided(divisor: float) -> str:
    """A last factor that may be meant."""
    return (
        f"the loss is divided by {divisor:g} in its last operation, which is also the number of micro-batches: if that is "
        "what it stands for, leave it out, because micro-batches are scaled here."
    )


def other_weight(loss: str, shares: Sequence[float], given: Sequence[float], suggestion: str | None) -> str:
    """A mean over something else."""
    found = f"{loss} weighs the parts {_ratio(shares)} where weight= says {_ratio(given)}"
    if suggestion is not None:
        return f"{found}. Pass {suggestion}."
    return (
        f"{found}: it is a mean over something else. Pass weight=, a function micro_batch -> number that counts what it "
        "divides by (valid labels, class weights, boxes)."
    )


def nonlinear(loss: str, shares: Sequence[float]) -> str:
    """A nonlinear function of a mean."""
    return (
        f"{loss} is a nonlinear function of a mean (a square root, a logarithm, a ratio of sums): its parts would have to "
        f"be weighed {_ratio(shares)}, which is known only afterwards. No accumulation repairs that; take the mean last."
    )


def _ratio(factors: Sequence[float]) -> str:
    return " : ".join(f"{factor:.3g}" for factor in factors)


def _listed(kind: str, names: Sequence[str]) -> str:
    shown = ", ".join(name or "the model itself" for name in names[:5])
    return f"{kind} {shown}" + (f" and {len(names) - 5} more" if len(names) > 5 else "")
