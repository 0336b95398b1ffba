"""Running out of memory is caught here, with the memory that the frames of the error hold."""

from __future__ import annotations

import gc
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from autoaccum.catching import Failure, attempted
from autoaccum.devices.base import Verdict

EVERY = frozenset(Verdict)
MEMORY = (Verdict.TOO_LARGE,)
Refs = list[weakref.ref[Tensor]]


def out_of_memory(text: str = "full") -> torch.OutOfMemoryError:
    """An error as an allocator raises it."""
    return torch.OutOfMemoryError(text)


def hold(refs: Refs) -> Tensor:
    """A tensor that the caller's frame holds, and a weak reference to it."""
    tensor = torch.zeros(8)
    refs.append(weakref.ref(tensor))
    return tensor


def alive(refs: Refs) -> int:
    """How many of these tensors are still there, without waiting for the garbage collector."""
    return sum(ref() is not None for ref in refs)


@pytest.fixture(autouse=True)
def _without_collector() -> Any:
    """Nothing is freed by chance."""
    gc.disable()
    yield
    gc.enable()


def failure_of(run: Callable[[], Any], verdicts: Any = MEMORY) -> Failure:
    """The failure that must come of it."""
    outcome = attempted(run, verdicts)
    assert isinstance(outcome, Failure)
    return outcome


# -- what comes back


@pytest.mark.parametrize("value", [7, None, (1, 2)], ids=str)
def test_result_passes_through(value: Any) -> None:
    """Without an error the result is what was returned."""
    assert attempted(lambda: value, EVERY) is value


def test_failure_has_row_text_and_error() -> None:
    """A failure says by which row it was recognised, with the class and text of the error, and the error itself."""
    error = out_of_memory()

    def run() -> None:
        raise error

    failure = failure_of(run)
    assert failure.row.verdict is Verdict.TOO_LARGE
    assert failure.message == "OutOfMemoryError: full"
    assert failure.error is error


@pytest.mark.parametrize(("length", "kept"), [(10, 28), (1982, 2000), (1983, 2000), (50_000, 2000)])
def test_message_is_shortened(length: int, kept: int) -> None:
    """A message with a C++ stack in it is cut; a short one is kept whole."""

    def run() -> None:
        raise out_of_memory("x" * length)

    message = failure_of(run).message
    assert message.endswith("...") == (length > 1982)
    assert len(message.removesuffix("...")) == kept


# -- what passes


@pytest.mark.parametrize(
    "error",
    [ZeroDivisionError("mine"), RuntimeError("shapes cannot be multiplied"), KeyboardInterrupt(), SystemExit(3)],
    ids=type,
)
def test_other_errors_pass_unchanged(error: BaseException) -> None:
    """An error that no table knows, Ctrl-C and an exit come out as the same object."""

    def run() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        attempted(run, EVERY)
    assert caught.value is error


def test_errors_that_pass_keep_their_frames() -> None:
    """The local variables of an error that passes are left for a debugger."""

    def run() -> None:
        mine = 17
        raise ZeroDivisionError(mine)

    with pytest.raises(ZeroDivisionError) as caught:
        attempted(run, EVERY)
    (*_, (innermost, _)) = traceback.walk_tb(caught.value.__traceback__)
    assert innermost.f_locals["mine"] == 17


@pytest.mark.parametrize("verdicts", [(), (Verdict.UNCLEAR, Verdict.FLOOR)], ids=["none", "others"])
def test_other_verdicts_pass_unchanged(verdicts: tuple[Verdict, ...]) -> None:
    """An error that is known, but not one of the verdicts asked for, comes out as the same object."""
    error = out_of_memory()

    def run() -> None:
        raise error

    with pytest.raises(torch.OutOfMemoryError) as caught:
        attempted(run, verdicts)
    assert caught.value is error


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (MemoryError(), Verdict.TOO_LARGE),
        (RuntimeError("this back end is out of memory"), Verdict.UNCLEAR),
        (RuntimeError("tensors with more than INT_MAX elements"), Verdict.CEILING),
        (ValueError("Expected more than 1 value per channel when training"), Verdict.FLOOR),
    ],
    ids=lambda value: value.name if isinstance(value, Verdict) else type(value).__name__,
)
def test_asked_for_verdict_is_caught_alone(error: Exception, verdict: Verdict) -> None:
    """Every verdict is caught where it is asked for, and only there."""

    def run() -> None:
        raise error

    assert failure_of(run, (verdict,)).row.verdict is verdict
    with pytest.raises(type(error)):
        attempted(run, EVERY - {verdict})


# -- memory


def test_frames_are_let_go_of() -> None:
    """Once `attempted` has returned, no frame of the error holds a tensor, at any depth, and the failure is still there."""
    refs: Refs = []

    def inner() -> None:
        activation = hold(refs)
        raise out_of_memory(str(activation.shape))

    def middle() -> None:
        activation = hold(refs)
        inner()
        del activation

    def run() -> None:
        activation = hold(refs)
        middle()
        del activation

    failure = failure_of(run)
    assert failure.error.__traceback__ is not None
    assert (len(refs), alive(refs)) == (3, 0)


