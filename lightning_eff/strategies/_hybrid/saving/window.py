"""Saves the gradients of an open accumulation window as whole tensors, and restores them in any layout.

Their place depends on the layout. FSDP2 keeps unreduced whole gradients until the window's last backward pass. In a pipeline
each pass reduces sharded gradients. All others are gradients of parameters, whole or in pieces of tensor parallelism, and each
replica has its own. A checkpoint has each replica's gradients of the plain module.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_eff.strategies._hybrid import sharding
from lightning_eff.strategies._hybrid.layout import TENSOR, data_group
from lightning_eff.strategies._hybrid.saving.gathering import Described, Gathering
from lightning_eff.strategies._hybrid.saving.plain import Plain
from lightning_eff.strategies._hybrid.shards import piece, whole_of, wrap_like


@dataclass(frozen=True)
class Held:
    """One gradient on this rank.

    Attributes:
        averaged: whether it is the mean over all replicas; otherwise it is this replica's.
    """

    grad: Tensor
    averaged: bool


class Window:
    """The gradients of one divided module.

    Args:
        plain: the record of the plain module.
        gathering: gathers tensors over the ranks.
        held: names of this rank's tensors.
        roots: FSDP2's roots.
        reduces_each_pass: whether FSDP2 reduces gradients in every backward pass, and not only in the window's last.
    """

    def __init__(
        self,
        plain: Plain,
        gathering: Gathering,
        held: set[str],
        roots: Sequence[nn.Module],
        *,
        reduces_each_pass: bool,
    ) -> None:
        self._plain, self._gathering, self._names = plain, gathering, held
        self._roots, self._reduces_each_pass = roots, reduces_each_pass
        group = data_group(gathering.mesh)
        self._replica, self._replicas = group.rank(), group.size()

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter, bool]]:
        """Yield this rank's parameters, each with its name and whether FSDP2 reduces its gradient."""
        for root in self._roots:
            sharding.reshard(root)
        sharded = {id(p) for root in self._roots for p in sharding.sharded_parameters(root)}
        for name, p in self._plain.current().items():
            if name in self._names and isinstance(p, nn.Parameter) and p.requires_grad:
                yield name, p, id(p) in sharded

    def _held(self) -> dict[str, Held]:
        unreduced = {id(p): grad for root in self._roots for p, grad in sharding.unreduced_gradients(root)}
        found: dict[str, Held] = {}
        for name, p, sharded in self._parameters():
            reduced = sharded and self._reduces_each_pass
            grad = p.grad if reduced or not sharded else unreduced.get(id(p))
            if grad is not None:
                found[name] = Held(grad, reduced)
        return found

    @torch.no_grad()
    def collect(self) -> tuple[list[dict[str, Tensor]], list[str]]:
        """Return, on rank 0, each replica's whole gradients in host memory and the averaged names; collective."""
        held = self._held()
        # first the gradients that replicas gather together, while no replica waits for rank 0
        averaged = self._on_first({name: h for name, h in held.items() if h.averaged})
        own = self._on_first({name: h for name, h in held.items() if not h.averaged})
        if dist.get_rank():
            return [], []
        mean = averaged.get(0, {})
        return [{**mean, **own.get(replica, {})} for replica in range(self._replicas)], list(mean)

    def _on_first(self, held: Mapping[str, Held]) -> dict[int, dict[str, Tensor]]:
        """Return the gradients by replica on rank 0; the first rank of the stage that owns a gradient sends it."""
        gathering, device = self._gathering, self._gathering.device
        owned = {name: h for name, h in held.items() if gathering.owned(name)}
        sends = not gathering.coordinates.get(TENSOR)
        mine = {n: Described.of(h.grad) for n, h in owned.items() if sends and not (h.averaged and self._replica)}
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, (self._replica, mine))
        found: dict[int, dict[str, Tensor]] = {}
        first = dist.get_rank() == 0
        for name, h in owned.items():
            whole = whole_of(h.grad).to(device).contiguous()
            if name in mine and first:
                found.setdefault(self._replica, {})[name] = whole.to("cpu", copy=True)
            elif name in mine:
                dist.send(whole, 0)
        for source, (replica, described) in enumerate(told):
            for name, what in described.items() if first and source else ():
                got = torch.empty(what.shape, dtype=what.dtype, device=device)
                dist.recv(got, source)
                found.setdefault(replica, {})[name] = got.cpu()
        return found

    @torch.no_grad()
    def take_up(self, replicas: Sequence[Mapping[str, Tensor]], averaged: Sequence[str]) -> None:
        """Put gradients where the next backward pass adds to them; every replica gets a mean. Collective."""
        own = replicas[self._replica] if len(replicas) == self._replicas else {}
        unreduced: dict[int, Callable[[nn.Parameter], Tensor]] = {}
        for name, p, sharded in self._parameters():
            if sharded and self._reduces_each_pass:
                if name in averaged:
                    p.grad = self._laid(replicas[0][name], p)
                elif parts := [grads[name] for grads in replicas if name in grads]:
                    p.grad = self._laid(sum(parts[1:], parts[0]) / len(replicas), p)
            elif name not in own:
                continue
            elif sharded:
                unreduced[id(p)] = lambda whole, grad=own[name]: self._laid(grad, whole)
            else:
                p.grad = self._laid(own[name], p)
        for root in self._roots if not self._reduces_each_pass else ():
            sharding.put_unreduced(root, unreduced)

    def _laid(self, whole: Tensor, like: Tensor) -> Tensor:
        """Return a copy of ``whole`` in the layout of ``like``."""
        here = piece(whole, like).to(self._gathering.device, copy=True).contiguous()
        return wrap_like(here, like) if isinstance(like, DTensor) else here
