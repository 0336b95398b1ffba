"""The side that outlives its workers: deaths become trials, and no worker outlives the command."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import Popen

import msgspec
import psutil
import pytest

from autoaccum.records import Candidate, Fit, OutOfMemory, PlanRecord, ProbeResult, Trial
from autoaccum.worker import parent
from autoaccum.worker.messages import Failed, Job, Message
from autoaccum.worker.parent import WorkerError, search_in_worker

pytestmark = pytest.mark.slow

Start = Callable[..., Popen[bytes]]

TARGET = '''
import atexit, os, signal, time
from pathlib import Path
import torch
from torch import nn


class Net(nn.Module):
    """Does something when it sees a number of rows for the n-th time."""

    def __init__(self, inside):
        super().__init__()
        self.linear, self.inside, self.seen = nn.Linear(8, 8), inside, []

    def forward(self, x):
        self.seen.append(len(x))
        self.inside(len(x), self.seen.count(len(x)))
        return self.linear(x).square().mean()


def die(number):
    os.kill(os.getpid(), number)


def killed_above_three():
    return Net(lambda rows, times: rows > 3 and die(signal.SIGKILL)), torch.randn(4, 8)


class Traced(nn.Module):
    """Ends the process when it is traced on fake tensors."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        if type(x) is not torch.Tensor:
            die(signal.SIGSEGV)
        return self.linear(x).square().mean()


def crashing_when_traced():
    return Traced(), torch.randn(4, 8)


def crashing_above_one():
    return Net(lambda rows, times: rows > 1 and die(signal.SIGSEGV)), torch.randn(4, 8)


def crashing_always():
    return Net(lambda rows, times: die(signal.SIGABRT)), torch.randn(4, 8)


def asked_to_end_in_a_trial():
    return Net(lambda rows, times: rows > 1 and die(signal.SIGTERM)), torch.randn(4, 8)


def leaving_in_a_trial():
    return Net(lambda rows, times: rows > 1 and os._exit(9)), torch.randn(4, 8)


def killed_in_the_plan():
    return Net(lambda rows, times: (rows, times) == (2, 5) and die(signal.SIGKILL)), torch.randn(4, 8)


def leaves_before():
    os._exit(7)


def killed_before():
    die(signal.SIGKILL)


def with_a_process_of_its_own():
    pid = os.fork()
    if not pid:
        time.sleep(45)
        os._exit(0)
    Path("pid").write_text(str(pid))
    die(signal.SIGKILL)


def sleepy():
    def inside(rows, times):
        print("running", flush=True)
        time.sleep(100)
    return Net(inside), torch.randn(4, 8)


def busy():
    def inside(rows, times):
        print("running", flush=True)
        while True:
            pass
    return Net(inside), torch.randn(4, 8)
