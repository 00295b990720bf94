"""Applies the orthogonal matrices of a Muon step to parameters, all of one shape at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_eff.optim.optimizers import _lists as lists
from lightning_eff.optim.optimizers._muon.scratch import Scratch
from lightning_eff.optim.optimizers._muon.settings import SCALES
from lightning_eff.optim.optimizers._runs import STACKED, limit_for, limit_of, runs

Held = tuple[dict[str, Any], Tensor]  #: a parameter with its group

#: bytes of weights that are stepped at a time
_STEPPED = (1 << 18, 64 << 20)


def chunks(held: Sequence[Held], share: int) -> Iterator[list[Held]]:
    """Split parameters into chunks that bound the memory of a step. Parameters of one shape are adjacent.

    Args:
        held: parameters of one dtype.
        share: the number of ranks that share the work on a chunk.
    """
    first: dict[torch.Size, int] = {}
    for i, (_, p) in enumerate(held):
        first.setdefault(p.shape, i)
    ordered = sorted(held, key=lambda one: first[one[1].shape])
    sizes = [p.numel() * p.element_size() for _, p in ordered]
    return runs(ordered, sizes, limit_for(ordered[0][1], STACKED, sizes, share))


@dataclass(slots=True, eq=False)
class Piece:
    """Matrices of one shape in one parameter.

    Attributes:
        group: the parameter's group.
        p: the parameter.
        shape: (j, out, in), of j matrices.
        target: the part of the parameter as a view; None if only other ranks hold it.
        second_moment: NorMuon's ``S``, shape (j, longer side), or None.
    """

    group: dict[str, Any]
    p: Tensor
    shape: torch.Size
    target: Tensor | None
    second_moment: Tensor | None

    @property
    def scale(self) -> float:
        """The factor of ``O``, without the learning rate."""
        return SCALES[self.group["scale"]](*self.shape[1:])

    @property
    def size(self) -> int:
        """The number of matrices."""
        return self.shape[0]

    @property
    def decay(self) -> float:
        """``lr wd``."""
        return float(self.group["lr"]) * float(self.group["weight_decay"])


def second_moments(state: dict[str, Any], p: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return NorMuon's ``S`` for blocks (j, out, in) of a parameter: (j, longer side), views of one vector in its state."""
    sizes = [shape[0] * max(shape[1:]) for shape in shapes]
    held = state.get("second_moment")
    if held is None:
        state["second_moment"] = held = torch.zeros(sum(sizes), dtype=torch.float32, device=p.device)
    elif isinstance(held, DTensor):  # as a sharded checkpoint gives it; every rank has all of it
        state["second_moment"] = held = held.full_tensor()
    return [part.view(shape[0], -1) for part, shape in zip(held.split(sizes), shapes, strict=True)]


def normalize_neurons(update: Tensor, second_moment: Tensor, beta2: float) -> Tensor:
    """Divide each neuron of ``O`` by the root of its running mean square, and keep the norm of ``O`` (NorMuon).

    Args:
        update: ``O`` of several matrices, shape (j, out, in).
        second_moment: ``S`` along the longer side, shape (j, out, 1) or (j, 1, in), updated in place.
        beta2: in [0, 1).
    """
    norm = torch.linalg.matrix_norm(update, keepdim=True)
    # S := b2 S + (1 - b2) mean(O^2)
    dim = 2 if second_moment.shape[2] == 1 else 1
    second_moment.lerp_(update.square().mean(dim=dim, keepdim=True, dtype=second_moment.dtype), 1 - beta2)
    # O := O / sqrt(S), of O's norm before
    scaled = update * second_moment.clamp(min=1e-10).rsqrt()
    return (scaled * (norm / torch.linalg.matrix_norm(scaled, keepdim=True).clamp(min=1e-10))).to(update.dtype)


