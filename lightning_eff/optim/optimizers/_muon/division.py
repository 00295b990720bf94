"""Work on a list of tensors divided over the ranks of a run, whose results are exchanged."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_eff.optim.optimizers import _lists as lists


class Division:
    """Divides work that every rank would do alike, as long as the ranks hold the same tensors.

    Before the first call the ranks agree on whether they hold tensors of the same shapes; in a pipeline they do not, and some
    may hold none. At each call the norms of all tensors travel with the results: where they differ (each rank trains for
    itself), the ranks find out together, do that call's work again by themselves, and divide nothing from then on.
    """

    def __init__(self) -> None:
        self._divides: bool | None = None

    def __getstate__(self) -> dict[str, bool | None]:
        return {"_divides": None}

    @property
    def idle(self) -> bool:
        """Whether each rank does all by itself."""
        return (
            not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1 or self._divides is False
        )

    def agree(self, held: Sequence[Any]) -> None:
        """Find out whether the ranks can divide anything; each must call it, also one that holds nothing.

        Args:
            held: of the tensors of all calls to come in this step, what must be alike on all ranks; empty where there are none.
        """
        if self._divides is not None or self.idle:
            return
        said: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(said, held)
        if any(said):
            self._divides = all(one == said[0] for one in said)

    def run(self, tensors: list[Tensor], work: Callable[[list[Tensor]], list[Tensor]]) -> list[Tensor]:
        """``work(tensors)``, whose results have the shapes of ``tensors`` and depend on each tensor alone.

        Args:
            tensors: the same on all ranks, if the work shall be divided.
            work: what is done with a part of them.
        """
        if self.idle:
            return work(tensors)
        assert self._divides, "the ranks have agreed"
        world, rank = dist.get_world_size(), dist.get_rank()
        owner = divided([t.shape[0] * t.shape[1] * min(t.shape) for t in tensors], world)
        mine = [i for i, who in enumerate(owner) if who == rank]
        done = work([tensors[i] for i in mine]) if mine else []
        norms = torch.stack(lists.norm(tensors)).float()
        dtype = done[0].dtype if done else None
        dtypes = [torch.float32, torch.bfloat16]
        sizes = [sum(tensors[i].numel() for i, who in enumerate(owner) if who == r) for r in range(world)]
        # results travel as float32: bfloat16 goes into it and back without a change
        sent = torch.zeros(1 + len(norms) + max(sizes), device=norms.device)
        sent[0] = -1.0 if dtype is None else float(dtypes.index(dtype))
        sent[1 : 1 + len(norms)] = norms
        if done:
            flat = torch.cat([one.reshape(-1) for one in done])
            sent[1 + len(norms) : 1 + len(norms) + sizes[rank]] = flat
        got = torch.empty(world * len(sent), device=sent.device)
        dist.all_gather_into_tensor(got, sent)
        rows = got.view(world, -1)
        held = rows[:, 1 : 1 + len(norms)].contiguous().view(torch.int32)  # as bits, so that a NaN is equal to itself
        if not torch.equal(held, held[:1].expand(world, -1)):
            self._divides = False
            return work(tensors)
        kind = dtypes[int(rows[:, 0].max())]
        found: list[Tensor] = list(tensors)
        for r in range(world):
            theirs = [i for i, who in enumerate(owner) if who == r]
            parts = rows[r, 1 + len(norms) :].split([*(tensors[i].numel() for i in theirs), max(sizes) - sizes[r]])
            for i, part in zip(theirs, parts, strict=False):
                found[i] = part.view(tensors[i].shape).to(kind)
        return found


def divided(costs: list[int], world: int) -> list[int]:
    """Who does which, so that no rank has much more to do than another: the dearest first, to who has least."""
    load, owner = [0] * world, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owner[i] = min(range(world), key=lambda r: (load[r], r))
        load[owner[i]] += costs[i]
    return owner


def whole_of(tensor: Tensor) -> Tensor:
    """A DTensor's whole, gathered; anything else as it is."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def part_of(whole: Tensor, p: Any) -> Tensor:
    """This rank's part of ``whole``, which every rank has, divided as the DTensor ``p`` is."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = p.device_mesh
    same = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return same.redistribute(mesh, p.placements).to_local()
