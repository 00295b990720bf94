"""The equivalents of optimizers with states of 8 bits (bitsandbytes) or 4 bits (torchao), and how to create them."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_eff._core._lightning.extras import install

Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class Equivalent:
    """The replacement of one optimizer.

    Attributes:
        made_by: the package of the module's optimizer.
        name: the name of the replacing class.
        betas: a function that returns the class's ``betas`` for a group of the module's.
        differs: a function that returns why a group's settings have no equivalent, or None.
        trust: whether a step's length is its learning rate times the norm of the weights (LAMB).
    """

    made_by: str
    name: str
    betas: Callable[[dict[str, Any]], tuple[float, ...]]
    differs: Callable[[dict[str, Any]], str | None]
    trust: bool = False


def _betas(group: dict[str, Any]) -> tuple[float, ...]:
    return tuple(float(beta) for beta in group["betas"])


def _never(group: dict[str, Any]) -> str | None:
    return None


def _adam(group: dict[str, Any]) -> str | None:
    if group.get("weight_decay") and not group.get("decoupled_weight_decay"):
        return f"weight_decay={group['weight_decay']} within the gradient (the equivalent decouples it: use AdamW)"
    return _adamw(group)


def _adamw(group: dict[str, Any]) -> str | None:
    return "amsgrad=True" if group.get("amsgrad") else None


def _sgd(group: dict[str, Any]) -> str | None:
    if not group["momentum"]:
        return "momentum=0, which keeps no state"
    if group.get("dampening"):
        return f"dampening={group['dampening']}"
    return "nesterov=True" if group.get("nesterov") else None


def _rmsprop(group: dict[str, Any]) -> str | None:
    if group.get("momentum"):
        return f"momentum={group['momentum']}"
    return "centered=True" if group.get("centered") else None


def _adagrad(group: dict[str, Any]) -> str | None:
    for name in ("lr_decay", "initial_accumulator_value"):
        if group.get(name):
            return f"{name}={group[name]}"
    return None


_TORCH, _OWN = "torch.optim", "lightning_eff"
#: by the module's optimizer, as (package, name)
EIGHT_BIT = {
    (_TORCH, "Adam"): Equivalent(_TORCH, "Adam8bit", _betas, _adam),
    (_TORCH, "AdamW"): Equivalent(_TORCH, "AdamW8bit", _betas, _adamw),
    (_TORCH, "SGD"): Equivalent(_TORCH, "SGD8bit", lambda g: (float(g["momentum"]), 0.0), _sgd),
    (_TORCH, "RMSprop"): Equivalent(_TORCH, "RMSprop8bit", lambda g: (float(g["alpha"]), 0.0), _rmsprop),
    (_TORCH, "Adagrad"): Equivalent(_TORCH, "Adagrad8bit", lambda g: (0.0, 0.0), _adagrad),
    (_OWN, "Lion"): Equivalent(_OWN, "Lion8bit", _betas, _never),
    (_OWN, "LAMB"): Equivalent(_OWN, "AdamW8bit", _betas, _never, trust=True),
}
FOUR_BIT = {
    (_TORCH, "Adam"): Equivalent(_TORCH, "Adam4bit", _betas, _adamw),
    (_TORCH, "AdamW"): Equivalent(_TORCH, "AdamW4bit", _betas, _adamw),
}


def equivalent_of(optimizer: Optimizer, bits: int) -> Equivalent:
    """Return the equivalent of ``optimizer``.

    Raises:
        ValueError: if there is none; the message lists the supported optimizers.
    """
    known = EIGHT_BIT if bits == 8 else FOUR_BIT
    cls = type(optimizer)
    home = _TORCH if cls is getattr(torch.optim, cls.__name__, None) else cls.__module__.partition(".")[0]
    found = known.get((home, cls.__name__))
    has = ", ".join(f"{package}.{name}" for package, name in known)
    if found is None:
        raise ValueError(
            f"EightBitOptimizer(bits={bits}): the module's {cls.__module__}.{cls.__name__} has no {bits}-bit equivalent."
            f" Use {has}, or remove EightBitOptimizer."
        )
    for group in optimizer.param_groups:
        problem = "maximize=True" if group.get("maximize") else found.differs(group)
        if problem is not None:
            raise ValueError(
                f"EightBitOptimizer(bits={bits}): the module's {cls.__name__} has {problem}, which its {bits}-bit equivalent"
                f" does not support. Change this setting, or use another of {has}."
            )
    return found


def imported(package: str, extra: str, what: str) -> Any:
    """Import the package's optimizers.

    Raises:
        ImportError: if it is not installed, with the command to install it.
    """
    try:
        return importlib.import_module(f"{package}.optim")
    except ImportError as error:
        raise ImportError(
            f"{what}: cannot import {package} ({error}). In a clone of lightning_eff, run: {install(extra)}"
        ) from error


def eight_bit(found: Equivalent, groups: Groups, *, min_size: int) -> Optimizer:
    """Create bitsandbytes' optimizer for these groups, with all settings of the module's.

    Args:
        found: the equivalent.
        groups: the module's groups, with ``params`` and all settings.
        min_size: tensors of fewer elements have 32-bit states.
    """
    optim = imported("bitsandbytes", "bitsandbytes", "EightBitOptimizer(bits=8)")
    base: Any = getattr(optim, found.name)

    class Following(base):
        """An optimizer that reads its settings from the module's own groups, where schedulers set them."""

        def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
            at = self.param_groups[gindex]
            settings = {
                "eps": 0.0,
                "weight_decay": 0.0,
                **at,
                "betas": found.betas(at),
                "alpha": 0.0,
                "lr": float(at["lr"]),
            }
            config = super().get_config(gindex, pindex, settings)
            return {**config, "optim_bits": 8, "min_8bit_size": min_size, "max_unorm": 0.0}

        def update_step(self, group: dict[str, Any], p: Tensor, gindex: int, pindex: int) -> None:
            if not found.trust or not (group["vectors"] or p.ndim > 1):
                decay = group.get("weight_decay", 0.0)
                group["weight_decay"] = 0.0 if found.trust else decay  # LAMB's vectors are plain Adam
                super().update_step(group, p, gindex, pindex)
                group["weight_decay"] = decay
                return
            rate, before = group["lr"], p.detach().clone()
            # with a learning rate of 1, w - w' = u = m^ / (sqrt(v^) + eps) + lambda w
            group["lr"] = 1.0
            try:
                super().update_step(group, p, gindex, pindex)
            finally:
                group["lr"] = rate
            u = before - p.detach()
            # w := w - lr |w| / |u| u
            norms = before.norm(), u.norm()
            ratio = norms[0] / norms[1] if all(norms) else torch.ones_like(norms[0])
            p.detach().copy_(before - u * (ratio * float(rate)))

    name = "LAMB8bit" if found.trust else found.name
    made: Any = type(name, (Following,), {"__module__": Following.__module__})
    settings = {"momentum": 0.9} if found.name == "SGD8bit" else {}  # every group has its own momentum; 0 is refused
    return made(groups, lr=float(groups[0]["lr"]), **settings)


