"""``lightning_eff.apply``: change a module's architecture like a run does, without a Trainer."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_eff._core._architecture.run import configuring
from lightning_eff._core._architecture.technique import Architecture, change
from lightning_eff._core._lightning.names import is_a, is_overridden
from lightning_eff._core._run.checks import check_pairs
from lightning_eff._exports import public

M = TypeVar("M", bound=nn.Module)
_CONFIGURED: "WeakSet[nn.Module]" = WeakSet()  # modules inside configure_model, which may itself call apply


def apply(module: M, *techniques: Architecture, batch: Any = None) -> M:
    """Change ``module`` in place like a Trainer with these callbacks does before training, and return it.

    Names and shapes equal those in the Trainer, and so do values after the same ``seed_everything``. A checkpoint of such a
    run therefore loads strictly into ``apply(plain)``::

        module = lightning_eff.apply(Plain(), technique)
        module.load_state_dict(torch.load(path, weights_only=True)["state_dict"])

    ``Plain.load_from_checkpoint`` cannot load it, because it builds the plain module. The checkpoint lists the techniques with
    their settings under ``["lightning_eff"]["architecture"]``.

    The order of the techniques does not matter. A technique that was already applied with the same settings is skipped, and
    neutral settings do nothing. ``configure_model`` is called first. Layers that ``setup`` builds must already exist.

    Args:
        module: a LightningModule or any other module.
        techniques: techniques that change the architecture.
        batch: a batch of the module's data, for the few techniques that must see the module run. They say so.

    Raises:
        TypeError: if ``module`` is not a module, or another kind of technique is given.
        ValueError: if a technique finds nothing to change, was applied with other settings, or conflicts with another one. The
            module stays unchanged.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"lightning_eff.apply: got {_kind(module)}; expected a module, then techniques.")
    if not techniques:
        raise TypeError(
            "lightning_eff.apply: got a module and no technique; expected one or more that change the architecture:"
            f" {_known()}."
        )
    for technique in techniques:
        if isinstance(technique, Architecture):
            continue
        raise TypeError(
            f"lightning_eff.apply: got {_kind(technique)}; expected an instance of a technique that changes the architecture:"
            f" {_known()}. Other techniques belong in the Trainer's callbacks."
        )
    working = [t for t in techniques if not t.neutral]
    check_pairs(working)
    of_run = configuring()
    in_it = module in _CONFIGURED or (of_run is not None and of_run[0] is module)
    if is_a(module, LightningModule) and not in_it and is_overridden("configure_model", module):
        _CONFIGURED.add(module)
        try:
            module.configure_model()
        finally:
            _CONFIGURED.discard(module)
    seed = torch.initial_seed() % 2**63 if of_run is None else of_run[1]
    change(module, working, seed=seed, batch=batch)
    return module


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"{type(value).__name__}"


def _known() -> str:
    """List the techniques that change the architecture: those of the package, and other imported ones."""
    exported = [public.found(name) for name in public.HOMES]
    found = [cls for cls in exported if isinstance(cls, type) and issubclass(cls, Architecture)]
    names = Counter(cls.__name__ for cls in [*found, *_subclasses(Architecture)] if not cls.__name__.startswith("_"))
    return ", ".join(sorted(names)) or "a subclass of lightning_eff._core._architecture.technique.Architecture"


def _subclasses(cls: type) -> Iterator[type]:
    for direct in cls.__subclasses__():
        yield direct
        yield from _subclasses(direct)
