"""Which parts of a model are its repeated blocks: in architectures written here as they commonly are, and in libraries'."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from autoaccum.errors import InvalidRequestError
from autoaccum.levers.blocks import find_blocks
from autoaccum.targets.demos import gpt, resnet

from .models import CASE_NAMED, Case, Encoder, Mlp, ResidualBlock, Stack


def names(model: nn.Module, *given: str) -> list[str]:
    """The blocks that are found, in order."""
    blocks = find_blocks(model, given)
    known = dict(model.named_modules())
    assert all(known[block.name] is block.module for block in blocks)
    return [block.name for block in blocks]


def numbered(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{index}" for index in range(count)]


# Transformers.


def test_gpt() -> None:
    """The blocks of a GPT, and not the lists inside of them."""
    assert names(gpt(vocabulary=16, seq_len=4, layers=3, width=8, heads=2).module) == numbered("blocks.", 3)


def test_encoder_of_torch() -> None:
    """The layers of torch's own encoder."""
    assert names(Encoder()) == numbered("encoder.layers.", 3)


def test_encoder_and_decoder_of_torch() -> None:
    """The layers of both halves of torch's own transformer, the encoder's first."""
    model = nn.Transformer(8, 2, 2, 3, 16, batch_first=True)
    assert names(model) == numbered("encoder.layers.", 2) + numbered("decoder.layers.", 3)


def test_experts_inside_of_blocks() -> None:
    """In a mixture of experts the blocks are found, not the experts in their lists."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(8, 4)
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(4))

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.mixture = nn.Linear(8, 8), Experts()

    assert names(Stack(*(Layer() for _ in range(3)))) == numbered("blocks.", 3)


def test_two_kinds_of_blocks_in_turn() -> None:
    """Where dense and sparse blocks alternate, all are found in the order of the list."""

    class Other(Mlp):
        pass

    assert names(Stack(Mlp(), Other(), Mlp(), Other())) == numbered("blocks.", 4)


def test_block_of_a_kind_of_its_own_is_left_out() -> None:
    """A first block of another class, of which there is only one, is not a repeated one."""

    class First(Mlp):
        pass

    assert names(Stack(First(), Mlp(), Mlp())) == ["blocks.1", "blocks.2"]


def test_blocks_in_a_dictionary() -> None:
    """Blocks in a `ModuleDict`, as some codes name them by their number."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transformer = nn.ModuleDict({"embedding": nn.Embedding(4, 8), "h": nn.ModuleList(Mlp() for _ in range(3))})
            self.more = nn.ModuleDict({"0": Mlp(), "1": Mlp()})

    assert names(Model()) == [*numbered("transformer.h.", 3), "more.0", "more.1"]


# Convolutional networks.


def test_resnet_of_the_demo() -> None:
    """Residual blocks of all stages that stand in one sequence, in order."""
    assert names(resnet(image=8, width=4, blocks=2).module) == numbered("", 9)[3:]


class StagedResNet(nn.Module):
    """Stages as attributes, each a sequence of blocks, as torchvision has it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 7), nn.BatchNorm2d(4)
        self.layer1 = nn.Sequential(ResidualBlock(4), ResidualBlock(4))
        self.layer2 = nn.Sequential(ResidualBlock(4, 8), ResidualBlock(8))
        self.fc = nn.Linear(8, 10)


def test_resnet_of_stages() -> None:
    """The blocks of all stages, whose downsampling sequences are not blocks of their own."""
    assert names(StagedResNet()) == ["layer1.0", "layer1.1", "layer2.0", "layer2.1"]


def test_resnet_with_one_block_in_each_stage() -> None:
    """Blocks are repeated also where no stage has more than one of them."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(ResidualBlock(4)), nn.Sequential(ResidualBlock(4, 8)))
    assert names(model) == ["1.0", "2.0"]


def test_unet_of_lists() -> None:
    """The blocks on the way down, the middle and the way up, in the order in which they are registered."""

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.downs = nn.ModuleList([ResidualBlock(4, 8), ResidualBlock(8, 16)])
            self.middle = ResidualBlock(16)
            self.ups = nn.ModuleList([ResidualBlock(16, 8), ResidualBlock(8, 4)])

    assert names(UNet()) == ["downs.0", "downs.1", "ups.0", "ups.1"]


def test_unet_of_lists_in_lists() -> None:
    """Levels that are lists of blocks and samplers: the blocks of all levels, as diffusion models have them."""

    class Sampler(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3)

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            level = [nn.ModuleList([ResidualBlock(4), ResidualBlock(4), Sampler()]) for _ in range(2)]
            self.downs, self.ups = nn.ModuleList(level), nn.ModuleList([nn.ModuleList([ResidualBlock(8, 4)])])

    found = names(UNet())
    assert [name for name in found if not name.endswith("2")] == [
        "downs.0.0",
        "downs.0.1",
        "downs.1.0",
        "downs.1.1",
        "ups.0.0",
    ]


