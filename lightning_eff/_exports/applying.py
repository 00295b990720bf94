"""``lightning_eff.apply``: without a Trainer, what a run does to a module's architecture before it trains."""

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
_CONFIGURED: "WeakSet[nn.Module]" = WeakSet()  # whose configure_model runs, which may itself call apply


def apply(module: M, *techniques: Architecture, batch: Any = None) -> M:
    """Change ``module`` in place as a Trainer with these callbacks does before it trains, and return it.

    Names, shapes and, after the same ``seed_everything``, values are those of the Trainer's module, so that a checkpoint of
    such a run loads strictly into ``apply(plain)``::

        module = lightning_eff.apply(Plain(), technique)
        module.load_state_dict(torch.load(path, weights_only=True)["state_dict"])

    ``Plain.load_from_checkpoint`` builds the plain module, and so cannot take it. The checkpoint names the techniques and
    their settings under ``["lightning_eff"]["architecture"]``.

    Several techniques act in their own order, whatever order they are given in. One that was applied already with the same
    settings is passed over; one whose settings are neutral does nothing. What ``configure_model`` builds is built before;
    layers that ``setup`` builds must be there.

    Args:
        module: a LightningModule or any other module; the ordinary module that it was, with other submodules.
        techniques: whose purpose is other parameters.
        batch: of the module's data, for techniques that must see it run (which say so) and cannot make an input up.

    Raises:
        TypeError: if ``module`` is no module, or something else than such techniques is given.
        ValueError: if a technique finds nothing to act on, was applied with other settings or contradicts another; the
            module is then as it was.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"lightning_eff.apply: got {_kind(module)}; expected a module, and then techniques.")
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
            f" {_known()}. Others change how a module is trained, and not what it is: put them into the Trainer's callbacks."
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
    """The techniques that have this way in: the package's, and others that are imported."""
    exported = [public.found(name) for name in public.HOMES]
    found = [cls for cls in exported if isinstance(cls, type) and issubclass(cls, Architecture)]
    names = Counter(cls.__name__ for cls in [*found, *_subclasses(Architecture)] if not cls.__name__.startswith("_"))
    return (
        ", ".join(sorted(names))
        or "none is there yet but subclasses of lightning_eff._core._architecture.technique.Architecture"
    )


def _subclasses(cls: type) -> Iterator[type]:
    for direct in cls.__subclasses__():
        yield direct
        yield from _subclasses(direct)