def normalize_stack(pieces: Sequence[Piece], x: Tensor) -> None:
    """Apply NorMuon's normalization in place to the pieces that use it; ``x`` as for :func:`take_steps`."""
    for piece, part in zip(pieces, x.split([piece.size for piece in pieces]), strict=True):
        if piece.second_moment is not None:
            wide = part.shape[1] < part.shape[2]
            second_moment = piece.second_moment.unsqueeze(1 if wide else 2)
            part.copy_(normalize_neurons(part, second_moment, piece.group["beta2"]))


def take_steps(pieces: Sequence[Piece], x: Tensor, scratch: Scratch) -> None:
    """Compute ``p := p - lr scale O - lr wd p`` in place; "cautious" decays only if ``O p >= 0``.

    It handles a bounded number of bytes at a time, which stay in a processor's cache.

    Args:
        pieces: pieces with targets, of one shape and dtype.
        x: their ``O`` in order, shape (k, out, in). It is overwritten.
        scratch: memory to work in.
    """
    limit = limit_of(x, _STEPPED)
    rest = x
    for some in runs(pieces, [piece.shape.numel() * piece.p.element_size() for piece in pieces], limit):
        own, rest = rest.tensor_split([sum(piece.size for piece in some)])
        targets = [piece.target for piece in some if piece.target is not None]
        if len(some) > 1:
            _take(some, targets, own, scratch)
            continue
        rows = max(limit // (own.shape[0] * own.shape[2] * targets[0].element_size()), 1)
        along = 0 if targets[0].shape != own.shape else 1  # a convolution has no dimension of matrices
        for target, part in zip(targets[0].split(rows, along), own.split(rows, 1), strict=True):
            _take(some, [target], part, scratch)


def _take(pieces: Sequence[Piece], targets: list[Tensor], x: Tensor, scratch: Scratch) -> None:
    """Do the step of :func:`take_steps` on ``targets``, which are those of the pieces or the same rows of each."""
    dtype, sizes = targets[0].dtype, [piece.size for piece in pieces]
    lengths = [float(piece.group["lr"]) * piece.scale for piece in pieces]
    x, length = _as(torch.promote_types(x.dtype, dtype), x, scratch), lengths[0]
    if length == 0.0 or any(other != length for other in lengths):
        # O := lr scale O
        lists.mul_(list(x.split(sizes)), lengths)
        length = 1.0
    x = x.to(dtype)
    decays = [piece.decay if piece.group["cautious"] else 0.0 for piece in pieces]
    if any(decays):
        shaped = [target.reshape(-1, *x.shape[1:]) for target in targets]
        p = shaped[0]
        if len(shaped) > 1:
            p = torch.cat(shaped, out=scratch.get("weights", x.shape, dtype, x.device))
        # O := O + (wd / scale) p [O p >= 0]
        kept = torch.mul(x, p, out=scratch.get("kept", x.shape, dtype, x.device)).ge_(0)
        if any(other != decays[0] for other in decays):
            lists.mul_(list(kept.split(sizes)), [decay / length for decay in decays])
            x.addcmul_(kept, p)
        else:
            x.addcmul_(kept, p, value=decays[0] / length)
    for piece, target in zip(pieces, targets, strict=True):
        if piece.decay and not piece.group["cautious"]:
            target.mul_(1 - piece.decay)
    # p := p - lr scale O; for a convolution in the shape of its kernels
    steps = [part.reshape(target.shape) for part, target in zip(x.split(sizes), targets, strict=True)]
    lists.sub_(targets, steps, alpha=length)


def _as(dtype: torch.dtype, x: Tensor, scratch: Scratch) -> Tensor:
    return x if x.dtype == dtype else scratch.get("steps", x.shape, dtype, x.device).copy_(x)


def take_part(piece: Piece, x: Tensor, scratch: Scratch) -> None:
    """Do the same for the part of one matrix that this rank holds.

    Args:
        piece: the matrix, with its whole shape, and the part as its target.
        x: the same part of its ``O``, in the shape of the target. It is overwritten.
        scratch: memory to work in.
    """
    if piece.target is not None:
        _take([piece], [piece.target], x.unsqueeze(0), scratch)
