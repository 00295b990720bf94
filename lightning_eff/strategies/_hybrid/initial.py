"""Initial weights of a module that was built without memory: from rank 0, which creates them one module at a time."""

import copy
import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_eff._core import rng
from lightning_eff.strategies._hybrid.saving.plain import Plain, Slot
from lightning_eff.strategies._hybrid.shards import fill, local, wrap_like


class Initial:
    """Moves the module to the meta device on every rank, and keeps rank 0's real tensors.

    If a tensor is on the meta device on rank 0 too, the ``_init_weights`` of a parent module (Hugging Face) or the owner's
    ``reset_parameters`` creates it, with only that module in memory.

    Args:
        module: the module, wholly or partly on the meta device on some rank.
        who: name of the caller in messages.
    """

    def __init__(self, module: nn.Module, *, who: str) -> None:
        self.who = who
        self._first = dist.get_rank() == 0
        self._real: dict[str, Tensor] = {}
        self._made: tuple[int, dict[str, Tensor]] | None = None
        plain = Plain(module, who=who)
        self._shells: dict[str, tuple[nn.Module, list[nn.Module], str]] = {}
        shells: dict[int, nn.Module] = {}
        paths = {id(m): path for path, m in module.named_modules()}
        for name, slot in plain.slots.items():
            owner, key = slot.places[0].module, slot.places[0].key
            if self._first and slot.meta:
                if id(owner) not in shells:
                    shells[id(owner)] = copy.copy(owner)
                    shells[id(owner)].__dict__.update(
                        _parameters=dict(owner._parameters), _buffers=dict(owner._buffers)
                    )
                self._shells[name] = (shells[id(owner)], _above(module, paths[id(owner)]), key)
            elif self._first:
                self._real[name] = slot.tensor.detach()
            if not slot.meta:
                slot.put(slot.placeholder("meta"))

    def make(self, plain: Plain, held: set[str], device: torch.device) -> None:
        """Fill this rank's tensors and pieces from rank 0; collective over all ranks.

        Args:
            plain: the record of the module on the meta device.
            held: names of this rank's tensors and DTensors, which have no memory yet.
            device: device for the tensors.

        Raises:
            ValueError: on every rank, if a module cannot create its weights.
        """
        current = plain.current()
        for name, slot in plain.slots.items():
            problem: list[str | None] = [None]
            whole = torch.empty(slot.shape, dtype=slot.dtype, device=device)
            if self._first:
                try:
                    whole.copy_(self._whole(name))
                except ValueError as error:
                    problem = [str(error)]
            dist.broadcast_object_list(problem)
            if problem[0] is not None:
                raise ValueError(problem[0])
            dist.broadcast(whole, 0)
            if name in held:
                _materialise(slot, current[name], whole)

    def _whole(self, name: str) -> Tensor:
        if name in self._real:
            return self._real.pop(name)
        owner, above, key = self._shells[name]
        if self._made is None or self._made[0] != id(owner):
            self._made = (id(owner), self._make_module(name, owner, above))
        return self._made[1][key]

    @torch.no_grad()
    def _make_module(self, name: str, owner: nn.Module, above: list[nn.Module]) -> dict[str, Tensor]:
        """Return the owner's initialized parameters and buffers, from a shell that needs only their memory."""
        shell = owner
        fresh: dict[str, dict[str, Any]] = {"_parameters": {}, "_buffers": {}}
        for kind, made in fresh.items():
            for key, tensor in getattr(owner, kind).items():
                if tensor is None:
                    made[key] = None
                    continue
                empty = torch.empty(tensor.shape, dtype=tensor.dtype)
                if tensor.is_floating_point():
                    empty.fill_(torch.nan)
                made[key] = nn.Parameter(empty, tensor.requires_grad) if kind == "_parameters" else empty
            shell.__dict__[kind] = made
        with rng.fork():
            torch.manual_seed(torch.initial_seed() + sum(map(ord, name)))
            for maker in [m for m in above if callable(getattr(m, "_init_weights", None))]:
                if len(inspect.signature(maker._init_weights).parameters) == 1:  # pyright: ignore[reportArgumentType]
                    maker._init_weights(shell)  # pyright: ignore[reportCallIssue]
                    break
            tensors = {key: t for made in fresh.values() for key, t in made.items() if t is not None}
            if _unmade(tensors):
                for reset in ("reset_parameters", "_reset_parameters"):
                    if callable(getattr(shell, reset, None)):
                        getattr(shell, reset)()
                        break
        tensors = {key: t for kind in fresh for key, t in getattr(shell, kind).items() if t is not None}
        shell.__dict__.update(_parameters={}, _buffers={})
        missing = _unmade(tensors)
        if missing:
            raise ValueError(
                f"{self.who}: {missing} of {type(owner).__name__} (at {name.rpartition('.')[0] or 'the root'!r}) are on the"
                " meta device, and neither its reset_parameters nor a parent's _init_weights creates them. Add such a method,"
                " or build the module with real weights on rank 0 (init_on='rank0')."
            )
        return tensors


def _unmade(tensors: dict[str, Tensor]) -> list[str]:
    return [key for key, t in tensors.items() if t.is_floating_point() and bool(t.isnan().any())]


def _above(root: nn.Module, path: str) -> list[nn.Module]:
    """Return the module at ``path`` and its parents, nearest first."""
    found, parts = [root], path.split(".") if path else []
    for part in parts:
        found.append(found[-1]._modules[part])  # pyright: ignore[reportArgumentType]
    return found[::-1]


def _materialise(slot: Slot, meta: Tensor, whole: Tensor) -> None:
    here = local(meta)
    real: Tensor = torch.empty(here.shape, dtype=here.dtype, device=whole.device)
    if isinstance(meta, DTensor):
        real = wrap_like(real, meta)
    fill(real, whole)
    made = nn.Parameter(real, slot.requires_grad) if slot.is_parameter else real
    for place in slot.places:
        namespace = place.module._parameters if slot.is_parameter else place.module._buffers
        if namespace.get(place.key) is meta:
            place.put(made)
