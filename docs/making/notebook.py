"""Runs the Start notebook in one process, and makes a page of its cells and their output."""

import contextlib
import io
import json
import logging
import time
from collections.abc import Iterator
from typing import Any

from docs.making.facts import ROOT

FILE = ROOT / "examples" / "notebooks" / "start.ipynb"
PAGE = "start_notebook.md"


def cells() -> list[dict[str, Any]]:
    """Return the notebook's cells from the file."""
    return json.loads(FILE.read_text())["cells"]


def source(cell: dict[str, Any]) -> str:
    """Return a cell's text or code."""
    return "".join(cell["source"])


def printed(cell: dict[str, Any]) -> str:
    """Return a code cell's output in the file."""
    return "".join(line for output in cell["outputs"] for line in output["text"])


def run() -> Iterator[str]:
    """Run the code cells in order like a notebook, and yield the output of each."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells()):
        if cell["cell_type"] == "code":
            told = io.StringIO()
            with contextlib.redirect_stdout(told):
                exec(compile(source(cell), f"{FILE.name}, cell {number}", "exec"), names)
            yield told.getvalue()


def text() -> str:
    """Return the file's text with new output."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    content = json.loads(FILE.read_text())
    code = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    for cell, told in zip(code, run(), strict=True):
        lines = told.splitlines(keepends=True)
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def page() -> str:
    """Return the notebook as a page for the top of the site."""
    parts = []
    for cell in cells():
        if cell["cell_type"] == "markdown":
            parts.append(source(cell).replace("](../../docs/", "]("))
            continue
        parts.append(f"```python\n{source(cell)}\n```")
        if printed(cell):
            parts.append(f"```text\n{printed(cell).rstrip()}\n```")
    where = FILE.relative_to(ROOT).as_posix()
    parts.append(f"This page is the notebook `{where}` with the output of its last run.")
    return "\n\n".join(parts) + "\n"


def write() -> float:
    """Run the notebook, write its output into the file, and return the seconds of the run."""
    began = time.perf_counter()
    FILE.write_text(text())
    return time.perf_counter() - began
