"""The optimizer states of a dense run, given to the experts that are copies of its networks."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_eff.model.layers._experts.module import ExpertLinear


def take_states(path: str | os.PathLike[str], module: nn.Module, optimizers: Sequence[Optimizer], *, who: str) -> None:
    """Load the states of a dense run's optimizers, in which each expert gets those of the network that it copies.

    Routers have new states. Learning rates and other settings stay as ``configure_optimizers`` gave them.

    Args:
        path: a checkpoint of the dense run.
        module: the module with experts.
        optimizers: its optimizers, in the order of the dense run's.
        who: the technique's name.

    Raises:
        ValueError: if there is no such file, the checkpoint's optimizers have other parameters, or a state of unknown form.
    """
    apart = (
        f"{who}(states={os.fspath(path)!r}): {{}}. Give a checkpoint of the dense run with the same configure_optimizers, or"
        " states=None."
    )
    if not Path(path).is_file():
        raise ValueError(apart.format("there is no such file"))
    saved = torch.load(Path(path), map_location="cpu", weights_only=True).get("optimizer_states") or []
    layers = [m for m in module.modules() if isinstance(m, ExpertLinear)]
    routers = {id(m.router) for m in layers}
    number = {id(p): len(m.expert_weight) for m in layers for p in (m.expert_weight, m.expert_bias) if p is not None}
    if len(saved) != len(optimizers):
        raise ValueError(apart.format(f"it holds {len(saved)} optimizers, and the module has {len(optimizers)}"))
    names = {id(p): name for name, p in module.named_parameters()}
    for optimizer, old in zip(optimizers, saved, strict=True):
        now = optimizer.state_dict()
        had, have = old.get("param_groups", []), optimizer.param_groups
        if len(had) != len(have):
            raise ValueError(
                apart.format(f"an optimizer has {len(had)} groups of parameters there, and {len(have)} here")
            )
        for group, its, theirs in zip(have, now["param_groups"], had, strict=True):
            kept = [(p, i) for p, i in zip(group["params"], its["params"], strict=True) if id(p) not in routers]
            if len(kept) != len(theirs["params"]):
                raise ValueError(
                    apart.format(
                        f"a group has {len(theirs['params'])} parameters there, and {len(kept)} without routers here"
                    )
                )
            for (p, i), j in zip(kept, theirs["params"], strict=True):
                for key, value in old["state"].get(j, {}).items():
                    spread = _spread(value, p, number.get(id(p), 1))
                    if spread is None:
                        shape = tuple(value.shape)
                        raise ValueError(
                            apart.format(f"the state {key} {shape} does not belong to {names[id(p)]} {tuple(p.shape)}")
                        )
                    now["state"].setdefault(i, {})[key] = _as(spread, p)
        optimizer.load_state_dict(now)


def _as(value: Any, p: Tensor) -> Any:
    """Return a state divided as its parameter, if that is."""
    if not isinstance(value, Tensor) or value.ndim == 0 or not isinstance(p, DTensor):
        return value
    return distribute_tensor(value.to(p.device), p.device_mesh, p.placements, src_data_rank=None)


def _spread(value: Any, p: Tensor, number: int) -> Any:
    """Return a copy of a state for each of ``number`` experts, or None if its shape is another."""
    if not isinstance(value, Tensor) or value.ndim == 0:
        return value
    if value.numel() * number != p.numel() or (number == 1 and value.shape != p.shape):
        return None
    return value.flatten().repeat(number).view(p.shape)
