"""Which GPU a name or a size stands for: as people write it, as torch reports it, and what is refused."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoaccum.errors import InvalidRequestError
from autoaccum.prediction.gpu_names import gpu_for, gpus_for
from autoaccum.prediction.gpus import GPUS, Gpu

GIB = 2**30


# -- names


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_name_finds_its_row(gpu: Gpu) -> None:
    """The name in the table stands for its own row."""
    assert gpu_for(gpu.name) is gpu


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("RTX 3060 12GB", "RTX 3060 12GB"),
        ("rtx3060", "RTX 3060 12GB"),
        ("RTX 3060 12 GiB", "RTX 3060 12GB"),
        ("rtx-3060_12gb", "RTX 3060 12GB"),
        ("3090", "RTX 3090 24GB"),
        ("RTX-3090-Ti", "RTX 3090 Ti 24GB"),
        ("4070tisuper", "RTX 4070 Ti Super 16GB"),
        ("5060 ti 16gb", "RTX 5060 Ti 16GB"),
        ("a100 80gb", "A100 80GB"),
        ("H100", "H100 80GB"),
        ("h100 pcie", "H100 80GB"),
        ("h100 nvl", "H100 NVL 94GB"),
        ("a6000", "RTX A6000 48GB"),
        ("mi250x", "MI250X GCD 64GB"),
        ("7900 XTX", "RX 7900 XTX 24GB"),
    ],
)
def test_what_people_write_finds_the_row(written: str, name: str) -> None:
    """Case, brand, blanks, dashes and the unit of the size do not matter."""
    assert gpu_for(written).name == name


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA GeForce GTX 1660 Ti", "GTX 1660 Ti 6GB"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX 2080 Ti 11GB"),
        ("NVIDIA GeForce RTX 3060", "RTX 3060 12GB"),
        ("NVIDIA GeForce RTX 4060", "RTX 4060 8GB"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX 4070 Ti Super 16GB"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090 32GB"),
        ("NVIDIA RTX A4000", "RTX A4000 16GB"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada 48GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Blackwell 96GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX PRO 6000 Blackwell 96GB"),
        ("Tesla T4", "T4 16GB"),
        ("Tesla V100-SXM2-16GB", "V100 16GB"),
        ("Tesla V100-PCIE-32GB", "V100 32GB"),
        ("Tesla V100S-PCIE-32GB", "V100 32GB"),
        ("NVIDIA A10", "A10 24GB"),
        ("NVIDIA A10G", "A10G 24GB"),
        ("NVIDIA A40", "A40 48GB"),
        ("NVIDIA L4", "L4 24GB"),
        ("NVIDIA L40", "L40 48GB"),
        ("NVIDIA L40S", "L40S 48GB"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB"),
        ("NVIDIA H100 80GB HBM3", "H100 80GB"),
        ("NVIDIA H100 PCIe", "H100 80GB"),
        ("NVIDIA H100 NVL", "H100 NVL 94GB"),
        ("NVIDIA GH200 480GB", "GH200 96GB"),
        ("NVIDIA H200", "H200 141GB"),
        ("NVIDIA B200", "B200 180GB"),
        ("NVIDIA B300 SXM6 AC", "B300 288GB"),
        ("AMD Instinct MI210", "MI210 64GB"),
        ("AMD Instinct MI250X/MI250", "MI250X GCD 64GB"),
        ("AMD Instinct MI300X", "MI300X 192GB"),
        ("AMD Radeon RX 7900 XTX", "RX 7900 XTX 24GB"),
    ],
)
def test_what_torch_reports_finds_the_row(reported: str, name: str) -> None:
    """A name as `torch.cuda.get_device_name` gives it stands for the card."""
    assert gpu_for(reported).name == name


def test_gpu_stands_for_itself() -> None:
    """A `Gpu` is returned as it is."""
    assert gpu_for(GPUS[0]) is GPUS[0]


@pytest.mark.parametrize(
    ("written", "variants"),
    [
        ("A100", ("A100 40GB", "A100 80GB")),
        ("NVIDIA GeForce RTX 3080", ("RTX 3080 10GB", "RTX 3080 12GB")),
        ("rtx4060ti", ("RTX 4060 Ti 8GB", "RTX 4060 Ti 16GB")),
        ("V100", ("V100 16GB", "V100 32GB")),
    ],
)
def test_ambiguous_name_lists_the_variants(written: str, variants: tuple[str, ...]) -> None:
    """A name of several memory sizes is refused with all of them."""
    with pytest.raises(InvalidRequestError) as caught:
        gpu_for(written)
    assert all(repr(variant) in str(caught.value) for variant in variants)


@pytest.mark.parametrize(("written", "meant"), [("rtx 3909", "RTX 3090 24GB"), ("RTX 6000", "RTX 6000 Ada 48GB")])
def test_unknown_name_shows_the_nearest(written: str, meant: str) -> None:
    """A name that is not known is refused with three that look like it."""
    with pytest.raises(InvalidRequestError) as caught:
        gpu_for(written)
    near = re.findall(r"'([^']+GB)'", str(caught.value).split("nearest", 1)[1])
    assert meant in near and len(near) == 3


def test_unknown_name_says_that_bytes_are_accepted() -> None:
    """Who has a card that is not in the table learns what to write instead."""
    with pytest.raises(InvalidRequestError, match="24GiB"):
        gpu_for("Voodoo 2")


@pytest.mark.parametrize(
    "written",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA GeForce GTX 1660 Ti with Max-Q Design",
        "RTX 3060 8GB",
        "A100 64GB",
        "Quadro RTX 6000",
        "RTX",
        "",
    ],
)
def test_other_card_of_a_similar_name_is_refused(written: str) -> None:
    """A laptop's card, a slice of a card or another size is not taken for the card in the table."""
    with pytest.raises(InvalidRequestError, match="nearest"):
        gpu_for(written)


