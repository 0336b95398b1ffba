"""Faults at every step of autotune, of Accumulator.step and of the command line, and what has to hold after each.

    python benchmarks/faults.py run [--only KIND]

After each fault: the error that has to come out or the exit code, everything put back bit for bit or the process gone, no
temporary file, no process left, and the next call works. Writes benchmarks/results/faults.json and faults.md; with `--only`,
whose KIND is one of those in the table, that kind's rows only. All of it takes about a quarter of an hour on two cores.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import suppress

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is loaded

from faulting.files import FILE_KINDS, file_cases
from faulting.injection import KINDS
from faulting.ranks import RANK_KINDS, rank_cases
from faulting.record import Case, environment, summed, table, write
from faulting.searching import SETTINGS as SEARCHES
from faulting.searching import searching_cases
from faulting.striking import COMMAND_KINDS, command_cases
from faulting.training import SETTINGS as TRAININGS
from faulting.training import training_cases

ALL_KINDS = list(dict.fromkeys((*KINDS, *COMMAND_KINDS, *FILE_KINDS, *RANK_KINDS)))
_OF_SEARCH, _OF_SEARCH_WITH_LEVERS, _OF_TRAINING, _OF_COMMANDS = 6, 2, 40, 2  # calls of one part that are made to fail


def cases(kinds: Collection[str]) -> Iterator[Case]:
    """Every fault of these kinds."""
    yield from command_cases(kinds, _OF_COMMANDS)
    yield from rank_cases(kinds)
    yield from file_cases(kinds)
    for training in TRAININGS:
        yield from training_cases(training, kinds, _OF_TRAINING)
    for index, search in enumerate(SEARCHES):
        yield from searching_cases(search, kinds, _OF_SEARCH if index == 0 else _OF_SEARCH_WITH_LEVERS)


def main() -> None:
    """Run, say what was not survived, and write the table down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run"])
    parser.add_argument("--only", choices=ALL_KINDS, metavar="KIND", help=", ".join(ALL_KINDS))
    asked = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs in the background
    begun, found = time.monotonic(), list[Case]()
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder  # what is left there is seen
        with suppress(KeyboardInterrupt):  # Ctrl-C ends the run, and what was tried by then is written down
            for case in cases(ALL_KINDS if asked.only is None else [asked.only]):
                found.append(case)
                if case.problems:
                    print(f"not survived: {case}", flush=True)
        tempfile.tempdir = None
    print(table(summed(found)))
    write(found, environment(time.monotonic() - begun), asked.only)
    print(f"{len(found)} faults, {sum(not case.problems for case in found)} survived, {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
