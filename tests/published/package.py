"""What a file of ``packages/`` says of one published package."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Package:
    """One published package, and the module of it that is trained.

    Attributes:
        distribution: its name on the package index.
        model: the module that is trained, in words, for the page.
        build: builds the module and its training loader from a known seed, the same each time.
        imports: the name that it is imported by, where that is not the distribution's.
        requirements: what pip installs for it; none means the distribution alone.
        flags: options of pip, such as ``--no-deps``, where its requirements contradict the versions that are tested.
        trainer: which of Lightning's two names the package imports.
        settings: further arguments of the Trainer.
        trainer_of: makes the package's own Trainer of the module and the arguments; None for Lightning's.
        trusted: whether its checkpoints hold objects of its own, which plain Lightning cannot load with ``weights_only=True``.
        fit: runs the package's own ``fit`` with these callbacks, and returns the trained module; None where it has none.
        refused: by the technique, what the error must say; a refusal that is not listed here is a failure.
        idle: techniques that leave this module as it is, with the reason.
        known: techniques that fail on it today, with what is wrong: known defects, which the page lists.
        note: a remark for the page.
    """

    distribution: str
    model: str
    build: Callable[[], tuple[Any, Any]]
    imports: str = ""
    requirements: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    trainer: str = "lightning.pytorch"
    settings: Mapping[str, Any] = field(default_factory=dict)
    trainer_of: Callable[..., Any] | None = None
    trusted: bool = False
    fit: Callable[[list[Any]], Any] | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    idle: Mapping[str, str] = field(default_factory=dict)
    known: Mapping[str, str] = field(default_factory=dict)
    note: str = ""

    @property
    def imported(self) -> str:
        """The name that it is imported by."""
        return self.imports or self.distribution.replace("-", "_")


class _Captured(BaseException):
    def __init__(self, module: Any, loader: Any) -> None:
        self.module, self.loader = module, loader


def captured(start: Callable[[], Any]) -> tuple[Any, Any]:
    """The module and the training loader that a package's own ``fit`` hands to its Trainer, without training.

    A data module is prepared and asked for its loader.
    """
    found = {}

    def fit(
        self: Any,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        **_: Any,
    ):
        raise _Captured(model, datamodule if train_dataloaders is None else train_dataloaders)

    trainers = [importlib.import_module(name).Trainer for name in ("lightning.pytorch", "pytorch_lightning")]
    for cls in trainers:
        found[cls], cls.fit = cls.fit, fit
    try:
        start()
    except _Captured as got:
        return got.module, got.loader
    finally:
        for cls in trainers:
            cls.fit = found[cls]
    raise RuntimeError("the package's fit called no Trainer.fit")
