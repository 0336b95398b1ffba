"""Models of transformers and torchvision: the right class, one real loss, and clear words when it cannot be."""

from __future__ import annotations

import math
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autoaccum.errors import InvalidRequestError, MissingExtraError
from autoaccum.targets import load_target

TINY = "hidden_size=32&num_hidden_layers=1&num_attention_heads=2&intermediate_size=64&vocab_size=50"
TINY_T5 = "d_model=32&d_ff=64&num_layers=1&num_heads=2&d_kv=16&vocab_size=50"


@pytest.fixture
def transformers() -> Any:
    """The library, where it is installed."""
    return pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.mark.usefixtures("transformers")
@pytest.mark.parametrize(
    ("target", "kind"),
    [
        (f"hf:llama?{TINY}&seq_len=8", "LlamaForCausalLM"),
        (f"hf:bert?{TINY}&seq_len=8", "BertForMaskedLM"),
        (f"hf:t5?{TINY_T5}&seq_len=8", "T5ForConditionalGeneration"),
    ],
)
def test_language_model_takes_a_step(target: str, kind: str) -> None:
    """Each kind of language model is built as it is trained, and gives a finite loss with gradients."""
    workload = load_target(target)
    batch = workload.source.take(3)
    loss = workload.loss(batch)
    loss.backward()
    assert type(workload.module).__name__ == kind
    assert batch["input_ids"].shape == (3, 8) and int(batch["input_ids"].max()) < 50
    assert loss.shape == () and math.isfinite(loss.item())
    assert any(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in workload.trainable)


@pytest.mark.usefixtures("transformers")
@pytest.mark.parametrize(("target", "valid"), [(f"hf:llama?{TINY}", 2 * 127), (f"hf:bert?{TINY}", 2 * 128)])
def test_weight_counts_what_the_loss_is_a_mean_over(target: str, valid: int) -> None:
    """A causal model's loss leaves out the first label, a masked one's does not; 128 positions are the default."""
    workload = load_target(target)
    assert callable(workload.weight)
    assert workload.weight(workload.source.take(2)) == valid


@pytest.mark.usefixtures("transformers")
def test_options_reach_the_config() -> None:
    """Options are set in the config by their names, the attention's implementation among them."""
    config = load_target(f"hf:llama?{TINY}&seq_len=4&num_key_value_heads=1&attn_implementation=eager").module.config
    assert (config.hidden_size, config.num_key_value_heads, config._attn_implementation) == (32, 1, "eager")


@pytest.mark.usefixtures("transformers")
def test_a_decoder_of_an_encoder_type_is_causal() -> None:
    """A BERT that is said to be a decoder is built as a causal language model."""
    assert type(load_target(f"hf:bert?{TINY}&is_decoder=true").module).__name__ == "BertLMHeadModel"


@pytest.mark.usefixtures("transformers")
@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("hf:", "transformers has no model type ''."),
        ("hf:llamma", "transformers has no model type 'llamma'; is it llama"),
        ("hf:llama?hiden_size=32", "the config of hf:llama has no option 'hiden_size'; is it hidden_size"),
        ("hf:vit", "hf:vit is not a language model; write a function"),
        ("hf:llama?hidden_size=wide", "transformers cannot build hf:llama so: "),
        ("hf:llama?hidden_size=33&num_attention_heads=2&num_hidden_layers=1", "transformers cannot build hf:llama so: "),
        ("hf:llama?seq_len=long", "seq_len='long' is not possible"),
        ("hf:llama?seq_len=0", "seq_len=0 is not possible"),
    ],
)
def test_what_transformers_cannot_build_is_refused(target: str, said: str) -> None:
    """A type, an option or a value that the library does not have is refused before a large default is built."""
    with pytest.raises(InvalidRequestError, match=re.escape(said)):
        load_target(target)


@pytest.mark.parametrize(
    ("library", "target", "extra"), [("transformers", "hf:llama", "hf"), ("torchvision", "torchvision:resnet50", "vision")]
)
def test_a_missing_library_gives_the_pip_line(
    library: str, target: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the library, the error holds the command that installs it."""
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtraError, match=re.escape(f'python -m pip install "autoaccum[{extra}]"')):
        load_target(target)


class Outputs(tuple[torch.Tensor, torch.Tensor]):
    """What GoogLeNet returns in train mode: the logits, and those of a side branch."""


class Classifier(nn.Module):
    """A stand-in for torchvision's models, which return a tuple in train mode where they have a side branch."""

    def __init__(self, num_classes: int = 10, aux: bool = False) -> None:
        super().__init__()
        self.aux = aux
        self.norm, self.head = nn.BatchNorm2d(3), nn.Linear(3, num_classes)

    def forward(self, x: torch.Tensor) -> Any:
        logits = self.head(self.norm(x).mean((2, 3)))
        return Outputs((logits, logits)) if self.aux and self.training else logits


@pytest.fixture
def torchvision(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A library with the functions of torchvision that are used; the keywords of each model built."""
    built: list[dict[str, Any]] = []

    def get_model(name: str, **options: Any) -> nn.Module:
        built.append(options)
        return Classifier(**{key: value for key, value in options.items() if key != "weights"})

    models = SimpleNamespace(get_model=get_model, list_models=lambda module: ["resnet18", "resnet50"])
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(models=models))
    return built


@pytest.mark.parametrize("options", ["", "&aux=true"])
def test_classifier_takes_a_step(torchvision: list[dict[str, Any]], options: str) -> None:
    """A torchvision model is built without weights, in train mode, and gives a loss, with or without a side branch."""
    workload = load_target(f"torchvision:resnet18?image=16&num_classes=7{options}")
    images, labels = workload.source.take(3)
    loss = workload.loss((images, labels))
    loss.backward()
    assert torchvision[0]["weights"] is None and workload.module.training
    assert images.shape == (3, 3, 16, 16) and int(labels.max()) < 7
    assert math.isfinite(loss.item())


@pytest.mark.usefixtures("torchvision")
def test_looking_at_a_classifier_leaves_its_statistics() -> None:
    """Finding out the number of classes does not move the BatchNorm statistics of the model."""
    norm = load_target("torchvision:resnet18?image=16").module.norm
    assert int(norm.num_batches_tracked) == 0


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("torchvision:resnet51", "torchvision has no classification model 'resnet51'; is it resnet"),
        ("torchvision:maskrcnn_resnet50_fpn", "torchvision has no classification model 'maskrcnn_resnet50_fpn'"),
        ("torchvision:resnet18?depth=3", "torchvision cannot build 'resnet18' so: "),
        ("torchvision:resnet18?image=wide", "torchvision cannot build 'resnet18' so: "),
    ],
)
def test_what_torchvision_cannot_build_is_refused(torchvision: list[dict[str, Any]], target: str, said: str) -> None:
    """A model that is no classifier, whose backbone would be downloaded, or a wrong option is refused."""
    with pytest.raises(InvalidRequestError, match=re.escape(said)):
        load_target(target)
    assert len(torchvision) == ("so: " in said and "wide" not in target)
