"""The command that measures a real GPU, as far as it can be tried without one: on a virtual device, and with stand-ins."""

from __future__ import annotations

import inspect
import json
import sys
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu
import gpu_report
from on_gpu import cards, common, contract, failures, history, predicted, restored, speed

from autoaccum.devices import VirtualDevice
from autoaccum.prediction.allocator import AllocatorSettings, replay

TINY = "demo:gpt?layers=1&width=32&heads=2&seq_len=16&vocabulary=64"
MIB = 2**20


@pytest.fixture
def device() -> VirtualDevice:
    """A card that is large enough for everything here."""
    return VirtualDevice("64GiB")


# -- the command


def test_no_gpu_writes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a GPU one line says so, the exit code is the one for it, and no file is written."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "RESULTS", tmp_path / "gpu.json")
    assert gpu.main([]) == gpu.NO_GPU
    assert capsys.readouterr().out.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_results_are_of_a_gpu() -> None:
    """Results that lie in the repository name a GPU that was there, or there are none."""
    if gpu.RESULTS.exists():
        assert json.loads(gpu.RESULTS.read_text(encoding="utf-8"))["environment"]["total_bytes"] > 2**30


def test_unknown_section_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A name that no section begins with ends the call as wrong, and says which there are."""
    with pytest.raises(SystemExit) as ended:
        gpu.main(["--sections", "card,nothing"])
    assert ended.value.code == 2
    assert "nothing; there are: contract; predicted" in capsys.readouterr().err


@pytest.mark.parametrize("name", gpu.SECTIONS)
def test_section_can_be_called(name: str) -> None:
    """The function that a section names is there and takes a device, and what it is rehearsed with."""
    section = gpu.SECTIONS[name]
    module, function = section.function.split(".")
    inspect.signature(getattr(sys.modules[f"on_gpu.{module}"], function)).bind(None, **section.rehearsed)


def command(source: str) -> list[str]:
    """A process that runs this source with a function `row`, which writes one."""
    head = ["import json, sys, time", "def row(**c): print(json.dumps(c), file=open(sys.argv[1], 'a'), flush=True)"]
    return [sys.executable, "-c", "\n".join([*head, source])]


def test_rows_of_a_section() -> None:
    """What a process writes are the section's rows, and it holds when all of them do."""
    found = gpu.run_section("one", command("row(a=1)\nrow(a=2, ok=True)"), 60, {})
    assert (found["rows"], found["ended"], found["ok"]) == ([{"a": 1}, {"a": 2, "ok": True}], "done", True)


def test_row_that_does_not_hold() -> None:
    """A section with a row that does not hold what it claims does not hold."""
    assert not gpu.run_section("one", command("row(ok=True)\nrow(ok=False)"), 60, {})["ok"]


def test_section_without_rows_holds_nothing() -> None:
    """A section that ended well and has nothing to show does not hold."""
    assert not gpu.run_section("one", command(""), 60, {})["ok"]


def test_section_that_fails_keeps_its_rows() -> None:
    """A process that fails leaves the rows that it had, and the end of what it said."""
    found = gpu.run_section("one", command("row(a=1)\nraise KeyError('lables')"), 60, {})
    assert (found["rows"], found["ended"], found["ok"]) == ([{"a": 1}], "failed (1)", False)
    assert "lables" in found["said"]


@pytest.mark.slow
def test_section_out_of_time_is_killed() -> None:
    """A process that takes too long is ended with what it has started, and leaves the rows that it had."""
    source = "import subprocess\nrow(pid=subprocess.Popen(['sleep', '100']).pid)\ntime.sleep(100)"
    found = gpu.run_section("one", command(source), 2, {})
    assert (found["ended"], found["ok"]) == ("out of time", False)
    pid = found["rows"][0]["pid"]
    time.sleep(0.2)
    status = Path(f"/proc/{pid}/stat")
    assert not status.exists() or status.read_text().split()[2] == "Z"  # nobody waits for it, so that it may stay a zombie