class Shifted(nn.Module):
    """A block with a sequence inside, of a hierarchical transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


class Merging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reduction, self.norm = nn.Linear(32, 16), nn.LayerNorm(32)


def test_stages_in_a_sequence() -> None:
    """Sequences in a sequence are stages, as in Swin: the blocks in them are found, with the merging between them."""
    patches = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.LayerNorm(8))
    stages = [nn.Sequential(Shifted(), Shifted()), Merging(), nn.Sequential(Shifted(), Shifted(), Shifted())]
    model = nn.Sequential(nn.Sequential(patches, *stages), nn.Linear(8, 2))
    assert names(model) == ["0.1.0", "0.1.1", "0.3.0", "0.3.1", "0.3.2"]


def test_layer_scale_blocks_of_convnext() -> None:
    """Blocks whose own body is a sequence, in stages that are sequences, in one sequence, as ConvNeXt has them."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Conv2d(8, 8, 7, padding=3, groups=8), nn.GELU(), nn.Conv2d(8, 8, 1))
            self.scale = nn.Parameter(torch.ones(8, 1, 1))

    stages = [
        nn.Sequential(Scaled(), Scaled()),
        nn.Sequential(nn.BatchNorm2d(8), nn.Conv2d(8, 8, 2)),
        nn.Sequential(Scaled()),
    ]
    assert names(nn.Sequential(*stages)) == ["0.0", "0.1", "2.0"]


def test_sequences_that_are_blocks() -> None:
    """Where nothing is repeated inside of sequences, the sequences are the blocks."""
    layers = [nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(4)]
    assert names(nn.Sequential(*layers, nn.Flatten(), nn.Linear(4, 2))) == numbered("", 4)


# Models without blocks.


class Vgg(nn.Module):
    """One flat sequence of convolutions and one of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(5) for layer in (nn.Conv2d(4, 4, 3), nn.ReLU(), nn.MaxPool2d(2))]
        self.features, self.classifier = nn.Sequential(*layers), nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(4, 4),
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
        nn.ModuleList(nn.Linear(4, 4) for _ in range(5)),
        nn.LSTM(4, 4, num_layers=3),
        nn.Sequential(nn.Embedding(4, 4), nn.LSTM(4, 4, num_layers=2)),
        nn.Sequential(*(nn.Sequential(nn.ReLU(), nn.Dropout()) for _ in range(3)), nn.Linear(4, 4)),
        Vgg(),
    ],
    ids=["layer", "mlp", "list of layers", "lstm", "embedding and lstm", "without weights", "vgg"],
)
def test_no_blocks(model: nn.Module) -> None:
    """Where nothing that has parts and weights is repeated, there are no blocks."""
    assert names(model) == []


def test_one_block_alone() -> None:
    """One block is not repeated."""
    assert names(Stack(Mlp())) == []


def test_block_that_is_used_several_times() -> None:
    """A block that is in the list more than once is named once, by its first place."""
    shared = Mlp()
    assert names(Stack(shared, Mlp(), shared)) == ["blocks.0", "blocks.1"]


def test_scripted_blocks_are_left_out() -> None:
    """What was compiled by `torch.jit` runs its own code, whatever its `forward` is replaced by."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = [torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU())) for _ in range(2)]
    assert names(nn.Sequential(*scripted, nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8)))) == ["2", "3"]


def test_order_is_that_of_the_forward_pass(case: Case) -> None:
    """For every model of the suite the blocks are found, and in the order in which they first run."""
    made = case.make()
    blocks, ran = find_blocks(made.module), []
    assert len(blocks) == case.blocks
    for block in blocks:
        block.module.register_forward_pre_hook(lambda module, args: ran.append(module))
    made.loss(made.module, made.batches[0])
    assert list(dict.fromkeys(map(id, ran))) == [id(block.module) for block in blocks]


def test_blocks_are_outermost(case: Case) -> None:
    """No block lies inside of another one, and no block comes twice."""
    found = names(case.make().module)
    assert not [one for one in found for other in found if one.startswith(f"{other}.")]
    assert len(set(found)) == len(found)


# Models of transformers.

SMALL = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 32}
VISION = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "image_size": 16, "patch_size": 8}


