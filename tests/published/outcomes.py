"""The committed outcomes, and the packages that they are of."""

import importlib
import json
from pathlib import Path
from typing import Any

from tests.published.package import Package

FILE = Path(__file__).parent / "outcomes.json"


def names() -> list[str]:
    """The files of ``packages/``."""
    return sorted(path.stem for path in (Path(__file__).parent / "packages").glob("[a-z]*.py"))


def package(name: str) -> Package:
    """What a file of ``packages/`` says."""
    return importlib.import_module(f"tests.published.packages.{name}").PACKAGE


def committed() -> dict[str, Any]:
    """What :func:`write` wrote."""
    return json.loads(FILE.read_text()) if FILE.exists() else {"packages": {}}


def write(table: dict[str, Any]) -> None:
    table["packages"] = dict(sorted(table["packages"].items()))
    FILE.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n")