def test_frames_of_errors_behind_are_let_go_of() -> None:
    """Causes, contexts and members of a group hold nothing either."""
    refs: Refs = []

    def first() -> None:
        activation = hold(refs)
        raise out_of_memory(str(activation.shape))

    def chained(cause: bool) -> None:
        activation = hold(refs)
        try:
            first()
        except torch.OutOfMemoryError as error:
            if cause:
                raise ValueError(str(activation.shape)) from error
            raise ValueError(str(activation.shape))  # noqa: B904 - the context is what is tried

    def grouped() -> None:
        try:
            chained(True)
        except ValueError as error:
            raise ExceptionGroup("several", [error]) from None

    failures = [failure_of(lambda: chained(True)), failure_of(lambda: chained(False)), failure_of(grouped)]
    assert (len(failures), len(refs), alive(refs)) == (3, 6, 0)


def test_frames_of_generators_are_let_go_of() -> None:
    """A generator that the error came out of holds nothing either."""
    refs: Refs = []

    def drawn() -> Any:
        activation = hold(refs)
        yield 1
        raise out_of_memory(str(activation.shape))

    generator = drawn()
    failure = failure_of(lambda: list(generator))
    assert (failure.row.verdict, alive(refs)) == (Verdict.TOO_LARGE, 0)


def fail(*used: object) -> Any:
    """Memory runs out here."""
    raise out_of_memory(f"{len(used)} used")


def in_inner_function(activation: Tensor) -> Any:
    """Memory runs out in a function that has closed over the activation."""

    def inner() -> Any:
        return fail(activation)

    return inner()


def in_generator(activation: Tensor) -> Any:
    """Memory runs out in a generator that has closed over the activation."""

    def drawn() -> Any:
        yield activation
        yield fail(activation)

    return list(drawn())


def in_checkpoint(activation: Tensor) -> Any:
    """Memory runs out in a checkpointed function that has closed over the activation."""
    start = torch.ones(1, requires_grad=True)
    return checkpoint(lambda start: fail(start, activation), start, use_reentrant=False)


@pytest.mark.parametrize(
    "step",
    [
        in_inner_function,
        in_generator,
        in_checkpoint,
        lambda activation: (lambda: fail(activation))(),
        lambda activation: [fail(activation, part) for part in range(3)],
        lambda activation: sum(fail(activation, part) for part in range(3)),
    ],
    ids=["function", "generator", "checkpoint", "lambda", "comprehension", "generator-expression"],
)
def test_closures_are_let_go_of(step: Callable[[Tensor], Any]) -> None:
    """What a function in the traceback has closed over is let go of with a failure that is not going to be raised."""
    refs: Refs = []
    failure = failure_of(lambda: step(hold(refs)))
    failure.forget()
    gc.collect()
    assert (len(refs), alive(refs)) == (1, 0)


def test_tensor_of_an_error_goes_with_the_failure() -> None:
    """What the error itself carries is gone as soon as the failure is, without the garbage collector."""
    refs: Refs = []

    def run() -> None:
        error = out_of_memory()
        error.carried = hold(refs)  # type: ignore[attr-defined]
        raise error

    failure = failure_of(run)
    failure.forget()
    assert alive(refs) == 1
    del failure
    assert alive(refs) == 0


def test_closure_that_lives_on_keeps_its_variables() -> None:
    """A function that the user's program still has keeps what it has closed over, though it was in the traceback."""
    kept: list[Callable[[], Any]] = []

    def run() -> None:
        mine = [1, 2]

        def inner() -> Any:
            return mine.pop() and fail(mine)

        kept.append(inner)
        inner()

    failure_of(run)
    with pytest.raises(torch.OutOfMemoryError):
        kept[0]()


def test_traceback_still_says_where() -> None:
    """The traceback is kept, from the function that was run to where memory ran out."""

    def allocate() -> None:
        raise out_of_memory()

    def run() -> None:
        allocate()

    shown = traceback.extract_tb(failure_of(run).error.__traceback__)
    assert [frame.name for frame in shown] == ["run", "allocate"]


def test_locals_of_the_caller_stay() -> None:
    """Frames that are still running keep their variables."""
    mine = torch.ones(2)

    def run() -> None:
        raise out_of_memory()

    failure_of(run)
    assert float(mine.sum()) == 2


# -- errors from before


def test_error_being_handled_does_not_count() -> None:
    """Inside the handler of an out-of-memory error, an error of the user's own is not taken for one."""
    mine = KeyError("mine")

    def run() -> None:
        raise mine

    try:
        raise out_of_memory()
    except torch.OutOfMemoryError:
        with pytest.raises(KeyError) as caught:
            attempted(run, EVERY)
    assert caught.value is mine


def test_new_error_in_a_handler_counts() -> None:
    """Inside such a handler, memory that runs out anew is still caught."""

    def run() -> None:
        raise out_of_memory("again")

    try:
        raise out_of_memory("before")
    except torch.OutOfMemoryError:
        assert failure_of(run).message == "OutOfMemoryError: again"


def test_frames_of_an_error_being_handled_stay() -> None:
    """The error that is being handled outside keeps its variables: it is none of this attempt's."""
    refs: Refs = []

    def before() -> None:
        activation = hold(refs)
        raise ValueError(str(activation.shape))

    def run() -> None:
        raise out_of_memory()

    try:
        before()
    except ValueError:
        failure_of(run)
        assert alive(refs) == 1
