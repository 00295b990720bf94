"""The page "Works with", written from the committed outcomes."""

import re
from pathlib import Path
from typing import Any

from tests.published.techniques import TRIED

FILE = Path(__file__).parent.parent.parent / "docs" / "works_with.md"
_MARKS = {"works": "yes", "refused": "refused", "failed": "**fails**"}

_HEAD = """# Works with

These published packages train with our techniques, and no package is changed for it. `make published` repeats the check.
Each technique trains the package's own module for 12 steps, through a `Trainer` of the name that the package imports.
The check asks for five things:

- Training runs, and the weights show that the technique acted. Techniques that promise the weights of plain training give
  them bit for bit.
- A run that resumes from a checkpoint in the middle of an epoch ends with the same weights, bit for bit.
- The checkpoint loads strictly into the plain module, or into `lightning_eff.apply(plain, technique)` where the technique
  changes the parameters.
- The state of the techniques loads under `weights_only=True`.
- Nothing stays on the module after the run.

"yes" means that all five hold. "refused" means that the technique raises an error, because the module lacks what the
technique acts on. The reasons are listed below the table. An error with a wrong reason counts as a failure. "yes*" means that
the technique works with the limit that is listed below. An empty cell was not tested.

Precision plugins and `EfficiencyMonitor` are tested together with `ExactResume()`. They need it to resume exactly in the middle
of an epoch.
"""


def text(table: dict[str, Any]) -> str:
    """The page's text."""
    rows = {name: row for name, row in table["packages"].items() if "techniques" in row}
    absent = {name: row for name, row in table["packages"].items() if "techniques" not in row}
    parts = [
        _HEAD,
        _measured(table),
        _packages(rows),
        _matrix(rows),
        _own_fits(rows),
        _reasons(rows),
        _failures(rows),
        _absent(absent),
    ]
    return "\n".join(part for part in parts if part)


def _measured(table: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in table["versions"].items())
    return f"Last run on {table['date']}: {table['machine']}, {versions}.\n"


def _packages(rows: dict[str, Any]) -> str:
    lines = ["## Packages", "", "| package | version | module | Trainer of | installed by |", "|---|---|---|---|---|"]
    for name, row in rows.items():
        lines.append(f"| {name} | {row['version']} | {row['model']} | `{row['trainer']}` | `{row['install']}` |")
    lines.append("")
    notes = [f"- **{name}**: {row['note']}" for name, row in rows.items() if row.get("note")]
    return "\n".join([*lines, *notes, ""] if notes else lines)


def _matrix(rows: dict[str, Any]) -> str:
    lines = ["## Techniques", "", f"| technique | kind | {' | '.join(rows)} |", "|---|---|" + "---|" * len(rows)]
    for technique, tried in TRIED.items():
        marks = [_mark(row["techniques"].get(technique)) for row in rows.values()]
        lines.append(f"| `{technique}` | {tried.kind} | {' | '.join(marks)} |")
    return "\n".join([*lines, ""])


def _mark(outcome: dict[str, Any] | None) -> str:
    return (
        ""
        if outcome is None
        else _MARKS[outcome["outcome"]] + ("*" if outcome["outcome"] == "works" and outcome["reason"] else "")
    )


def _own_fits(rows: dict[str, Any]) -> str:
    with_fit = {name: row["own_fit"] for name, row in rows.items() if row.get("own_fit")}
    if not with_fit:
        return ""
    lines = [
        "## Through the package's own fit",
        "",
        "Some packages have their own `fit` or `train` method that takes `callbacks=`.",
    ]
    lines += ["These techniques are tested with it, too.", ""]
    techniques = list(dict.fromkeys(key for found in with_fit.values() for key in found))
    lines += [f"| package | {' | '.join(f'`{key}`' for key in techniques)} |", "|---|" + "---|" * len(techniques)]
    lines += [
        f"| {name} | {' | '.join(_mark(found.get(key)) for key in techniques)} |" for name, found in with_fit.items()
    ]
    return "\n".join([*lines, ""])


def _sentence(reason: str) -> str:
    """A message's first sentence, without the technique's name, fit for a table."""
    body = re.sub(r"^\w+(\(.*?\))?:\s*", "", reason, count=1)
    first = re.split(r"(?<=[a-z)'\]])[.;] ", body, maxsplit=1)[0].strip().rstrip(".")
    return first[:220].replace("|", "\\|").replace("<", "&lt;")


def _reasons(rows: dict[str, Any]) -> str:
    lines = ["## Reasons", ""]
    for name, row in rows.items():
        by_reason: dict[str, list[str]] = {}
        for technique, outcome in row["techniques"].items():
            if outcome["outcome"] == "refused":
                by_reason.setdefault(_sentence(outcome["reason"]), []).append(f"`{technique}`")
            elif outcome["outcome"] == "works" and outcome["reason"]:
                by_reason.setdefault(outcome["reason"], []).append(f"`{technique}`*")
        if by_reason:
            lines += [
                f"**{name}**",
                "",
                *(f"- {', '.join(names)}: {reason}." for reason, names in by_reason.items()),
                "",
            ]
    return "\n".join(lines)


def _failures(rows: dict[str, Any]) -> str:
    lines = [
        f"- **{name}**, `{technique}`: {outcome['reason'][:300].replace('<', '&lt;')}"
        for name, row in rows.items()
        for technique, outcome in {
            **row["techniques"],
            **{f"{k}, own fit": v for k, v in row.get("own_fit", {}).items()},
        }.items()
        if outcome["outcome"] == "failed"
    ]
    return "\n".join(["## Known failures", "", *lines, ""]) if lines else ""


def _absent(rows: dict[str, Any]) -> str:
    lines = [f"- **{name}**: {row.get('not_installed') or row.get('failed')}" for name, row in rows.items()]
    return "\n".join(["## Not tested on that machine", "", *lines, ""]) if lines else ""
