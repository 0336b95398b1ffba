"""Which GPUs are known by name, and what each leaves to PyTorch: totals, what lies outside the allocator, kernels.

Mostly data: a row a card, each with its source. Knows nothing of models, batches or the allocator, and must never ask a
driver or import torch: a card that is present is described by `autoaccum.devices`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from autoaccum.records import Record

MIB = 2**20

Vendor = Literal["NVIDIA", "AMD"]


class LibraryWorkspace(Record, frozen=True, kw_only=True):
    """One workspace of the matrix library, which PyTorch takes through its caching allocator, in bytes.

    `targets`: beginnings of the compute capability ("9.") or of the gfx name ("gfx94"); "" is every other one.
    """

    vendor: Vendor
    targets: tuple[str, ...]
    num_bytes: int
    source: str


class AttentionOrder(Record, frozen=True, kw_only=True):
    """The kernels of `scaled_dot_product_attention` in the order PyTorch tries them; `targets` as in `LibraryWorkspace`."""

    vendor: Vendor
    targets: tuple[str, ...]
    kernels: tuple[str, ...]
    source: str


class ContextRule(Record, frozen=True, kw_only=True):
    """What a context reserves for each multiprocessor, in bytes; `targets` as in `LibraryWorkspace`.

    `fixed_bytes`: what comes on top, whatever the number of multiprocessors.
    """

    vendor: Vendor
    targets: tuple[str, ...]
    multiprocessor_bytes: int
    fixed_bytes: int
    source: str


# In all three tables the first row holds that has the vendor and one of the beginnings.
_CUBLAS = "aten/src/ATen/cuda/CublasHandlePool.cpp of PyTorch, parseChosenWorkspaceSize"
LIBRARY_WORKSPACES = (
    LibraryWorkspace(
        vendor="NVIDIA",
        targets=("9.", "10.", "12."),
        num_bytes=4096 * 8 * 1024,
        source=f"{_CUBLAS}: 32 MiB; before the branch named majors 10 and 12, only 9.0 had it",
    ),
    LibraryWorkspace(
        vendor="NVIDIA", targets=("",), num_bytes=(2 * 4096 + 8 * 16) * 1024, source=f"{_CUBLAS}: :4096:2:16:8, in KiB"
    ),
    LibraryWorkspace(
        vendor="AMD",
        targets=("gfx94", "gfx95"),
        num_bytes=128 * MIB,
        source=f"{_CUBLAS}, USE_ROCM; hipBLASLt takes another 76 MiB, in a pool of its own",
    ),
    LibraryWorkspace(vendor="AMD", targets=("",), num_bytes=32 * MIB, source=f"{_CUBLAS}, USE_ROCM"),
)

_SDP = "aten/src/ATen/native/transformers/cuda/sdp_utils.cpp of PyTorch"
ATTENTION_ORDERS = (
    AttentionOrder(
        vendor="NVIDIA",
        targets=("9.0", "10.0", "10.3"),
        kernels=("cudnn", "flash", "efficient", "math"),
        source=f"{_SDP}, check_prefer_cudnn_attention; only with a cuDNN that is new enough (9.9, lately 9.15.1)",
    ),
    AttentionOrder(
        vendor="NVIDIA",
        targets=("8.", "9.", "10.", "11.", "12."),
        kernels=("flash", "efficient", "math"),
        source=f"{_SDP}: flash attention needs 8.0 to 12.1",
    ),
    AttentionOrder(
        vendor="NVIDIA",
        targets=("",),
        kernels=("efficient", "math"),
        source=f"{_SDP}: memory-efficient attention needs 5.0; before 8.0 it has no bfloat16, which is left to math",
    ),
    AttentionOrder(
        vendor="AMD", targets=("",), kernels=("flash", "efficient", "math"), source=f"{_SDP}, USE_ROCM: both are AOTriton's"
    ),
)

# A context reserves local memory and stack for every thread that can be resident, so it grows with the multiprocessors.
# 2 KiB a thread is within 20 MiB of the four reports of a bare context that were found: pytorch#28394 TITAN V 320 MiB
# (80 of 2048 threads: 320), unsloth-zoo#1053 RTX 6000 Ada 426 (142 of 1536: 426), InvokeAI#9413 RTX 3090 256 (82 of 1536:
# 246), unsloth#8669 B200 612 (148 of 2048: 592). On top come kernels and library state that are loaded on first use. With
# 40 MiB for these, RTX 3060 and 4060 come to 124 and 112 MiB; xMem's published measurements bound context and driver there
# to 141 and 117.
_THREAD_BYTES = 2048
_LOADED_BYTES = 40 * MIB
_THREADS = "resident threads per multiprocessor of the CUDA C++ programming guide, 2 KiB each"
CONTEXT_RULES = (
    ContextRule(
        vendor="NVIDIA",
        targets=("7.5",),
        multiprocessor_bytes=1024 * _THREAD_BYTES,
        fixed_bytes=_LOADED_BYTES,
        source=f"1024 {_THREADS}; no report of a Turing card found",
    ),
    ContextRule(
        vendor="NVIDIA",
        targets=("8.6", "8.9", "12."),
        multiprocessor_bytes=1536 * _THREAD_BYTES,
        fixed_bytes=_LOADED_BYTES,
        source=f"1536 {_THREADS}; InvokeAI#9413 (RTX 3090), unsloth-zoo#1053 (RTX 6000 Ada), xMem's bounds",
    ),
    ContextRule(
        vendor="NVIDIA",
        targets=("",),
        multiprocessor_bytes=2048 * _THREAD_BYTES,
        fixed_bytes=_LOADED_BYTES,
        source=f"2048 {_THREADS}; pytorch#28394 (TITAN V), unsloth#8669 (B200)",
    ),
    ContextRule(
        vendor="AMD",
        targets=("",),
        multiprocessor_bytes=0,
        fixed_bytes=410 * MIB,
        source="Quartermaster#24: about 0.4 GiB per process on an RX 7900 XTX; assumed for the others",
    ),
)


class Gpu(Record, frozen=True, kw_only=True):
    """A GPU as the prediction needs it; all sizes in bytes.

    `total_bytes`: what `torch.cuda.get_device_properties` and an out-of-memory message say. `compute_capability`: (0, 0)
    for AMD, where `architecture` ends in the gfx name. `context_bytes`: an estimate of what lies outside the allocator:
    context, kernels loaded, the driver's own. `source`: where `total_bytes` is from.
    """

    name: str
    total_bytes: int
    compute_capability: tuple[int, int]
    architecture: str
    vendor: Vendor = "NVIDIA"
    context_bytes: int
    source: str

    @property
    def workspace_bytes(self) -> int:
        """One workspace of cuBLAS or hipBLAS: a training process has one per thread that multiplies matrices."""
        return next(row for row in LIBRARY_WORKSPACES if _holds(row, self)).num_bytes

    @property
    def attention_order(self) -> tuple[str, ...]:
        """The kernels of `scaled_dot_product_attention` in the order PyTorch tries them; "math" always runs."""
        return next(row for row in ATTENTION_ORDERS if _holds(row, self)).kernels

    @property
    def usable_bytes(self) -> int:
        """What the caching allocator may reserve: the total less `context_bytes`, above zero."""
        return self.total_bytes - self.context_bytes


def _holds(row: LibraryWorkspace | AttentionOrder, gpu: Gpu) -> bool:
    return row.vendor == gpu.vendor and _target(gpu.compute_capability, gpu.architecture).startswith(row.targets)


def _target(compute_capability: tuple[int, int], architecture: str) -> str:
    if compute_capability == (0, 0):
        return architecture.split()[-1]
    return "{}.{}".format(*compute_capability)


def _context_bytes(vendor: Vendor, target: str, multiprocessors: int) -> int:
    rule = next(row for row in CONTEXT_RULES if row.vendor == vendor and target.startswith(row.targets))
    return multiprocessors * rule.multiprocessor_bytes + rule.fixed_bytes


class _Family(NamedTuple):
    """What the rows of one architecture share."""

    architecture: str
    compute_capability: tuple[int, int]
    vendor: Vendor = "NVIDIA"


_VOLTA = _Family("Volta", (7, 0))
_TURING = _Family("Turing", (7, 5))
_AMPERE = _Family("Ampere", (8, 0))
_AMPERE_SMALL = _Family("Ampere", (8, 6))
_ADA = _Family("Ada", (8, 9))
_HOPPER = _Family("Hopper", (9, 0))
_BLACKWELL = _Family("Blackwell", (10, 0))
_BLACKWELL_ULTRA = _Family("Blackwell", (10, 3))
_BLACKWELL_SMALL = _Family("Blackwell", (12, 0))
_CDNA2 = _Family("CDNA2 gfx90a", (0, 0), "AMD")
_CDNA3 = _Family("CDNA3 gfx942", (0, 0), "AMD")
_CDNA4 = _Family("CDNA4 gfx950", (0, 0), "AMD")
_RDNA3 = _Family("RDNA3 gfx1100", (0, 0), "AMD")

_XMEM = "result files of the xMem project (MIT), total_memory in bytes"
_LOG = "MiB in the device line of a public training log on Linux"
_PRINTED = "MiB of get_device_properties printed in a public repository, Linux"
_MESSAGE = "GiB in public out-of-memory messages (two decimals)"
_LIKE = "derived: the nominal size less what this sibling lacks of its own:"

# Totals are of Linux; Windows reports some 1 to 3 % more. They depend on the driver: recent ones keep some 0.5 to 2 % more
# to themselves, so where several are known the row has the smallest. RTX 3060, RTX 4060 and A100 40GB hold what the
# published measurements had. Multiprocessors (compute units at AMD) are of the makers' data sheets.
# Columns: name, total in MiB, family, multiprocessors, where the total is from.
_ROWS: tuple[tuple[str, float, _Family, int, str], ...] = (
    ("GTX 1660 Ti 6GB", 5914, _TURING, 24, f"{_LOG}, torch 1.8"),
    ("RTX 2060 6GB", 5918, _TURING, 30, f"{_LOG}, torch 2.2"),
    ("RTX 2060 12GB", 12288 - 226, _TURING, 34, f"{_LIKE} RTX 2060 6GB, 226 MiB"),
    ("RTX 2070 8GB", 8192 - 210, _TURING, 36, f"{_LIKE} RTX 2080 Super, 210 MiB"),
    ("RTX 2070 Super 8GB", 8192 - 210, _TURING, 40, f"{_LIKE} RTX 2080 Super, 210 MiB"),
    ("RTX 2080 8GB", 8192 - 210, _TURING, 46, f"{_LIKE} RTX 2080 Super, 210 MiB"),
    ("RTX 2080 Super 8GB", 7982, _TURING, 48, f"{_LOG}, torch 1.13"),
    ("RTX 2080 Ti 11GB", 10825, _TURING, 68, f"{_LOG}, torch 2.6; earlier drivers 11009 to 11020"),
    ("T4 16GB", 14930, _TURING, 40, f"{_PRINTED}, 2025; 15095 on Colab"),
    ("V100 16GB", 16130, _VOLTA, 80, f"{_PRINTED}; 16160 on most machines"),
    ("V100 32GB", 32494, _VOLTA, 80, f"{_LOG}, torch 2.6"),
    ("RTX 3050 8GB", 8192 - 359, _AMPERE_SMALL, 20, f"{_LIKE} RTX 3060 Ti, 359 MiB"),
    ("RTX 3060 12GB", 12_622_168_064 / MIB, _AMPERE_SMALL, 28, _XMEM),
    ("RTX 3060 Ti 8GB", 7833, _AMPERE_SMALL, 38, f"{_LOG}, torch 2.11"),
    ("RTX 3070 8GB", 7842, _AMPERE_SMALL, 46, f"{_LOG}, torch 2.10; earlier drivers 7974"),
    ("RTX 3070 Ti 8GB", 8192 - 350, _AMPERE_SMALL, 48, f"{_LIKE} RTX 3070, 350 MiB"),
    ("RTX 3080 10GB", 10002, _AMPERE_SMALL, 68, f"{_LOG}, torch 2.6"),
    ("RTX 3080 12GB", 12117, _AMPERE_SMALL, 70, f"{_LOG}, torch not stated"),
    ("RTX 3080 Ti 12GB", 11910.625, _AMPERE_SMALL, 80, f"{_LOG}; earlier drivers 12054"),
    ("RTX 3090 24GB", 24124, _AMPERE_SMALL, 82, f"{_LOG}, torch 2.13; earlier drivers 24250 to 24268"),
    ("RTX 3090 Ti 24GB", 24110, _AMPERE_SMALL, 84, f"{_LOG}, torch 2.9; earlier drivers 24214"),
    ("RTX A4000 16GB", 16117, _AMPERE_SMALL, 48, f"{_LOG}, torch 1.12"),
    ("RTX A5000 24GB", 24114, _AMPERE_SMALL, 64, f"{_PRINTED}; also 24138"),
    ("RTX A6000 48GB", 48676, _AMPERE_SMALL, 84, _PRINTED),
    ("A10 24GB", 22587, _AMPERE_SMALL, 72, f"{_LIKE} A10G, 1989 MiB, most of it for ECC"),
    ("A10G 24GB", 22587, _AMPERE_SMALL, 80, f"{_PRINTED}; earlier drivers 22723"),
    ("A40 48GB", 45495, _AMPERE_SMALL, 84, f"{_LIKE} L40S, 3657 MiB, most of it for ECC; 48688 with ECC off"),
    ("A100 40GB", 42_474_471_424 / MIB, _AMPERE, 108, f"{_XMEM}; 40441 MiB on Colab in 2026"),
    ("A100 80GB", 81154, _AMPERE, 108, f"{_LOG}, torch 2.6; the 79.25 GiB of out-of-memory messages"),
    ("RTX 4060 8GB", 8_318_222_336 / MIB, _ADA, 24, _XMEM),
    ("RTX 4060 Ti 8GB", 7806, _ADA, 34, f"{_LOG}, torch 2.12"),
    ("RTX 4060 Ti 16GB", 16384 - 450, _ADA, 34, f"{_LIKE} RTX 4070 Ti Super, 450 MiB"),
    ("RTX 4070 12GB", 11994, _ADA, 46, f"{_LOG}, torch 1.13; 12002 with torch 2.5"),
    ("RTX 4070 Super 12GB", 12288 - 294, _ADA, 56, f"{_LIKE} RTX 4070, 294 MiB"),
    ("RTX 4070 Ti 12GB", 12288 - 294, _ADA, 60, f"{_LIKE} RTX 4070, 294 MiB"),
    ("RTX 4070 Ti Super 16GB", 15934, _ADA, 66, f"{_PRINTED}, 2026; also 15974"),
    ("RTX 4080 16GB", 16049, _ADA, 76, _PRINTED),
    ("RTX 4080 Super 16GB", 15944, _ADA, 80, f"{_LOG}, torch 2.12"),
    ("RTX 4090 24GB", 24081, _ADA, 128, f"{_LOG}, torch 2.5; earlier drivers 24209 (23.64 GiB) to 24217"),
    ("L4 24GB", 22563, _ADA, 58, f"{_LOG}, torch 2.11; earlier drivers 22693"),
    ("L40 48GB", 45495, _ADA, 142, f"{_LIKE} L40S, 3657 MiB, most of it for ECC"),
    ("L40S 48GB", 45495, _ADA, 142, f"{_LOG}, torch 2.2; 45589 elsewhere"),
    ("RTX 6000 Ada 48GB", 50_865_307_648 / MIB, _ADA, 142, "unsloth-zoo#1053: total_memory in bytes, torch 2.10"),
    ("RTX 5060 8GB", 8192 - 536, _BLACKWELL_SMALL, 30, f"{_LIKE} RTX 5060 Ti 16GB, 536 MiB"),
    ("RTX 5060 Ti 8GB", 8192 - 536, _BLACKWELL_SMALL, 36, f"{_LIKE} RTX 5060 Ti 16GB, 536 MiB"),
    ("RTX 5060 Ti 16GB", 15848, _BLACKWELL_SMALL, 36, f"{_LOG}, torch 2.12; also 15841"),
    ("RTX 5070 12GB", 12288 - 536, _BLACKWELL_SMALL, 48, f"{_LIKE} RTX 5060 Ti 16GB, 536 MiB"),
    ("RTX 5070 Ti 16GB", 16384 - 544, _BLACKWELL_SMALL, 70, f"{_LIKE} RTX 5080, 544 MiB"),
    ("RTX 5080 16GB", 15840, _BLACKWELL_SMALL, 84, _LOG),
    ("RTX 5090 32GB", 32102, _BLACKWELL_SMALL, 170, f"{_LOG}, torch 2.12; out-of-memory messages 31.34 to 31.37 GiB"),
    ("RTX PRO 6000 Blackwell 96GB", 97250, _BLACKWELL_SMALL, 188, f"{_PRINTED}, Server Edition; 94.97 GiB in messages"),
    ("H100 80GB", 81082, _HOPPER, 132, f"{_PRINTED}, SXM5, torch 2.0; 81090 later; the PCIe card is taken to be the same"),
    ("H100 NVL 94GB", 93.10 * 1024, _HOPPER, 132, f"{_MESSAGE}; none names the card, no other has this size"),
    ("GH200 96GB", 94.88 * 1024, _HOPPER, 132, "litgpt#1892: 94.88 GiB in an out-of-memory message"),
    ("H200 141GB", 143156, _HOPPER, 132, f"{_PRINTED}; 139.80 GiB in messages"),
    ("B200 180GB", 182631, _BLACKWELL, 148, f"{_PRINTED}; also 182642"),
    ("B300 288GB", 267.69 * 1024, _BLACKWELL_ULTRA, 160, f"{_MESSAGE}; none names the card, no other has this size"),
    ("MI210 64GB", 65520, _CDNA2, 104, f"{_LIKE} MI250X GCD, 16 MiB"),
    ("MI250X GCD 64GB", 65520, _CDNA2, 110, f"{_PRINTED}; PyTorch sees each of the two dies as a device"),
    ("MI300X 192GB", 196592, _CDNA3, 304, f"{_PRINTED}, torch 2.6"),
    ("MI325X 256GB", 255.98 * 1024, _CDNA3, 304, f"{_MESSAGE}; none names the card, no other has this size"),
    ("MI355X 288GB", 287.98 * 1024, _CDNA4, 256, f"{_MESSAGE}; none names the card, no other has this size"),
    ("RX 7900 XTX 24GB", 23.98 * 1024, _RDNA3, 96, f"{_MESSAGE} of HIP"),
)


def _gpu(name: str, total_mib: float, family: _Family, multiprocessors: int, source: str) -> Gpu:
    target = _target(family.compute_capability, family.architecture)
    return Gpu(
        name=name,
        total_bytes=int(total_mib * MIB),
        compute_capability=family.compute_capability,
        architecture=family.architecture,
        vendor=family.vendor,
        context_bytes=_context_bytes(family.vendor, target, multiprocessors),
        source=source,
    )


GPUS: tuple[Gpu, ...] = tuple(sorted((_gpu(*row) for row in _ROWS), key=lambda gpu: gpu.total_bytes))