'''


class Recorder:
    """Writes down what a follower is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def bounded(self, top: int) -> None:
        self.told.append(f"bounded {top}")

    def started(self, candidate: Candidate, purpose: str) -> None:
        self.told.append(f"started {candidate.micro_batch} {purpose}")

    def finished(self, trial: Trial) -> None:
        self.told.append(f"finished {trial.candidate.micro_batch} {type(trial.outcome).__name__}")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, which is the current one; workers use one thread."""
    (tmp_path / "target.py").write_text(TARGET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(parent.__file__).parents[2]))
    return tmp_path


def search(function: str, follower: Recorder | None = None, **request: object) -> PlanRecord | ProbeResult:
    return search_in_worker(f"target.py:{function}", request, "virtual:4MiB", follower or Recorder())


# -- a death is a trial


def test_search_goes_on_after_deaths() -> None:
    """When a trial kills the worker, the search goes on from the log and finds the exact size below."""
    follower = Recorder()
    result = search("killed_above_three", follower, max_micro_batch=5, predict=False)
    assert isinstance(result, ProbeResult)
    assert (result.max_micro_batch, result.limited_by, result.evidence) == (3, "memory", "exact")
    assert [(t.candidate.micro_batch, isinstance(t.outcome, Fit)) for t in result.trials] == [
        (1, True),
        (2, True),
        (4, False),
        (3, True),
    ]
    died = result.trials[2].outcome
    assert isinstance(died, OutOfMemory) and died.cause == "process"
    assert died.message == "the worker process ended by signal 9 (SIGKILL) during this trial"
    assert follower.told == [
        "bounded 5",
        *("started 1 probe", "finished 1 Fit", "started 2 probe", "finished 2 Fit"),
        *("started 4 probe", "finished 4 OutOfMemory"),
        *("bounded 5", "started 3 probe", "finished 3 Fit"),
    ]


@pytest.mark.slow
def test_search_goes_on_without_a_prediction_where_tracing_ends_the_worker() -> None:
    """A target that ends the process that traces it is searched on real passes, and the result says so."""
    result = search("crashing_when_traced", max_micro_batch=5)
    assert isinstance(result, ProbeResult)
    assert (result.max_micro_batch, result.limited_by) == (5, "caller")
    assert any("ended without an answer (exit code -11)" in text for text in result.warnings)


@pytest.mark.slow
def test_segmentation_fault_is_a_trial_of_the_plan() -> None:
    """A kernel that crashes above one row leads to a plan of single rows, limited by memory."""
    plan = search("crashing_above_one", target_batch=2)
    assert isinstance(plan, PlanRecord)
    assert (plan.micro_batch_sizes, plan.limited_by, plan.evidence) == ((1, 1), "memory", "exact")
    assert any(isinstance(t.outcome, OutOfMemory) and "SIGSEGV" in t.outcome.message for t in plan.trials)


@pytest.mark.slow
def test_death_in_the_plans_own_step_lowers_the_plan() -> None:
    """A size that ran alone but kills the worker in the plan's own step is given up for a smaller one."""
    plan = search("killed_in_the_plan", target_batch=4, max_micro_batch=2)
    assert isinstance(plan, PlanRecord)
    assert plan.micro_batch_sizes == (1, 1, 1, 1)
    assert [(t.candidate.micro_batch, t.purpose, isinstance(t.outcome, Fit)) for t in plan.trials] == [
        (1, "probe", True),
        (2, "probe", True),
        (2, "confirm", False),
        (1, "confirm", True),
    ]


@pytest.mark.slow  # `autoaccum probe` shows the same in tests/test_cli.py
def test_death_at_every_size_says_what_killed_it() -> None:
    """When even one row kills the worker, the error is that nothing fits, with the signal and the trial."""
    with pytest.raises(WorkerError, match=r"micro_batch=1 does not fit .*signal 6 \(SIGABRT\)") as caught:
        search("crashing_always", predict=False)
    assert caught.value.kind == "nothing fits"
    assert [trial.candidate.micro_batch for trial in caught.value.trials] == [1]


@pytest.mark.parametrize(
    ("function", "how"),
    [
        ("asked_to_end_in_a_trial", r"by signal 15 \(SIGTERM\)"),
        pytest.param("leaving_in_a_trial", "with exit code 9", marks=pytest.mark.slow),
    ],
)
def test_an_end_that_memory_cannot_cause_is_no_trial(function: str, how: str) -> None:
    """A worker that is asked to end, or that leaves by itself, ends the search and says nothing about a size."""
    with pytest.raises(WorkerError, match=rf"ended {how} during the trial of micro_batch=2") as caught:
        search(function, predict=False)
    assert caught.value.kind == "refused"
    assert [trial.candidate.micro_batch for trial in caught.value.trials] == [1]


@pytest.mark.parametrize(
    ("function", "how"),
    [
        pytest.param("leaves_before", "with exit code 7", marks=pytest.mark.slow),
        ("killed_before", r"by signal 9 \(SIGKILL\)"),
    ],
)
def test_death_before_a_trial_is_refused(function: str, how: str) -> None:
    """A worker that dies before any trial ends the search at once, with how it ended."""
    with pytest.raises(WorkerError, match=rf"^the worker process ended {how} before it ran a trial\.$") as caught:
        search(function)
    assert caught.value.kind == "refused" and caught.value.trials == ()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_process_that_the_user_started_does_not_keep_the_search_waiting(folder: Path) -> None:
    """The search ends with its worker, also while a process that the user's code forked lives on."""
    with pytest.raises(WorkerError, match="SIGKILL"):
        search("with_a_process_of_its_own")
    forked = psutil.Process(int((folder / "pid").read_text()))
    assert forked.status() != psutil.STATUS_ZOMBIE
    forked.kill()


def test_deaths_without_end_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search whose every worker dies in a new trial ends after a fixed number of workers."""
    started = []

    def worker(job: Job) -> list[str]:
        started.append(len(job.log))
        return ['{"type": "started", "candidate": {"micro_batch": 1}, "purpose": "probe"}']

    use_stub_worker(monkeypatch, worker)
    with pytest.raises(WorkerError, match=r"^30 worker processes died one after the other"):
        search("sleepy")
    assert started == list(range(30))


# -- what a worker says


TRIAL = '{"candidate": {"micro_batch": 1}, "outcome": {"type": "fit", "peak_bytes": 1}, "wall_s": 1, "rows_per_step": 2}'


def use_stub_worker(monkeypatch: pytest.MonkeyPatch, answer: Callable[[Job], list[str]], code: int = -9) -> None:
    """Let the search start processes that say something and end, in place of workers."""

    class Stub:
        """The part of a process that the search looks at."""

        def __init__(self, job: Job) -> None:
            self.stdout: Iterator[bytes] = iter([line.encode() for line in answer(job)])

        def __enter__(self) -> Stub:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def wait(self) -> int:
            return code

    monkeypatch.setattr(parent, "_worker", Stub)


def test_a_line_cut_short_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a message, which a dying worker leaves, is not read as an answer."""
    use_stub_worker(monkeypatch, lambda job: ['{"type": "failed", "kind": "user", "te'])
    with pytest.raises(WorkerError, match="ended by signal 9"):
        search("sleepy")


def test_death_between_trials_is_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that dies after a trial is over does not make a failure of that trial: the search ends, with its log."""
    started = '{"type": "started", "candidate": {"micro_batch": 1}, "purpose": "probe"}'
    use_stub_worker(monkeypatch, lambda job: [started, f'{{"type": "finished", "trial": {TRIAL}}}'])
    with pytest.raises(WorkerError, match=r"ended by signal 9 \(SIGKILL\) outside any trial\.$") as caught:
        search("sleepy")
    assert [type(trial.outcome) for trial in caught.value.trials] == [Fit]


def test_an_interrupted_worker_interrupts_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that ended by SIGINT is an interruption, not a trial that did not fit."""
    use_stub_worker(monkeypatch, lambda job: [], code=-signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        search("sleepy")


@pytest.mark.parametrize("kind", ["nothing fits", "refused", "user"])
def test_the_workers_error_is_passed_on(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """An error that the worker reports is raised with its kind and its text."""
    said: Message = Failed(kind=kind, text="what happened")
    use_stub_worker(monkeypatch, lambda job: [msgspec.json.encode(said).decode()])
    with pytest.raises(WorkerError, match=r"^what happened$") as caught:
        search("sleepy")
    assert caught.value.kind == kind


def test_a_target_that_is_not_text_is_refused() -> None:
    """A file name that is not UTF-8 is refused before a worker is started."""
    with pytest.raises(WorkerError, match="is not UTF-8 text") as caught:
        search_in_worker("caf\udce9.py:build", {}, None, Recorder())
    assert caught.value.kind == "refused"


# -- nobody is left behind


@pytest.mark.parametrize(
    ("how", "function"), [(signal.SIGKILL, "busy"), pytest.param(signal.SIGTERM, "sleepy", marks=pytest.mark.slow)]
)
def test_no_worker_outlives_the_command(started_command: Start, folder: Path, how: int, function: str) -> None:
    """When the command is killed or terminated, its worker ends within seconds, sleeping or computing."""
    process = started_command("probe", f"target.py:{function}", "--device", "virtual:4MiB", folder=folder)
    assert process.stderr is not None and process.stderr.readline() == b"running\n"
    (worker,) = psutil.Process(process.pid).children()
    os.kill(process.pid, how)
    assert process.wait(10) == (143 if how == signal.SIGTERM else -how)
    _, alive = psutil.wait_procs([worker], timeout=10)
    assert [left for left in alive if left.status() != psutil.STATUS_ZOMBIE] == []


def test_a_caller_that_gives_up_leaves_no_worker() -> None:
    """When the follower raises in the middle of a trial, the worker is gone by the time the error arrives."""

    class Impatient(Recorder):
        """Has enough at the first trial."""

        def started(self, candidate: Candidate, purpose: str) -> None:
            self.workers = psutil.Process().children()
            raise TimeoutError("too long")

    follower = Impatient()
    with pytest.raises(TimeoutError, match="too long"):
        search("sleepy", follower, max_micro_batch=2)  # so few sizes are not predicted: tracing would sleep as well
    assert [w.pid for w in follower.workers] != []
    assert not any(psutil.pid_exists(w.pid) for w in follower.workers)


def test_the_users_environment_wins(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The worker gets a oneDNN cache of one primitive, unless the user has set another."""
    source = 'import os, sys, msgspec\nsys.stdout.write(\'{"type": "failed", "kind": "user", "text": "%s"}\' % '
    stub = folder / "stub.py"
    stub.write_text(source + "os.environ['ONEDNN_PRIMITIVE_CACHE_CAPACITY'])\n")
    start = parent.subprocess.Popen
    monkeypatch.setattr(parent.subprocess, "Popen", lambda _, **more: start([sys.executable, str(stub)], **more))
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    with pytest.raises(WorkerError, match=r"^1$"):
        search("sleepy")
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    with pytest.raises(WorkerError, match=r"^64$"):
        search("sleepy")
