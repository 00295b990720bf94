"""Loggers that replace a trainer's own and record nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger
from typing_extensions import override


@contextmanager
def unlogged(module: Any) -> Iterator[None]:
    """Discard what ``module`` writes directly to its trainer's loggers."""
    own: list[Logger] = getattr(getattr(module, "_trainer", None), "loggers", [])
    if not own:
        yield
        return
    module._trainer.loggers = [_Deaf(logger) for logger in own]
    try:
        yield
    finally:
        module._trainer.loggers = own


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Replace a logger's methods."""


class _Deaf(DummyLogger):
    """Looks like ``logger``, with its names and folders. Its methods do nothing, and its experiment is Lightning's dummy."""

    def __init__(self, logger: Logger) -> None:
        super().__init__()
        self._of = logger

    @property
    @override
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(self._of)

    @property
    @override
    def name(self) -> Any:
        return self._of.name

    @property
    @override
    def version(self) -> Any:
        return self._of.version

    @property
    @override
    def root_dir(self) -> str | None:
        return self._of.root_dir

    @property
    @override
    def log_dir(self) -> str | None:
        return self._of.log_dir

    @property
    @override
    def save_dir(self) -> str | None:
        return self._of.save_dir

    @property
    @override
    def group_separator(self) -> str:
        return self._of.group_separator

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        value = getattr(self._of, name)
        return _nothing if callable(value) else value
