"""A file imports only from rows above it, or from its own folder; lazy and typing-only imports included."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import autoaccum

ROOT = Path(autoaccum.__file__).parent

ROWS = (
    ("errors", "signals"),
    ("units",),
    ("records", "files"),
    ("schedule", "divisions", "caps", "timing"),
    ("search", "batches", "shards"),
    ("choose", "comparing", "tradeoffs", "devices", "preserve", "ranks", "calling", "scaled_losses", "mean_losses"),
    ("levers", "meeting", "backward", "admitting"),
    ("losses", "catching", "gradients", "rewind", "sharding", "engines", "wrapped"),
    ("workload", "reduction", "lockstep"),
    ("request",),
    ("window", "budget", "fingerprint", "environment"),
    ("company",),
    ("probing", "checking", "agreeing"),
    ("prediction",),
    ("report", "optuna_terms"),
    ("study",),
    ("session",),
    ("cache", "foreseeing", "predicting"),
    ("exploring", "reaching"),
    ("writing",),
    ("plan", "proportional"),
    ("tune", "accumulate"),
    ("targets", "integrations"),
    ("worker", "cli_reports"),
    ("cli",),
    ("entry",),
    ("__main__", "__init__"),
)
ROW_OF = {name: row for row, names in enumerate(ROWS) for name in names}
WITHOUT_TORCH = (
    "errors",
    "signals",
    "units",
    "records",
    "files",
    "schedule",
    "divisions",
    "caps",
    "timing",
    "search",
    "choose",
    "comparing",
    "tradeoffs",
    "cli",
    "cli_reports",
    "entry",
)


def unit_of(path: Path) -> str:
    """The first part of a module's path below the package: a file's stem or a folder's name."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py").removesuffix(".pyi")


def imports_of(path: Path) -> set[str]:
    """Every module that a file names in an import statement, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ("autoaccum." if node.level else "") + (node.module or "")
            found |= {base.rstrip(".")} | {f"{base}.{alias.name}" for alias in node.names}
    return found


FILES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_file_imports_only_from_rows_above(path: Path) -> None:
    """No import leads to the file's own row (but its own folder) or below it."""
    own = unit_of(path)
    if own == "__init__":
        return
    for module in imports_of(path):
        if module.startswith("autoaccum."):
            other = module.split(".")[1]
            if other in ROW_OF and other != own:
                assert ROW_OF[other] < ROW_OF[own], f"{path.name} imports {module}"


def test_every_file_has_a_row() -> None:
    """A new file or folder must be given its row."""
    assert {unit_of(path) for path in FILES} <= set(ROW_OF)


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_pure_file_does_not_import_torch(name: str) -> None:
    """Decisions, records and the command line do without torch."""
    files = [path for path in FILES if unit_of(path) == name]
    assert files and not any(module.split(".")[0] == "torch" for path in files for module in imports_of(path))


def test_test_would_notice_an_upward_import(tmp_path: Path) -> None:
    """An import inside a function, from a row below, is seen."""
    path = tmp_path / "records.py"
    path.write_text("def lazy():\n    from autoaccum.tune import autotune\n    return autotune\n")
    assert "autoaccum.tune" in imports_of(path)
    assert ROW_OF["tune"] > ROW_OF["records"]
