"""Divides work over the ranks of a run: work that all ranks would do equally, and work on sharded parameters."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_eff.optim.optimizers import _lists as lists
from lightning_eff.optim.optimizers._division.messages import Messages


class Division:
    """Divides the matrices of a step over ranks.

    **Whole parameters.** :meth:`run` divides work that every rank would do equally, as long as the ranks hold the same
    tensors. Before the first call the ranks compare the shapes of their tensors, which differ in a pipeline. Each call sends
    the norms of all tensors with the results. If norms differ, because each rank trains separately, all ranks notice it. They
    then redo the work of that call alone, and divide nothing afterwards.

    **DTensors.** Each matrix has one owner among the ranks of its mesh (:meth:`owners`). It gets the other ranks' pieces, does
    the work, and sends the results to all ranks that hold a piece (:class:`Messages`).

    Attributes:
        messages: exchanges pieces, and counts the bytes that this rank sends.

    Args:
        enabled: whether to divide work on whole parameters.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._divides: bool | None = None
        self.messages = Messages()
        self._loads: dict[tuple[int, ...], list[int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_enabled": self._enabled, "_divides": None, "messages": Messages(), "_loads": {}}

    @property
    def idle(self) -> bool:
        """Whether each rank does all work on whole parameters alone."""
        alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
        return alone or not self._enabled or self._divides is False

    @property
    def share(self) -> int:
        """The number of ranks that share the work on whole parameters."""
        return 1 if self.idle else dist.get_world_size()

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

    def owners(self, mesh: DeviceMesh, costs: Sequence[int]) -> list[int]:
        """Return the rank that owns each matrix, so that all ranks of ``mesh`` have about as much work since :meth:`forget`.

        All ranks of the mesh must call it with the same ``costs``.
        """
        ranks: list[int] = mesh.mesh.flatten().tolist()
        load = self._loads.setdefault(tuple(ranks), [0] * len(ranks))
        return [ranks[i] for i in divided(costs, load)]

    def forget(self) -> None:
        """Count the ranks' work from zero."""
        self._loads = {}

    def run(
        self, tensors: list[Tensor], work: Callable[[list[Tensor]], list[Tensor]], dtypes: list[torch.dtype]
    ) -> list[Tensor]:
        """Return ``work(tensors)``. Each result has the shape of its tensor and depends only on it.

        Args:
            tensors: the tensors, equal on all ranks if the work is divided.
            work: function of a part of the tensors.
            dtypes: the dtype of each result: float64, float32 or a smaller one.
        """
        if self.idle:
            return work(tensors)
        assert self._divides, "the ranks have agreed"
        world, rank = dist.get_world_size(), dist.get_rank()
        owner = divided([t.shape[0] * t.shape[1] * min(t.shape) for t in tensors], [0] * world)
        mine = [i for i, who in enumerate(owner) if who == rank]
        done, failure = list[Tensor](), None
        try:
            done = work([tensors[i] for i in mine]) if mine else []
        except Exception as error:  # raised when no rank waits for this one any more
            failure = error
        # float32 represents smaller dtypes exactly
        sent_as = torch.float64 if torch.float64 in dtypes else torch.float32
        norms = torch.stack(lists.norm(tensors)).to(sent_as)
        head = len(norms) + 1
        sizes = [sum(tensors[i].numel() for i, who in enumerate(owner) if who == r) for r in range(world)]
        sent = torch.zeros(head + max(sizes), dtype=sent_as, device=norms.device)
        sent[0], sent[1:head] = failure is not None, norms
        if done:
            places = sent[head : head + sizes[rank]].split([one.numel() for one in done])
            lists.copy_(list(places), [one.reshape(-1) for one in done])
        got = torch.empty(world * len(sent), dtype=sent_as, device=sent.device)
        dist.all_gather_into_tensor(got, sent)
        self.messages.sent_bytes += (world - 1) * sent.nbytes
        rows = got.view(world, -1)
        if failure is not None:
            raise failure
        if rows[:, 0].any():
            raise RuntimeError("the optimizer's step failed on another rank. See the error that this rank printed.")
        # as bits, since NaN is not equal to itself
        held = rows[:, 1:head].contiguous().view(torch.int64 if sent_as == torch.float64 else torch.int32)
        if not torch.equal(held, held[:1].expand(world, -1)):
            self._divides = False
            return work(tensors)
        found: list[Tensor] = list(tensors)
        for r in range(world):
            theirs = [i for i, who in enumerate(owner) if who == r]
            parts = rows[r, head:].split([*(tensors[i].numel() for i in theirs), max(sizes) - sizes[r]])
            for i, part in zip(theirs, parts, strict=False):
                found[i] = part.view(tensors[i].shape).to(dtypes[i])
        return found


def divided(costs: Sequence[int], load: list[int]) -> list[int]:
    """Assign work evenly: the most expensive first, to the one with the least work. ``load`` is updated in place."""
    owner = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owner[i] = min(range(len(load)), key=lambda r: (load[r], r))
        load[owner[i]] += costs[i]
    return owner
