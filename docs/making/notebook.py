"""The Start notebook: its cells run here, in one process, and it is a page of the site with what they printed."""

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
    """The notebook's cells, as the file has them."""
    return json.loads(FILE.read_text())["cells"]


def source(cell: dict[str, Any]) -> str:
    """A cell's text or code."""
    return "".join(cell["source"])


def printed(cell: dict[str, Any]) -> str:
    """What a cell of code has printed, as it stands in the file."""
    return "".join(line for output in cell["outputs"] for line in output["text"])


def run() -> Iterator[str]:
    """Run the cells of code one after the other, as a notebook would; what each prints."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells()):
        if cell["cell_type"] == "code":
            told = io.StringIO()
            with contextlib.redirect_stdout(told):
                exec(compile(source(cell), f"{FILE.name}, cell {number}", "exec"), names)
            yield told.getvalue()


def text() -> str:
    """The file with what its cells print now."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    content = json.loads(FILE.read_text())
    code = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    for cell, told in zip(code, run(), strict=True):
        lines = told.splitlines(keepends=True)
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def page() -> str:
    """The notebook as a page, at the top of the site."""
    parts = []
    for cell in cells():
        if cell["cell_type"] == "markdown":
            parts.append(source(cell).replace("](../../docs/", "]("))
            continue
        parts.append(f"```python\n{source(cell)}\n```")
        if printed(cell):
            parts.append(f"```text\n{printed(cell).rstrip()}\n```")
    where = FILE.relative_to(ROOT).as_posix()
    parts.append(f"This page is the notebook `{where}`, with what its cells printed when they were last run.")
    return "\n\n".join(parts) + "\n"


def write() -> float:
    """Run the notebook and write what it printed into it; the seconds that this took."""
    began = time.perf_counter()
    FILE.write_text(text())
    return time.perf_counter() - began
