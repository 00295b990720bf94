"""Checkpoints that do not depend on the layout: a folder of every rank's pieces, or one file like the plain module's.

``torch.distributed.checkpoint`` writes and reads the folder, in the structure of Lightning's sharded checkpoints:
``state_dict.<key>``, ``optimizer_<i>.state.<parameter>.<key>``, and ``meta.pt`` for everything except tensors.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from lightning_eff._core._checkpoints.folders import META
from lightning_eff.strategies._hybrid.saving.gathering import Described, Gathering
from lightning_eff.strategies._hybrid.saving.optimizer_state import NamedOptimizer
from lightning_eff.strategies._hybrid.saving.plain import Plain
from lightning_eff.strategies._hybrid.shards import empty_like, fill

GROUPS = "optimizer_param_groups"


# -- the module


def consolidate(
    module: nn.Module, plain: Plain, gathering: Gathering, *, without: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Return the plain module's ``state_dict`` in host memory on rank 0, and {} elsewhere; collective.

    It gathers one tensor at a time, and skips the keys in ``without``, which must be equal on all ranks.
    """
    held = module.state_dict()
    first = dist.get_rank() == 0
    whole: dict[str, Any] = {}
    keys = _keys_of(plain)
    of_slot: dict[str, Tensor] = {}
    for key, name in plain.keys.items():
        if key in without:
            continue
        if name is None:
            if first and key in held:
                whole[key] = held[key]
            continue
        if name not in of_slot or not first:
            slot = plain.slots[name]
            if name in of_slot:
                continue
            here = next((held[k] for k in keys[name] if k in held), None)
            tensor = gathering.on_first(name, here, Described(tuple(slot.shape), slot.dtype))
            of_slot[name] = tensor if tensor is not None else torch.empty(0)
        if first:
            whole[key] = of_slot[name]
    return whole


def _keys_of(plain: Plain) -> dict[str, list[str]]:
    """Return the keys of ``state_dict`` for each tensor, by the tensor's name."""
    found: dict[str, list[str]] = {}
    for key, name in plain.keys.items():
        if name is not None:
            found.setdefault(name, []).append(key)
    return found


def load_whole(module: nn.Module, plain: Plain, state: Mapping[str, Any], *, strict: bool) -> None:
    """Load this rank's pieces from a plain module's ``state_dict``.

    Raises:
        RuntimeError: if ``strict`` and the keys are not the plain module's.
    """
    check_keys(plain, state.keys(), type(module).__name__, strict=strict)
    rest: dict[str, Any] = {}
    for key, target in module.state_dict().items():
        if key in state:
            if plain.keys.get(key) is None or not isinstance(target, Tensor):
                rest[key] = state[key]
            else:
                fill(target, state[key].to(target.device))
    if rest:
        module.load_state_dict(rest, strict=False)


def check_keys(plain: Plain, keys: Any, name: str, *, strict: bool) -> None:
    """Raise ``RuntimeError`` if ``strict`` and ``keys`` are not those of the plain module's ``state_dict``."""
    missing, unexpected = [k for k in plain.keys if k not in keys], [k for k in keys if k not in plain.keys]
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"Error(s) in loading state_dict for {name}: missing keys {missing}, unexpected keys {unexpected}. Load a"
            " checkpoint of this module, or set strict_loading=False on it."
        )


# -- folders


def divide(
    checkpoint: dict[str, Any],
    module: nn.Module,
    plain: Plain,
    gathering: Gathering,
    optimizers: list[NamedOptimizer],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return this rank's pieces of the module and the optimizers, and the rest of ``checkpoint``; collective."""
    keys = _keys_of(plain)
    pieces: dict[str, Any] = {
        "state_dict": {
            key: value
            for key, value in module.state_dict().items()
            # the owner of a tensor with several names can use another one; tensors of several ranks are written once
            if (name := plain.keys.get(key)) is None or gathering.owned(name) or len(keys[name]) > 1
        }
    }
    rest = {k: v for k, v in checkpoint.items() if k not in ("state_dict", "optimizer_states")}
    if "optimizer_states" in checkpoint:
        for i, optimizer in enumerate(optimizers):
            optimizer.take_added(gathering)
            state = {name: s for name, s in optimizer.state().items() if gathering.owned(name)}
            pieces[f"optimizer_{i}"] = {"state": state}
        rest[GROUPS] = [optimizer.options() for optimizer in optimizers]
    return pieces, rest


def load_sharded(
    path: Path,
    module: nn.Module,
    plain: Plain,
    optimizers: list[NamedOptimizer],
    *,
    strict: bool,
    weights_only: bool | None,
    device: torch.device,
    who: str,
) -> dict[str, Any]:
    """Read this rank's pieces from a folder of any layout, in place; collective.

    Returns:
        The rest of the checkpoint, without tensors of the module or the optimizers.

    Raises:
        RuntimeError: if ``strict`` and the keys are not the plain module's.
        ValueError: if the optimizers' groups differ.
    """
    saved = FileSystemReader(path).read_metadata()
    paths: dict[str, tuple[Any, ...]] = saved.planner_data or {}
    keys = {where[1] for where in paths.values() if where[0] == "state_dict"}
    check_keys(plain, keys, type(module).__name__, strict=strict)
    rest: dict[str, Any] = torch.load(path / META, mmap=True, map_location="cpu", weights_only=weights_only)
    own = module.state_dict()
    pieces: dict[str, Any] = {"state_dict": {key: value for key, value in own.items() if key in keys}}
    groups: list[Any] = rest.pop(GROUPS, [])
    for i, optimizer in enumerate(optimizers):
        if i < len(groups):
            optimizer.set_options(groups[i], who=who)
            pieces[f"optimizer_{i}"] = {"state": _targets(f"optimizer_{i}", optimizer, saved, paths, device)}
    load(pieces, checkpoint_id=path)
    others = {k: v for k, v in pieces["state_dict"].items() if not isinstance(v, Tensor)}
    if others:
        module.load_state_dict(others, strict=False)
    for i, optimizer in enumerate(optimizers):
        if i < len(groups):
            optimizer.set_state(pieces[f"optimizer_{i}"]["state"].get, device)
    rest["state_dict"] = {}
    if groups:
        rest["optimizer_states"] = []
    return rest


def _targets(
    which: str, optimizer: NamedOptimizer, saved: Any, paths: Mapping[str, tuple[Any, ...]], device: torch.device
) -> dict[str, dict[str, Any]]:
    """Allocate the optimizer state of this rank's parameters in the folder's structure."""
    room: dict[str, dict[str, Any]] = {}
    for flat, where in paths.items():
        if where[:2] != (which, "state") or where[2] not in optimizer.held:
            continue
        name, key = where[2], where[3]
        what, p = saved.state_dict_metadata[flat], optimizer.held[name]
        if not isinstance(what, TensorStorageMetadata):
            room.setdefault(name, {})[key] = None
            continue
        dtype = what.properties.dtype
        if what.size == p.shape and p.ndim > 0:
            target = empty_like(p, dtype, device)
        else:
            target = torch.zeros(what.size, dtype=dtype, device="cpu" if what.size.numel() == 1 else device)
        room.setdefault(name, {})[key] = target
    return room
