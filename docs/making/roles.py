"""A griffe extension that converts Sphinx's roles in docstrings to Markdown."""

import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))  # griffe loads this file by its path

from prose import markdown  # pyright: ignore[reportMissingImports]


class Roles(griffe.Extension):
    """Rewrites each docstring as it is read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Convert the docstring before it is used."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