def test_environment_of_a_section() -> None:
    """Variables of a section's environment are there in its process."""
    source = "import os\nrow(found=os.environ['PYTORCH_CUDA_ALLOC_CONF'])"
    found = gpu.run_section("one", command(source), 60, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    assert found["rows"] == [{"found": "expandable_segments:True"}]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Sections that take no time; gives the limits that they were given."""
    limits: list[float] = []

    def run(name: str, command: Any, limit_s: float, variables: Any) -> dict[str, Any]:
        limits.append(limit_s)
        ok = name != "cards"
        return {"section": name, "ended": "done", "ok": ok, "rows": [{"a": 1}], "seconds": 0.1, "said": ""}

    monkeypatch.setattr(gpu, "run_section", run)
    return limits


def test_one_that_fails_does_not_stop_the_others(stand_in: list[float], tmp_path: Path) -> None:
    """All sections run after one that does not hold, and the exit code says that not all did."""
    assert gpu.main(["--rehearse", str(tmp_path)]) == 1
    assert len(stand_in) == len(gpu.SECTIONS)


def test_time_of_all_sections(stand_in: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No section is given more time than is left of all, and none is begun when next to nothing is."""
    monkeypatch.setattr(gpu, "TOTAL_S", 30.0)
    gpu.run_all(["contract"], "cuda", tmp_path / "gpu.json", {"gpu": "stub"})
    assert stand_in[0] <= 30
    monkeypatch.setattr(gpu, "TOTAL_S", 1.0)
    report = gpu.run_all(["contract"], "cuda", tmp_path / "gpu.json", {"gpu": "stub"})
    assert report["sections"][0]["ended"].startswith("not begun")
    assert len(stand_in) == 1


def test_rehearsal_is_not_taken_for_a_measurement(stand_in: list[float], tmp_path: Path) -> None:
    """What a rehearsal writes says that it is one, and does not have the name of the results."""
    gpu.main(["--rehearse", str(tmp_path), "--sections", "restored"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rehearsal.json", "rehearsal.md"]
    assert "no figure here says anything about a GPU" in (tmp_path / "rehearsal.md").read_text()


# -- the report


def test_units_of_a_table() -> None:
    """Bytes are shown in MiB, fractions in percent, truth in words, and what is not known as nothing."""
    shown = [gpu_report.shown(*pair) for pair in (("a_bytes", 3 * MIB), ("a_frac", -0.0125), ("ok", True), ("a", None))]
    assert shown == ["3.000", "-1.25 %", "yes", ""]


def test_rows_with_different_columns() -> None:
    """A table has every column of any row, records inside a row too."""
    text = gpu_report.table_of([{"a": 1}, {"b": {"c": 2}}])
    assert text.splitlines()[0] == "| a | b c |"
    assert text.splitlines()[2:] == ["| 1 |  |", "|  | 2 |"]


def test_what_a_failed_section_said_is_shown() -> None:
    """The end of an error is in the report, and cannot end its own block."""
    section = {"section": "cards", "ended": "failed (1)", "ok": False, "rows": [], "seconds": 1, "said": "```\nKeyError"}
    text = gpu_report.markdown({"environment": {"gpu": "stub"}, "sections": [section]})
    assert "KeyError" in text and text.count("```") == 2


# -- the sections, on a virtual device


def test_contract_counts_tests() -> None:
    """Tests that failed are named, tests that were left out are no failures, and the rest passed."""
    xml = (
        "<testsuites><testsuite><testcase classname='t' name='a'/><testcase classname='t' name='b'>"
        "<failure message='no'/></testcase><testcase classname='t' name='c'><skipped message='not here'/></testcase>"
        "</testsuite></testsuites>"
    )
    first, *others = contract.rows_of(xml)
    assert first == {"case": "all", "passed": 1, "failed": 1, "ok": False}
    assert [(row["case"], row["outcome"]) for row in others] == [("t::b", "failure"), ("t::c", "skipped")]


def test_contract_lists_every_file_with_a_gpu_test() -> None:
    """No test file that has tests for a GPU is left out."""
    root = Path(__file__).parents[1]
    marked = {path for path in root.rglob("test_*.py") if "mark.gpu" in path.read_text() and path != Path(__file__)}
    assert {str(path.relative_to(root.parent)) for path in marked} == set(contract.TESTS)


@pytest.mark.slow
def test_predicted_peaks(device: VirtualDevice) -> None:
    """What is allocated on a virtual device is as predicted, to the byte, and nothing is said of what is reserved."""
    models = {"gpt": lambda device: common.on_device(TINY, device)}
    for row in predicted.run(device, models, (2, 6)):
        assert row["allocated_error_frac"] == 0.0
        assert row["measured_reserved_bytes"] is None


@pytest.mark.slow
def test_predicted_says_what_does_not_fit() -> None:
    """A size that the card does not hold is said to be one, and the others are measured."""
    models = {"gpt": lambda device: common.on_device(TINY, device)}
    rows = list(predicted.run(VirtualDevice("1MiB"), models, (2, 64)))
    assert ["not_run" in row for row in rows] == [False, True]


@pytest.mark.slow
def test_cards(device: VirtualDevice) -> None:
    """On an emulated card the probe's limit is that of a plain loop; a card larger than this one is left out."""
    fits, too_large = cards.run(device, (2 * MIB, 2**40), {"gpt": TINY})
    assert fits["ok"] and fits["probe"] == fits["true"] > 1
    assert too_large["not_run"]


@pytest.mark.parametrize("true", [0, 1, 7, 37, 38, 100])
@pytest.mark.parametrize("guess", [1, 37])
def test_largest_size_from_any_guess(true: int, guess: int) -> None:
    """The largest size that fits is found from a guess that is too low, right, or too high."""
    assert cards.largest(lambda rows: rows <= true, guess) == true


@pytest.mark.slow
def test_failures(device: VirtualDevice) -> None:
    """Each phase in which memory runs out is named, and searches and training steps leave what they promise."""
    rows = list(failures.run(device))
    assert len(rows) == 2 * len(failures.PHASES) + 1
    assert all(row["ok"] for row in rows), rows


def test_flush_is_seen(device: VirtualDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the allocator owns the cache, a step that fits only after a flush has to be refused for that."""
    monkeypatch.setattr(failures, "is_cuda", lambda device: True)
    assert not failures.flushed(device)["ok"]  # a virtual device has no cache: nothing was flushed


@pytest.mark.slow
def test_restored(device: VirtualDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a probe and after a user's error every bit and byte is as before."""
    monkeypatch.delitem(restored.ENDS, "autotune, exact levers")  # takes long, and the others show the same
    rows = list(restored.run(device, TINY, MIB))
    assert [row["ok"] for row in rows] == [True, True]
    assert rows[-1]["ended"] == "the user's error came out"


def test_digest_sees_a_changed_bit(device: VirtualDevice) -> None:
    """One weight that differs in its last bit, and one number drawn, are another state."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    before = restored.digest(model, optimizer, device)
    torch.rand(1)
    drawn = restored.digest(model, optimizer, device)
    with torch.no_grad():
        model.weight.view(torch.int32)[0, 0] ^= 1
    assert len({before, drawn, restored.digest(model, optimizer, device)}) == 3


def test_overhead(device: VirtualDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of the Accumulator is compared with the loop by hand, in time and in peak memory."""
    monkeypatch.setattr("overhead.PAIRS", 2)
    (row,) = speed.windows(device, ((8, 1, 16, 4),))
    assert row["micro_batches"] == 4
    assert row["peak_ratio"] == pytest.approx(1, abs=0.2)


@pytest.mark.slow
def test_sweep(device: VirtualDevice) -> None:
    """The chosen setting is one of those that were swept, and at least as fast as the slowest."""
    (row,) = speed.sweep(device, TINY, 4, MIB, tuning_s=2.0, sweeping_s=2.0)
    assert 1 <= row["swept"] <= row["settings"]
    assert row["chosen_over_best"] > 0


# -- a recorded history, with a stand-in for what CUDA counts

HISTORY = [(7, 3 * MIB, "alloc"), (7, 3 * MIB, "free_completed"), (7, 30 * MIB, "alloc"), (9, 600, "alloc")]


def stats_of(entries: list[history.Entry], **changed: int) -> dict[str, int]:
    """The counters of an allocator that is just like our model."""
    outcome = replay(*history.events_of(entries))
    return {
        "allocated_bytes.all.peak": outcome.peak_allocated_bytes,
        "reserved_bytes.all.peak": outcome.peak_reserved_bytes,
        "requested_bytes.all.peak": outcome.peak_requested_bytes,
        "num_alloc_retries": outcome.flushes,
    } | changed


def test_equal_replay_holds() -> None:
    """A history whose replay has the recorded peaks and flushes holds."""
    assert history.compared(HISTORY, stats_of(HISTORY), AllocatorSettings(), None)["ok"]


@pytest.mark.parametrize("counter", ["allocated_bytes.all.peak", "reserved_bytes.all.peak", "num_alloc_retries"])
def test_replay_that_differs_does_not_hold(counter: str) -> None:
    """One byte or one flush that differs is seen."""
    stats = stats_of(HISTORY)
    stats[counter] += 1
    assert not history.compared(HISTORY, stats, AllocatorSettings(), None)["ok"]


def test_cap_under_which_the_cache_is_given_back() -> None:
    """The cap is one under which these events take a flush, and fit."""
    limit = history.flushing_limit(HISTORY, stats_of(HISTORY), AllocatorSettings())
    assert limit is not None
    outcome = replay(*history.events_of(HISTORY), limit_bytes=limit)
    assert outcome.fits and outcome.flushes


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """`torch.cuda` that takes what torch's own functions take, and recorded one history; gives the fractions set."""
    fractions: list[Any] = []
    signatures = {
        name: inspect.signature(getattr(torch.cuda.memory, name))
        for name in ("_record_memory_history_impl", "_snapshot", "set_per_process_memory_fraction", "memory_stats")
    }
    trace = [{"addr": address, "size": size, "action": action} for address, size, action in HISTORY]
    snapshots = cycle(([{"size": 9, "action": "oom"}], [{"size": 9, "action": "oom"}, *trace]))  # one entry is of earlier

    def answering(name: str, answer: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signatures[name].bind(*args, **kwargs)
            return answer(bound.arguments)

        return call

    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", answering("_record_memory_history_impl", lambda asked: None))
    monkeypatch.setattr(memory, "_snapshot", answering("_snapshot", lambda asked: {"device_traces": [next(snapshots)]}))
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        answering("set_per_process_memory_fraction", lambda asked: fractions.append(asked["fraction"])),
    )
    monkeypatch.setattr(torch.cuda, "memory_stats", answering("memory_stats", lambda asked: stats_of(HISTORY)))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda place: type("Properties", (), {"total_memory": 2**40}))
    for name in ("memory_reserved", "reset_peak_memory_stats", "reset_accumulated_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda place: 0)
    for module in (history, common):
        monkeypatch.setattr(module, "is_cuda", lambda device: True)
    monkeypatch.setattr(history, "train", lambda place: None)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    yield fractions


def test_history_is_recorded_with_all_memory_and_under_a_cap(device: VirtualDevice, cuda: list[Any]) -> None:
    """Both cases are recorded and compared, the cap is a fraction of the card, and it is taken away afterwards."""
    device.torch_device = torch.device("cuda", 0)
    first, second = history.run(device)
    assert first["ok"] and first["events"] == 4
    assert second["limit_bytes"] < first["recorded"]["reserved_bytes"]
    assert not second["ok"]  # the stand-in did not flush
    assert [isinstance(fraction, float) for fraction in cuda] == [True, True] and cuda[-1] == 1.0


def test_history_of_an_allocator_that_is_not_empty(
    device: VirtualDevice, cuda: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay begins with nothing: where libraries keep memory, it is refused."""
    device.torch_device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda place: 512)
    with pytest.raises(history.NotEmptyError, match="512 bytes"):
        history.recorded(device)


def test_no_history_where_there_is_none(device: VirtualDevice) -> None:
    """A device whose allocator records nothing says so."""
    assert [list(row) for row in history.run(device)] == [["not_run"]]
