"""For griffe, which reads docstrings without importing them: Sphinx's roles as Markdown."""

import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))  # griffe loads this file by its path

from prose import markdown  # pyright: ignore[reportMissingImports]


class Roles(griffe.Extension):
    """Rewrites each docstring as it is read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Before anything of it is shown."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
