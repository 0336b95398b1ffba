"""The Plan that users hold: the record, with its ways out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from autoaccum.admitting import refuse_other_model, unwrapped
from autoaccum.choose import sizes_of
from autoaccum.engines import own_optimizer
from autoaccum.errors import InvalidRequestError
from autoaccum.files import read_bounded, write_whole
from autoaccum.levers import Subject, applied, autocast_for
from autoaccum.records import PlanRecord, from_json, to_json
from autoaccum.report.pages import plan_fragment, plan_html
from autoaccum.report.tables import trial_rows
from autoaccum.report.text import plan_markdown, plan_text
from autoaccum.units import one_line, shown

if TYPE_CHECKING:
    import pandas


@final
class Plan(PlanRecord, frozen=True, kw_only=True, tag_field="record", tag="autoaccum.Plan"):
    """How to take one optimizer step of `target_batch` samples, and what that rests on. Made by `autotune`.

    `str(plan)` is a short readable summary, and notebooks show a table. Fields are described at `PlanRecord`.
    """

    @staticmethod
    def of(record: PlanRecord) -> Plan:
        """The same values, with the ways out."""
        return Plan(**{name: getattr(record, name) for name in PlanRecord.__struct_fields__})

    def schedule(self, rank: int) -> tuple[int, ...]:
        """The micro-batch sizes of another rank, in rows; their sum is what its loader has to yield for one optimizer step.

        Raises:
            InvalidRequestError: When there is no such rank.

        Example:
            >>> import torch, autoaccum
            >>> plan = autoaccum.autotune(torch.nn.Linear(4, 2), torch.randn(2, 4), 10, levers="none", device="virtual:1MiB")
            >>> plan.schedule(0)
            (10,)
        """
        if not isinstance(rank, int) or not 0 <= rank < self.world_size:
            raise InvalidRequestError(f"rank={shown(rank)} does not exist; expected 0 to {self.world_size - 1}.")
        return sizes_of(self, rank)

    def to_frame(self) -> pandas.DataFrame:
        """Every trial as a row of a pandas data frame, in the order run."""
        import pandas

        return pandas.DataFrame(trial_rows(self.trials))

    def to_json(self) -> str:
        """The plan as JSON text; `Plan.from_json` gives it back."""
        return to_json(self)

    @staticmethod
    def from_json(text: str | bytes) -> Plan:
        """Read what `to_json` wrote. JSON only: nothing is evaluated or unpickled.

        Raises:
            InvalidRequestError: When the text is damaged, of a newer schema, or not a plan.
        """
        return from_json(text, Plan)

    def save(self, path: str | Path) -> None:
        """Write the JSON to a file; a file that is there is replaced as a whole or not at all."""
        write_whole(Path(path), self.to_json())

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a file that `save` wrote.

        Raises:
            InvalidRequestError: As `from_json`, with the file's name.
            OSError: When the file cannot be read.
        """
        content = read_bounded(Path(path))
        try:
            return Plan.from_json(content)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{one_line(str(path), 200)}: {error}") from None

    def to_markdown(self) -> str:
        """The plan and its trials as Markdown."""
        return plan_markdown(self)

    def to_html(self) -> str:
        """The plan, its trade-offs, pictures and trials as one HTML page that needs nothing else, offline, on any screen."""
        return plan_html(self)

    @contextmanager
    def applied(self, model: nn.Module, optimizer: Optimizer | None = None) -> Iterator[None]:
        """Run one's own loop under the plan's levers; an `Accumulator` with the plan does so by itself.

        Args:
            model: The one that the plan was made for, or another one of the same kind. Its own forward pass runs under the
                plan's autocast, and returns float32; `autocast()` is the region for a loss that is computed outside.
            optimizer: None leaves the optimizer's implementation alone. With `precision="fp16"` the loss has to be scaled by
                a `torch.amp.GradScaler`, which is the loop's own.

        Raises:
            InvalidRequestError: When the model has fewer blocks than the plan checkpoints, or the optimizer none of its
                parameters.

        Leaves behind:
            Nothing in the model. Where the fused optimizer step counts on the device, the counters stay there.

        Example:
            >>> import torch, autoaccum
            >>> model = torch.nn.Linear(4, 2)
            >>> plan = autoaccum.autotune(model, torch.randn(2, 4), 10, device="virtual:1MiB", levers="none")
            >>> with plan.applied(model):
            ...     model(torch.randn(2, 4)).mean().backward()
        """
        module, own = unwrapped(model), own_optimizer(optimizer)
        if isinstance(own, Optimizer):
            refuse_other_model(own, module)
        with applied(self.levers, Subject(module, next(module.parameters()).device, own)):
            yield

    def autocast(self) -> torch.autocast:
        """The autocast region that the plan's precision asks for, for a forward pass and its loss.

        With the precision lever off it leaves autocast as it is around it.
        """
        device = self.environment.device.split(":")[0] if self.environment else "cpu"
        return autocast_for(self.levers, torch.device("cpu" if device == "virtual" else device))

    def __str__(self) -> str:
        return plan_text(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What IPython shows as text."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        return plan_fragment(self)