def made_by(kind: str, **options: Any) -> nn.Module:
    """A model of transformers from its configuration, nothing downloaded."""
    transformers = pytest.importorskip("transformers")
    model_of = {
        "Llama": "LlamaForCausalLM",
        "Bert": "BertForMaskedLM",
        "T5": "T5ForConditionalGeneration",
        "ViT": "ViTForImageClassification",
        "Albert": "AlbertForMaskedLM",
        "Mixtral": "MixtralForCausalLM",
        "GPT2": "GPT2LMHeadModel",
    }
    config = getattr(transformers, f"{kind}Config")(**options)
    made: nn.Module = getattr(transformers, model_of[kind])(config)
    return made


@pytest.mark.parametrize(
    ("kind", "options", "prefixes", "layers"),
    [
        ("Llama", {**SMALL, "num_hidden_layers": 4}, ["model.layers."], [4]),
        ("Bert", {**SMALL, "num_hidden_layers": 4}, ["bert.encoder.layer."], [4]),
        ("GPT2", {"n_embd": 16, "n_head": 2, "n_layer": 4, "vocab_size": 32}, ["transformer.h."], [4]),
        ("Mixtral", {**SMALL, "num_hidden_layers": 2, "num_key_value_heads": 2}, ["model.layers."], [2]),
        ("ViT", {**VISION, "num_hidden_layers": 3}, ["vit.layers.", "vit.encoder.layer."], [3]),
        (
            "T5",
            {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_heads": 2, "num_layers": 2, "num_decoder_layers": 3},
            ["encoder.block.", "decoder.block."],
            [2, 3],
        ),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_models_of_transformers(kind: str, options: dict[str, Any], prefixes: Sequence[str], layers: Sequence[int]) -> None:
    """All layers in order; where the layers lie has changed with the version of the library."""
    found = names(made_by(kind, **options))
    if len(layers) == 1:
        assert found in [numbered(prefix, layers[0]) for prefix in prefixes]
    else:
        assert found == [name for prefix, count in zip(prefixes, layers, strict=True) for name in numbered(prefix, count)]


def test_albert() -> None:
    """ALBERT's one layer, which runs for all its layers, is not repeated in the model."""
    assert names(made_by("Albert", **SMALL, num_hidden_layers=4, embedding_size=8)) == []


def test_layers_of_transformers_in_a_model_of_ones_own() -> None:
    """In a model around one of transformers, its layers are the blocks, whatever else is repeated."""

    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.language, self.adapters = CASE_NAMED["llama"].make().module, nn.ModuleList(Mlp() for _ in range(2))

    found = names(Tower())
    assert [name for name in found if name.startswith("language")] == numbered("language.model.layers.", 3)


@pytest.mark.slow
def test_transformers_is_not_imported() -> None:
    """Looking for blocks does not import transformers."""
    source = (
        "import sys; from torch import nn; from autoaccum.levers.blocks import find_blocks; "
        "find_blocks(nn.ModuleList(nn.TransformerEncoderLayer(8, 2) for _ in range(2))); "
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", source], check=False).returncode == 0


# The caller's own list.


def test_named_blocks() -> None:
    """The caller's names are taken in the caller's order, each once, whatever kind of module they are."""
    assert names(Stack(Mlp(), Mlp()), "blocks.1", "inlet", "blocks.1") == ["blocks.1", "inlet"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["blocks.7"], "has no block 'blocks.7'; expected names as model.named_modules"),
        (["blocks.0", "nonsense"], "has no block 'nonsense'"),
        ([""], "has no block ''"),
        (["blocks.0", "blocks.0.wide"], "block 'blocks.0.wide' lies inside another block of the list"),
        (["blocks.1.wide", "blocks"], "block 'blocks.1.wide' lies inside another block of the list"),
    ],
)
def test_names_that_cannot_be_taken(given: list[str], words: str) -> None:
    """An unknown name, the model itself, and a block inside of another one are refused in words."""
    with pytest.raises(InvalidRequestError, match=words.replace("(", "\\(")):
        names(Stack(Mlp(), Mlp()), *given)


def test_names_with_the_same_beginning() -> None:
    """Only whole parts of a name count: block 10 is not inside of block 1."""
    assert names(Stack(*(Mlp() for _ in range(11))), "blocks.1", "blocks.10") == ["blocks.1", "blocks.10"]


@pytest.mark.parametrize("make", [lambda: Stack(Mlp(), Mlp()), StagedResNet])
def test_looking_changes_nothing(make: Callable[[], nn.Module]) -> None:
    """The model has the same modules and attributes after it was looked at."""
    model = make()
    before = [(name, part, dict(vars(part))) for name, part in model.named_modules()]
    find_blocks(model)
    for (name, part, held), (other_name, other) in zip(before, model.named_modules(), strict=True):
        assert (name, part) == (other_name, other)
        assert vars(other).keys() == held.keys()
        assert all(vars(other)[key] is value for key, value in held.items())
