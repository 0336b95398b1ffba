"""Files of remembered plans and of studies, and names: what lies there may be anything, and nothing leaves its folder."""

from __future__ import annotations

import json
import pickle
import tempfile
from pathlib import Path
from typing import Any

import optuna
import torch
from hostile.judging import Broken
from hostile.runs import Raw, values
from hostile.texts import storable, texts
from hypothesis import strategies as st
from optuna.trial import TrialState

import autoaccum
from autoaccum.records import Candidate, Fit, Levers, Trial, plain, to_json
from autoaccum.study import Study

# -- remembered plans


def _tuned(folder: Path, name: str = "Net") -> autoaccum.Plan:
    """A search that takes a few milliseconds: a model with this class name, on a virtual device."""
    torch.manual_seed(0)
    model = type(name, (torch.nn.Linear,), {})(2, 1)
    return autoaccum.autotune(
        model, torch.ones(2, 2), 2, training_step=_mean, device="virtual:1MiB", levers="none", cache=folder, progress=False
    )


def _mean(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).mean()  # type: ignore[no-any-return]


class Trap:
    """Pickle runs this when it reads it."""

    marker = Path(tempfile.gettempdir()) / "hostile-marker"

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def _first_file() -> tuple[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        _tuned(Path(folder))
        (path,) = Path(folder).iterdir()
        return path.name, json.loads(path.read_text())


NAME, SOUND = _first_file()
PLAN_FIELDS = sorted(json.loads(SOUND["plan"]))
TRAPS = (
    pickle.dumps(Trap(), protocol=0),
    pickle.dumps(Trap()),
    b"!!python/object/apply:os.system ['x']",
    b"__import__('os')",
)


@st.composite
def cache_files(draw: st.DrawFn) -> bytes:
    """The file of a remembered plan with some of it changed, or something else."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=50) | storable.map(str.encode) | st.sampled_from(TRAPS))
    held = json.loads(json.dumps(SOUND))
    plan = json.loads(held["plan"])
    for name, value in draw(
        st.dictionaries(st.sampled_from(PLAN_FIELDS) | storable, values.filter(lambda v: not isinstance(v, Raw)), max_size=2)
    ).items():
        plan[name] = value
    held["plan"] = json.dumps(plan) if draw(st.integers(0, 5)) else draw(storable)
    for name, value in (
        draw(st.dictionaries(st.sampled_from(("fingerprint", "plan", "x")), storable, max_size=1)).items()
        if not draw(st.integers(0, 4))
        else ()
    ):
        held[name] = value
    return json.dumps(held).encode()


def check_cache(content: bytes) -> None:
    """A plan for the call that was made, whatever lay there; nothing ran and nothing was written elsewhere."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache" / NAME
        path.parent.mkdir()
        path.write_bytes(content)
        plan = _tuned(path.parent)
        if (plan.target_batch, sum(plan.micro_batch_sizes)) != (2, 2) or plan.levers != Levers():
            raise Broken("a plan of another call")
        if not all(warning.isprintable() and len(warning) < 1500 for warning in plan.warnings if "was ignored" in warning):
            raise Broken("a warning that nobody can read")
        _only_inside(Path(folder), {"cache"})
        str(plan), plan.to_html()


def check_names(name: str) -> None:
    """The name of a model's class decides no path."""
    if "\x00" in name or not _is_utf8(name):
        name = "Net"  # Python itself refuses a class of that name
    with tempfile.TemporaryDirectory() as folder:
        inside = Path(folder) / "cache"
        plan = _tuned(inside, name)
        _only_inside(Path(folder), {"cache"})
        if not all(path.stem.isalnum() and path.suffix == ".json" and path.is_file() for path in inside.iterdir()):
            raise Broken("a file whose name is not the library's own")
        plan.to_html(), plan.to_markdown()


def _is_utf8(text: str) -> bool:
    return text.encode("utf-8", "ignore").decode() == text


def _only_inside(folder: Path, names: set[str]) -> None:
    if {path.name for path in folder.iterdir()} != names or Trap.marker.exists():
        raise Broken("something was written beside the folder")


# -- studies

SOUND_TRIAL = plain(
    Trial(candidate=Candidate(micro_batch=4), outcome=Fit(peak_bytes=9, step_times_s=(1.5,)), wall_s=0.5, rows_per_step=8)
)
ATTRIBUTES = ("trial", "candidate", "owner", "claim", "purpose")


@st.composite
def trial_attributes(draw: st.DrawFn) -> dict[str, Any]:
    """What a trial of somebody else may hold."""
    found: dict[str, Any] = {}
    for name in draw(st.sets(st.sampled_from(ATTRIBUTES), max_size=3)) | {"trial"}:
        changed: Any = json.loads(json.dumps(SOUND_TRIAL))
        part = draw(st.sampled_from((changed, changed["candidate"], changed["outcome"], changed["candidate"]["levers"])))
        part[draw(st.sampled_from(sorted(part)) | storable)] = draw(values)
        text = json.dumps(changed if name == "trial" else changed["candidate"])
        found[name] = draw(
            st.one_of(
                st.just(text),
                st.just(text),
                values.map(lambda v: str(v) if isinstance(v, Raw) else v),
                st.sampled_from(TRAPS).map(repr),
            )
        )
    return found


ATTRIBUTE_CASES = st.tuples(st.lists(trial_attributes(), min_size=1, max_size=3), st.sampled_from(list(TrialState)))


def check_trials(case: tuple[list[dict[str, Any]], TrialState]) -> None:
    """Trials of others are taken where they could have run, and are nothing otherwise."""
    storage = optuna.storages.InMemoryStorage()
    of = {"model": "Net"}
    Study(storage, of, budget_bytes=1000, objective="throughput", seed=0)
    (name,) = optuna.get_all_study_names(storage)
    raw = optuna.load_study(study_name=name, storage=storage)
    for attributes in case[0]:
        done = case[1] == TrialState.COMPLETE
        raw.add_trial(optuna.create_trial(state=case[1], value=1.0 if done else None, user_attrs=attributes))
    opened = Study(storage, of, budget_bytes=1000, objective="throughput", seed=0)
    for trial in opened.news():
        to_json(trial)
        if trial.candidate.micro_batch < 1:
            raise Broken("a trial of no rows")
    opened.busy()


JOURNAL_LINES = st.one_of(
    st.builds(
        lambda code, more: json.dumps({"op_code": code, **more}),
        st.integers(-1, 12) | storable,
        st.dictionaries(
            st.sampled_from(
                (
                    "study_name",
                    "directions",
                    "study_id",
                    "trial_id",
                    "worker_id",
                    "user_attr",
                    "state",
                    "datetime_start",
                    "values",
                    "distribution",
                    "param_name",
                )
            ),
            values.map(lambda v: str(v) if isinstance(v, Raw) else v),
            max_size=6,
        ),
    ),
    storable,
    st.sampled_from(TRAPS).map(repr),
    st.binary(max_size=20).map(repr),
)
JOURNALS = st.lists(JOURNAL_LINES, min_size=1, max_size=4).map("\n".join)


def check_journal(text: str) -> None:
    """A study on a file that may be no journal."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "runs.log"
        path.write_text(text, encoding="utf-8")
        opened = Study(str(path), {"model": "Net"}, budget_bytes=1000, objective="throughput", seed=0)
        opened.news(), opened.busy()
        if Trap.marker.exists():
            raise Broken("something in the file was run")


STORAGE_NAMES = (
    texts
    | st.builds("{}{}".format, texts, st.sampled_from((".log", ".db", "://x")))
    | st.builds("sqlite:///{}".format, st.just("/nonexistent/"))
)
CLASS_NAMES = texts