def four_bit(found: Equivalent, groups: Groups) -> Optimizer:
    """Create torchao's optimizer for these groups, see :func:`eight_bit`. It decides itself which tensors are large enough.

    torch cannot load its 4-bit states with a ``map_location`` function, which Lightning passes. So a ``state_dict`` holds the
    plain tensors that make up each state.
    """
    optim = imported("torchao", "torchao", "EightBitOptimizer(bits=4)")
    base: Any = getattr(optim, found.name)

    class Plain(base):
        """An optimizer that saves its states as plain tensors."""

        def state_dict(self) -> dict[str, Any]:
            saved = super().state_dict()
            state = {key: {name: _flat(v) for name, v in one.items()} for key, one in saved["state"].items()}
            return {**saved, "state": state}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            held = [p for group in self.param_groups for p in group["params"]]
            state = {
                key: {name: _whole(v, held[key].device) for name, v in one.items()}
                for key, one in state_dict["state"].items()
            }
            super().load_state_dict({**state_dict, "state": state})

    made: Any = type(found.name, (Plain,), {"__module__": Plain.__module__})
    return made([{**group, "betas": found.betas(group)} for group in groups], lr=float(groups[0]["lr"]))


def _flat(value: Any) -> Any:
    """Return the plain tensors and settings that make up a 4-bit state; other values unchanged."""
    if not is_traceable_wrapper_subclass(value):
        return value
    names, (signed, shape, dtype) = value.__tensor_flatten__()  # pyright: ignore[reportGeneralTypeIssues]
    return {**{name: getattr(value, name) for name in names}, "signed": signed, "shape": list(shape), "dtype": dtype}


def _whole(value: Any, device: torch.device) -> Any:
    """Rebuild a state from :func:`_flat`, on the device of its parameter."""
    if not isinstance(value, dict):
        return value
    kind: Any = importlib.import_module("torchao.optim.subclass_4bit").OptimState4bit
    tensors = {name: value[name].to(device) for name in kind.tensor_attrs}
    return kind(**tensors, signed=value["signed"], shape=torch.Size(value["shape"]), dtype=value["dtype"])
