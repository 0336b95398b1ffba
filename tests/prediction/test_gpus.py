"""The table of GPUs: every row is sound and has its source, and what follows from the architecture."""

from __future__ import annotations

import re

import pytest

from autoaccum.prediction.gpu_names import gpu_for
from autoaccum.prediction.gpus import ATTENTION_ORDERS, CONTEXT_RULES, GPUS, LIBRARY_WORKSPACES, MIB, Gpu

GIB = 2**30
EVERY = pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)


def nominal_gib(gpu: Gpu) -> int:
    """The GiB at the end of a row's name."""
    match = re.search(r" (\d+)GB$", gpu.name)
    assert match is not None
    return int(match[1])


# -- the table


def test_table_ascends() -> None:
    """The rows are in the order of their memory."""
    assert list(GPUS) == sorted(GPUS, key=lambda gpu: gpu.total_bytes)


def test_names_are_unique() -> None:
    """No name stands twice."""
    assert len({gpu.name for gpu in GPUS}) == len(GPUS)


@EVERY
def test_row_has_a_source(gpu: Gpu) -> None:
    """Every total says where it is from."""
    assert len(gpu.source) > 10


@EVERY
def test_total_is_near_the_name(gpu: Gpu) -> None:
    """What PyTorch reports is 80 to 101 % of the size in the name."""
    assert 0.80 <= gpu.total_bytes / (nominal_gib(gpu) * GIB) <= 1.01


@EVERY
def test_context_is_small_and_above_zero(gpu: Gpu) -> None:
    """A context takes between 64 MiB and 1 GiB, and less than a tenth of the card."""
    assert 64 * MIB < gpu.context_bytes < min(GIB, gpu.total_bytes / 10)


@EVERY
def test_usable_is_the_total_less_the_context(gpu: Gpu) -> None:
    """The allocator may reserve what the context leaves."""
    assert gpu.usable_bytes == gpu.total_bytes - gpu.context_bytes


@EVERY
def test_only_nvidia_has_a_compute_capability(gpu: Gpu) -> None:
    """An AMD card has (0, 0) and an architecture that ends in its gfx name."""
    assert (gpu.compute_capability == (0, 0)) == (gpu.vendor == "AMD")
    assert (gpu.vendor == "AMD") == (re.search(r" gfx\w+$", gpu.architecture) is not None)


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [("RTX 3060 12GB", 12_622_168_064), ("RTX 4060 8GB", 8_318_222_336), ("A100 40GB", 42_474_471_424)],
)
def test_published_totals_are_exact(name: str, num_bytes: int) -> None:
    """The three totals of the published measurements are kept to the byte."""
    assert gpu_for(name).total_bytes == num_bytes


@pytest.mark.parametrize(("name", "most_mib"), [("RTX 3060", 141), ("RTX 4060", 117)])
def test_context_keeps_to_the_published_bounds(name: str, most_mib: int) -> None:
    """Context and driver took at most this on the two cards that were measured."""
    assert gpu_for(name).context_bytes <= most_mib * MIB


@pytest.mark.parametrize(("name", "mib"), [("RTX 6000 Ada", 426), ("RTX 3090", 256), ("B200", 612)])
def test_context_meets_reports_of_bare_contexts(name: str, mib: int) -> None:
    """A reported bare context lies below the estimate by no more than what is loaded on first use."""
    assert 0 <= gpu_for(name).context_bytes / MIB - mib <= 40


@pytest.mark.parametrize("row", [*LIBRARY_WORKSPACES, *ATTENTION_ORDERS, *CONTEXT_RULES])
def test_knowledge_has_a_source(row: object) -> None:
    """Every row of the other tables says where it is from."""
    assert len(getattr(row, "source", "")) > 10


# -- what follows from the architecture


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("T4", 8_519_680),
        ("V100 16GB", 8_519_680),
        ("A100 40GB", 8_519_680),
        ("RTX 4090", 8_519_680),
        ("H100", 33_554_432),
        ("B200", 33_554_432),
        ("B300", 33_554_432),
        ("RTX 5090", 33_554_432),
        ("MI250X", 33_554_432),
        ("MI300X", 134_217_728),
        ("MI355X", 134_217_728),
        ("RX 7900 XTX", 33_554_432),
    ],
)
def test_workspace_follows_the_architecture(name: str, num_bytes: int) -> None:
    """A workspace is 8.125 MiB, 32 MiB since Hopper and at AMD, 128 MiB since CDNA3."""
    assert gpu_for(name).workspace_bytes == num_bytes


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("V100 32GB", ("efficient", "math")),
        ("T4", ("efficient", "math")),
        ("A100 40GB", ("flash", "efficient", "math")),
        ("RTX 3060", ("flash", "efficient", "math")),
        ("RTX 4060", ("flash", "efficient", "math")),
        ("RTX 5090", ("flash", "efficient", "math")),
        ("H100", ("cudnn", "flash", "efficient", "math")),
        ("GH200", ("cudnn", "flash", "efficient", "math")),
        ("B200", ("cudnn", "flash", "efficient", "math")),
        ("B300", ("cudnn", "flash", "efficient", "math")),
        ("MI300X", ("flash", "efficient", "math")),
    ],
)
def test_attention_follows_the_architecture(name: str, order: tuple[str, ...]) -> None:
    """The kernel of cuDNN is first on Hopper and on Blackwell of the data centre; flash attention begins with Ampere."""
    assert gpu_for(name).attention_order == order


@EVERY
def test_attention_ends_in_math(gpu: Gpu) -> None:
    """The kernel that always runs is the last one."""
    assert gpu.attention_order[-1] == "math"
