"""TARGET texts: built-in models with weird options, files and modules that are none, paths, and bytes that no name has."""

from __future__ import annotations

import tempfile
from pathlib import Path
from urllib.parse import quote

from hostile.judging import Broken
from hostile.texts import texts
from hypothesis import strategies as st

from autoaccum.targets import load_target
from autoaccum.workload import Workload

_SOURCE = """
import torch
def build(): return torch.nn.Linear(3, 2), torch.randn(2, 3)
def nothing(): return None
def three(): return 1, 2, 3
number = 5
"""

SMALL_GPT = "vocabulary=16&seq_len=4&layers=1&width=8&heads=2"
SMALL_RESNET = "image=8&width=2&blocks=1&classes=2"
SMALL = {
    "demo:gpt": SMALL_GPT,
    "demo:resnet": SMALL_RESNET,
    "hf:gpt2": "n_layer=1&n_embd=8&n_head=2&vocab_size=16&n_positions=8&seq_len=4",
    "hf:llama": "hidden_size=8&intermediate_size=8&num_hidden_layers=1&num_attention_heads=2&vocab_size=16&seq_len=4",
    "hf:bert": "hidden_size=8&intermediate_size=8&num_hidden_layers=1&num_attention_heads=2&vocab_size=16&seq_len=4",
}


def quoted(text: str) -> str:
    """The text as a query holds it."""
    return quote(text, errors="replace")


ODD_VALUES = (
    "0",
    "-1",
    "1",
    "2",
    "3",
    "1.5",
    "true",
    "null",
    "[]",
    "{}",
    "[[1]]",
    "nan",
    "NaN",
    "Infinity",
    "1e9",
    "1e999999",
    "9" * 400,
    "9" * 5000,
    "9" * 10**5,
    "[" * 10**5,
    "1000000000",
    "4611686018427387904",
    "",
    '"8"',
    "%00",
    "%1b[31m",
    "..%2f..",
    "\\u0000",
)
names = st.sampled_from(
    (
        "vocabulary",
        "seq_len",
        "layers",
        "width",
        "heads",
        "image",
        "blocks",
        "classes",
        "n_layer",
        "hidden_size",
        "vocab_size",
        "num_hidden_layers",
        "hidden_act",
        "attn_implementation",
        "torch_dtype",
        "model_type",
        "name_or_path",
        "__class__",
        "self",
        "trust_remote_code",
    )
) | texts.map(quoted)
odd_values = st.sampled_from(ODD_VALUES) | texts.map(quoted) | texts
queries = st.lists(st.builds("{}={}".format, names, odd_values), max_size=2).map("&".join) | texts


def _small(kind: str, query: str, last: bool) -> str:
    """Small unless the hostile options say otherwise."""
    return f"{kind}?{SMALL[kind]}&{query}" if last else f"{kind}?{query}&{SMALL[kind]}"


demos = st.builds(_small, st.sampled_from(("demo:gpt", "demo:resnet")), queries, st.booleans())
configs = st.builds(_small, st.sampled_from(("hf:gpt2", "hf:llama", "hf:bert")), queries, st.booleans())
unknown = st.builds("{}:{}".format, st.sampled_from(("demo", "hf", "torchvision", "DEMO", "http", "file", "")), texts)
places = st.sampled_from(
    (
        "{folder}/sound.py",
        "{folder}/../{name}/sound.py",
        "{folder}",
        "{folder}/broken.txt",
        "{folder}/missing.py",
        "sound",
        "os",
        "json.tool",
        "no.such.module",
        "autoaccum",
        "autoaccum.errors.AutoaccumError",
        "a" * 300 + ".py",
        "/" * 5000 + ".py",
        "x/" * 3000 + "y.py",
        "..",
        ".",
        "a..b",
        "1a",
        "class",
        "\x00.py",
        "a\x00b",
        "/dev/null",
        "/proc/self/mem",
        "/dev/zero.py",
    )
)
functions = st.sampled_from(
    (
        "build",
        "nothing",
        "three",
        "number",
        "missing",
        "__doc__",
        "__class__",
        "__builtins__",
        "torch",
        "build()",
        "b u i l d",
        "",
    )
)
others = st.builds("{}:{}".format, places, functions | texts) | st.builds("{}{}:{}".format, places, texts, functions)
CASES = st.one_of(demos, unknown, others, others, texts)
HF_CASES = configs

_FOLDER = Path(tempfile.mkdtemp(prefix="hostile-targets-"))
(_FOLDER / "sound.py").write_text(_SOURCE)
(_FOLDER / "broken.txt").write_text("no Python")


def check(text: str) -> None:
    """A workload with something to train."""
    workload = load_target(text.replace("{folder}", str(_FOLDER)).replace("{name}", _FOLDER.name))
    if not isinstance(workload, Workload) or workload.num_trainable < 1:
        raise Broken("a workload without anything to train")
