"""Finds out which of Lightning's two packages the module of a config uses."""

import importlib
import inspect
import itertools
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_eff._core._lightning.names import OTHER, OWN, package_of


def package_of_module(args: Sequence[str]) -> str:
    """Return the Lightning package of the module that ``args`` and their configs name.

    This imports the classes of the module and the data. It ignores errors, because LightningCLI reports them later.
    """
    named: dict[str, Any] = {}
    for key, value in _named(args):
        named[key] = value
    found = {key: package_of(cls) for key, path in named.items() if (cls := _class(path)) is not None}
    package = found.get("model") or OWN
    if package == OTHER:
        importlib.import_module(f"{package}.cli")
    return package


def _named(args: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the class paths under ``model`` and ``data`` in order; later ones override earlier ones."""
    words = [part for word in args for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for option, value in itertools.pairwise(words):
        if option in ("--config", "-c"):
            yield from _in_config(value)
        for key in ("model", "data"):
            if option in (f"--{key}", f"--{key}.class_path"):
                yield key, value


def _in_config(path: str) -> Iterator[tuple[str, Any]]:
    try:
        config = yaml.safe_load(Path(path).read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return
    sections = [config, *config.values()] if isinstance(config, dict) else []
    for section in sections:  # the file itself, and its subcommands
        for key in ("model", "data"):
            value = section.get(key) if isinstance(section, dict) else None
            value = value.get("class_path") if isinstance(value, dict) else value
            if isinstance(value, str):
                yield key, value


def _class(path: Any) -> type | None:
    """Return the class at a path, or the annotated return type of a function at that path."""
    module, _, name = str(path).rpartition(".")
    try:
        found: Any = getattr(importlib.import_module(module), name) if module else None
        if inspect.isfunction(found):
            found = typing.get_type_hints(found).get("return")
    except Exception:  # the import of a user's file can raise anything
        return None
    return found if inspect.isclass(found) else None
