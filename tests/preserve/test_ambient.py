"""The modes of the process are as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autoaccum.preserve import preserved

from .networks import CPU, RunChild, disturb, state_of, train, trained_network


def flip(owner: object, name: str) -> Callable[[], None]:
    """Turn a boolean attribute over."""
    return lambda: setattr(owner, name, not getattr(owner, name))


MODES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "grad": (torch.is_grad_enabled, lambda: torch.set_grad_enabled(False)),
    "default-dtype": (torch.get_default_dtype, lambda: torch.set_default_dtype(torch.float64)),
    "autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda: torch.set_autocast_enabled("cpu", True)),
    "autocast-dtype": (lambda: torch.get_autocast_dtype("cpu"), lambda: torch.set_autocast_dtype("cpu", torch.float16)),
    "autocast-cache": (torch.is_autocast_cache_enabled, lambda: torch.set_autocast_cache_enabled(False)),
    "matmul-precision": (torch.get_float32_matmul_precision, lambda: torch.set_float32_matmul_precision("medium")),
    "anomaly": (torch.is_anomaly_enabled, lambda: torch.autograd.set_detect_anomaly(True)),
    "deterministic": (torch.get_deterministic_debug_mode, lambda: torch.set_deterministic_debug_mode("error")),
    "threads": (torch.get_num_threads, lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
    "cudnn": (lambda: torch.backends.cudnn.enabled, flip(torch.backends.cudnn, "enabled")),
    "cudnn-benchmark": (lambda: torch.backends.cudnn.benchmark, flip(torch.backends.cudnn, "benchmark")),
    "cudnn-deterministic": (lambda: torch.backends.cudnn.deterministic, flip(torch.backends.cudnn, "deterministic")),
    "cudnn-tf32": (lambda: torch.backends.cudnn.allow_tf32, flip(torch.backends.cudnn, "allow_tf32")),
    "matmul-tf32": (lambda: torch.backends.cuda.matmul.allow_tf32, flip(torch.backends.cuda.matmul, "allow_tf32")),
}


@pytest.mark.parametrize("mode", MODES)
def test_mode_is_as_before(mode: str) -> None:
    """A mode of the process or the thread that a step changes is what it was."""
    read, change = MODES[mode]
    before = read()
    with preserved(nn.Linear(2, 2), device=CPU):
        change()
        assert read() != before
    assert read() == before


def test_grad_mode_off_stays_off() -> None:
    """A caller that has gradients switched off finds them off, though the block switched them on."""
    with torch.no_grad():
        with preserved(nn.Linear(2, 2), device=CPU):
            torch.set_grad_enabled(True)
        assert not torch.is_grad_enabled()


def test_caller_in_inference_mode() -> None:
    """A caller in inference mode gets everything back, and the model can be trained afterwards."""
    model, optimizer = trained_network()
    before = state_of(model, optimizer)
    with torch.inference_mode(), preserved(model, optimizer, device=CPU), torch.inference_mode(False), torch.enable_grad():
        disturb(model, optimizer)
    assert state_of(model, optimizer) == before
    train(model, optimizer)


needs_new_names = pytest.mark.skipif(
    not hasattr(torch.backends, "fp32_precision"), reason="this torch has no fp32_precision settings, which came with 2.9"
)


@pytest.fixture(scope="module")
def precisions(run_child: RunChild) -> dict[str, Any]:
    """Precisions around two blocks: one that uses the new names, and one that finds them in use. They do not mix back."""
    answer: dict[str, Any] = run_child(
        """
        import torch
        from autoaccum.preserve import preserved
        backends = torch.backends
        layer, device = torch.nn.Linear(2, 2), torch.device("cpu")

        def read():
            return [torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32,
                    backends.fp32_precision, backends.cudnn.conv.fp32_precision, backends.mkldnn.matmul.fp32_precision,
                    backends.cuda.matmul.fp32_precision]

        seen = {"old names": read()}
        with preserved(layer, device=device):
            backends.fp32_precision = "tf32"
            backends.cuda.matmul.fp32_precision = "tf32"
            backends.cudnn.conv.fp32_precision = "ieee"
            backends.mkldnn.matmul.fp32_precision = "bf16"
        seen["old names again"] = read()
        backends.cuda.matmul.fp32_precision = "tf32"
        with preserved(layer, device=device):
            backends.cuda.matmul.fp32_precision = "ieee"
            seen["new name inside"] = backends.cuda.matmul.fp32_precision
        seen["new name after"] = backends.cuda.matmul.fp32_precision
        answer(seen)
        """
    )
    return answer


@pytest.mark.slow
@needs_new_names
def test_precision_that_the_block_set_by_its_new_name(precisions: dict[str, Any]) -> None:
    """After a block that used the new names all settings are as before, and the old names can be read again."""
    assert precisions["old names again"] == precisions["old names"]


@needs_new_names
def test_precision_by_its_new_name(precisions: dict[str, Any]) -> None:
    """A precision that the user set by its new name, which makes the old one unreadable, is kept and restored."""
    assert precisions["new name inside"] == "ieee"
    assert precisions["new name after"] == "tf32"
