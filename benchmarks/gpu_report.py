"""The results of gpu.py as Markdown: one table for each section, whatever its rows hold."""

from __future__ import annotations

from typing import Any

from search import mib, table

MIB_SUFFIX, FRAC_SUFFIX = "_bytes", "_frac"


def markdown(report: dict[str, Any]) -> str:
    """The report as tables."""
    about = report["environment"]
    parts = ["# On a real GPU\n" if not about.get("rehearsal") else "# A rehearsal without a GPU\n"]
    parts.append(
        "`python benchmarks/gpu.py`: " + "; ".join(f"{name} {shown(name, of)}" for name, of in about.items()) + ".\n"
    )
    header = ["section", "ended", "holds what it claims", "seconds"]
    parts.append(table(header, [[s["section"], s["ended"], yes_or_no(s["ok"]), s["seconds"]] for s in report["sections"]]))
    for section in report["sections"]:
        parts.append(f"## {section['section']}\n")
        parts.append(table_of(section["rows"]) if section["rows"] else "No rows.\n")
        if section["said"]:
            parts.append("```text\n" + section["said"].replace("```", "'''").strip() + "\n```\n")
    return "\n".join(parts)


def table_of(rows: list[dict[str, Any]]) -> str:
    """Rows that may have different columns; a record inside a row has columns of its own."""
    flat = [flattened(row) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    header = [name.replace(MIB_SUFFIX, ", MiB").replace(FRAC_SUFFIX, "").replace("_", " ") for name in names]
    return table(header, [[shown(name, row.get(name)) for name in names] for row in flat])


def flattened(row: dict[str, Any], before: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a b": 1}."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        found |= flattened(value, f"{before}{name} ") if isinstance(value, dict) else {before + name: value}
    return found


def shown(name: str, value: Any) -> str:
    """A value by its name's unit."""
    if value is None or value == "":
        return ""
    if isinstance(value, bool):
        return yes_or_no(value)
    if name.endswith(MIB_SUFFIX) and isinstance(value, int):
        return mib(value, 3)
    if name.endswith(FRAC_SUFFIX) and isinstance(value, float):
        return f"{value * 100:+.2f} %"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(shown("", one) for one in value)
    if isinstance(value, dict):
        return " ".join(shown("", one) for one in value.values() if one is not None)
    return str(value).replace("|", "/").replace("\n", " ")


def yes_or_no(value: bool) -> str:
    """A truth value as a word."""
    return "yes" if value else "**no**"
