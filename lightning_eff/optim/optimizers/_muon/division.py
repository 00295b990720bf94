"""Divides work on a list of tensors over the ranks of a run, and exchanges the results."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_eff.optim.optimizers import _lists as lists


class Division:
    """Divides work that every rank would do equally, as long as the ranks hold the same tensors.

    Before the first call the ranks compare the shapes of their tensors, which differ in a pipeline. Each call sends the norms
    of all tensors with the results. If norms differ, because each rank trains separately, all ranks notice it. They then redo
    the work of that call alone, and divide nothing afterwards.
    """

    def __init__(self) -> None:
        self._divides: bool | None = None

    def __getstate__(self) -> dict[str, bool | None]:
        return {"_divides": None}

    @property
    def idle(self) -> bool:
        """Whether each rank does all work alone."""
        return (
            not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1 or self._divides is False
        )

    def agree(self, held: Sequence[Any]) -> None:
        """Find out whether the ranks can divide work; every rank must call it, even without tensors.

        Args:
            held: properties of this step's tensors that must be equal on all ranks; empty without tensors.
        """
        if self._divides is not None or self.idle:
            return
        said: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(said, held)
        if any(said):
            self._divides = all(one == said[0] for one in said)

    def run(
        self, tensors: list[Tensor], work: Callable[[list[Tensor]], list[Tensor]], dtypes: list[torch.dtype]
    ) -> list[Tensor]:
        """Return ``work(tensors)``. Each result has the shape of its tensor and depends only on it.

        Args:
            tensors: the tensors, equal on all ranks if the work is divided.
            work: function of a part of the tensors.
            dtypes: the dtype of each result, float32 or bfloat16.
        """
        if self.idle:
            return work(tensors)
        assert self._divides, "the ranks have agreed"
        world, rank = dist.get_world_size(), dist.get_rank()
        owner = divided([t.shape[0] * t.shape[1] * min(t.shape) for t in tensors], world)
        mine = [i for i, who in enumerate(owner) if who == rank]
        done = work([tensors[i] for i in mine]) if mine else []
        norms = torch.stack(lists.norm(tensors)).float()
        sizes = [sum(tensors[i].numel() for i, who in enumerate(owner) if who == r) for r in range(world)]
        # results are sent as float32, which represents bfloat16 exactly
        sent = torch.zeros(len(norms) + max(sizes), device=norms.device)
        sent[: len(norms)] = norms
        if done:
            places = sent[len(norms) : len(norms) + sizes[rank]].split([one.numel() for one in done])
            lists.copy_(list(places), [one.reshape(-1) for one in done])
        got = torch.empty(world * len(sent), device=sent.device)
        dist.all_gather_into_tensor(got, sent)
        rows = got.view(world, -1)
        held = rows[:, : len(norms)].contiguous().view(torch.int32)  # as bits, since NaN is not equal to itself
        if not torch.equal(held, held[:1].expand(world, -1)):
            self._divides = False
            return work(tensors)
        found: list[Tensor] = list(tensors)
        for r in range(world):
            theirs = [i for i, who in enumerate(owner) if who == r]
            parts = rows[r, len(norms) :].split([*(tensors[i].numel() for i in theirs), max(sizes) - sizes[r]])
            for i, part in zip(theirs, parts, strict=False):
                found[i] = part.view(tensors[i].shape).to(dtypes[i])
        return found


def divided(costs: list[int], world: int) -> list[int]:
    """Assign work to ranks evenly: the most expensive first, to the rank with the least work."""
    load, owner = [0] * world, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owner[i] = min(range(world), key=lambda r: (load[r], r))
        load[owner[i]] += costs[i]
    return owner


def whole_of(tensor: Tensor) -> Tensor:
    """Return the gathered DTensor, or a plain tensor unchanged."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def part_of(whole: Tensor, p: Any) -> Tensor:
    """Return this rank's part of ``whole``, which every rank has, divided like the DTensor ``p``."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = p.device_mesh
    same = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return same.redistribute(mesh, p.placements).to_local()