# -- sizes


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [("24GiB", 24 * GIB), ("24 gib", 24 * GIB), ("80GB", 80 * 10**9), (24 * GIB, 24 * GIB), (str(24 * GIB), 24 * GIB)],
)
def test_size_is_the_total(size: str | int, num_bytes: int) -> None:
    """A size stands for a card of that total."""
    assert gpu_for(size).total_bytes == num_bytes


@given(st.integers(GIB, 2**50))
def test_any_card_size_leaves_something_usable(num_bytes: int) -> None:
    """Every size of a whole card leaves the allocator something."""
    assert 0 < gpu_for(num_bytes).usable_bytes < num_bytes


def test_sized_gpu_is_named_after_its_size() -> None:
    """A card that is only a size is named after it and says who gave it."""
    gpu = gpu_for("24GiB")
    assert (gpu.name, gpu.source) == ("24.00 GiB GPU", "given by the caller")


def test_sized_gpu_is_like_ampere() -> None:
    """A card that is only a size has the kernels of compute capability 8.6."""
    gpu, known = gpu_for("24GiB"), gpu_for("RTX 3090")
    assert gpu.compute_capability == (8, 6)
    assert (gpu.workspace_bytes, gpu.attention_order) == (known.workspace_bytes, known.attention_order)


@pytest.mark.parametrize("size", [0, -1, "0", "0GiB", "-5GiB", True, False, None, 3.5, "80%", "100 %", "2**30"])
def test_no_size_is_refused(size: object) -> None:
    """Nothing, less than nothing, a bool, a fraction of a byte and a share are no memory of a card."""
    with pytest.raises(InvalidRequestError, match="gpu="):
        gpu_for(size)  # type: ignore[arg-type]


def test_size_below_a_context_is_refused() -> None:
    """A size that leaves nothing, as of a forgotten unit, is refused with what it was read as."""
    with pytest.raises(InvalidRequestError, match="gpu='24' is 24 B"):
        gpu_for("24")


# -- several


def test_all_is_every_listed_gpu() -> None:
    """The word "all", however written, is the table."""
    assert gpus_for("all") == gpus_for(" ALL ") == GPUS
    assert [gpu.name for gpu in gpus_for(["A100 80GB", "T4"])] == ["T4 16GB", "A100 80GB"]
    assert isinstance(gpus_for("24GiB")[0], Gpu)


def test_no_gpu_at_all_is_refused() -> None:
    """An empty list names no GPU to predict for."""
    with pytest.raises(InvalidRequestError, match=r"gpu=\[\] is no GPU"):
        gpus_for([])
