"""A mean over ranks with compressed bytes and error feedback: scatter, average, compress again, gather."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]

from lightning_eff.strategies._communication.codecs import Codec


def as_real(x: Tensor) -> Tensor:
    """Return ``x``, or a real view of a complex ``x`` with real and imaginary parts along a new last axis."""
    return torch.view_as_real(x) if x.is_complex() else x


def views_of(bucket: GradBucket) -> list[tuple[Tensor, Tensor]]:
    """Return each parameter of a DDP bucket with its gradient, a real view of the bucket's buffer.

    DDP stores complex gradients as real numbers, but ``bucket.gradients()`` counts complex ones, so its views have wrong
    offsets. Here a complex matrix has a last axis of 2, and a complex vector has twice the length. Empty parameters are
    skipped.
    """
    found: list[tuple[Tensor, Tensor]] = []
    flat, start = as_real(bucket.buffer()).view(-1), 0
    for p in bucket.parameters():
        size = p.numel() * (2 if p.is_complex() else 1)
        shape = (*p.shape, 2) if p.is_complex() and p.ndim > 1 else p.shape if not p.is_complex() else (size,)
        if size:
            found.append((p, flat[start : start + size].view(shape)))
        start += size
    assert start == flat.numel(), "a bucket holds its parameters' gradients and nothing else"
    return found


def as_matrix(x: Tensor) -> Tensor:
    """Return ``x`` of at least one dimension as float32 of shape (x.shape[0], rest), copied only if necessary."""
    return x.detach().float().reshape(x.shape[0], -1)


@dataclass
class Traffic:
    """The bytes that this rank sends with ring and pairwise algorithms, and the bytes that plain DDP would send.

    Attributes:
        sent: bytes sent.
        plain: bytes of an all-reduce of the same gradients.
    """

    sent: float = 0.0
    plain: float = 0.0

    def all_reduce(self, num_bytes: float, world_size: int) -> None:
        """Count an all-reduce of ``num_bytes``, of which a ring sends ``2 (N - 1) / N`` times as much."""
        self.sent += 2 * num_bytes * (world_size - 1) / world_size

    def instead_of(self, num_bytes: float, world_size: int) -> None:
        """Count the bytes that plain DDP would send for gradients of ``num_bytes``."""
        self.plain += 2 * num_bytes * (world_size - 1) / world_size


def log_traffic(module: LightningModule | None, name: str, traffic: Traffic) -> None:
    """Log a step's bytes under ``eff/<name>/``, and their ratio, once a step has sent some."""
    if module is not None and traffic.plain:
        values = {"sent_bytes": traffic.sent, "plain_bytes": traffic.plain, "ratio": traffic.sent / traffic.plain}
        logged = {f"eff/{name}/{key}": value for key, value in values.items()}
        module.log_dict(logged, on_step=True, on_epoch=False, batch_size=1)


@dataclass
class Residuals:
    """The compression errors of one tensor, which are added to the next values.

    Attributes:
        worker: error of this rank's values, float32 of shape (rows, cols).
        server: error of the mean of this rank's part of the rows, float32 of shape (ceil(rows / N), cols).
    """

    worker: dict[str, Tensor] = field(default_factory=dict)
    server: dict[str, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device | str) -> "Residuals":
        """Return a copy on ``device``."""
        worker = {name: e.to(device, copy=True) for name, e in self.worker.items()}
        return Residuals(worker, {name: e.to(device, copy=True) for name, e in self.server.items()})


def redistribute(ranks: list[Residuals], rank: int, world_size: int) -> Residuals:
    """Return the residuals of one of ``world_size`` ranks, from those of all ranks of the saved run.

    With the same number of ranks they are the rank's own. Otherwise the mean over ranks is preserved, since the sum of later
    updates depends only on it.
    """
    if len(ranks) == world_size:
        return ranks[rank]
    found = Residuals()
    for name, first in ranks[0].worker.items():
        found.worker[name] = torch.stack([r.worker[name] for r in ranks]).mean(dim=0)
        if name in ranks[0].server:
            whole = torch.cat([r.server[name] for r in ranks])[: first.shape[0]]
            found.server[name] = _share(whole, world_size)[rank]
    return found


def _share(x: Tensor, world_size: int) -> Tensor:
    """Split the rows of ``x`` (rows, cols) into ``world_size`` equal parts, padded with zeros at the end: (N, r, cols)."""
    rows, cols = x.shape
    share = math.ceil(rows / world_size)
    return torch.nn.functional.pad(x, (0, 0, 0, share * world_size - rows)).view(world_size, share, cols)


@torch.no_grad()
def compressed_mean(
    matrices: Mapping[str, Tensor],
    codec: Codec,
    *,
    group: dist.ProcessGroup | None,
    residuals: Residuals | None,
    seed: Callable[[str], int],
    traffic: Traffic,
) -> dict[str, Tensor]:
    """Return the mean over ranks of each matrix, and send only codes.

    Rank i sends ``C(x_i + e_i)`` in parts of rows, and keeps ``e_i <- x_i + e_i - C(x_i + e_i)``. The owner of a part averages,
    sends ``C(mean + E)``, and keeps ``E <- mean + E - C(mean + E)`` (Tang et al. 2021, arXiv:2102.02888, algorithm 1). So all
    returned means, plus ``E``, plus the mean of the ``e_i``, equal the sum of the true means.

    Each matrix is compressed separately, so the result does not depend on the grouping of matrices. All ranks get the same
    bytes, and so the same numbers.

    Args:
        matrices: float32 matrices (rows, cols) by name, with equal names and shapes on all ranks. They do not change.
        codec: encodes the matrices.
        group: the ranks; None means all.
        residuals: the error feedback, updated in place, or None.
        seed: returns the random seed for a name, different on each rank.
        traffic: counts the sent bytes.

    Returns:
        The means, in the same shapes.
    """
    world_size = dist.get_world_size(group)
    payloads, shapes = [], []
    for name, x in matrices.items():
        if residuals is not None and name in residuals.worker:
            x = x + residuals.worker[name]
        shares = _share(x, world_size)
        payloads.append(codec.encode(shares, seed(f"{name}/worker")))
        shapes.append(shares.shape[1:])
        if residuals is not None:
            sent = codec.decode(payloads[-1], *shares.shape[1:]).flatten(0, 1)[: x.shape[0]]
            residuals.worker[name] = x - sent
    if not payloads:
        return {}
    sizes = [payload.shape[1] for payload in payloads]
    outgoing = torch.cat(payloads, dim=1)
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=group)
    traffic.sent += sum(sizes) * (world_size - 1)

    answers = []
    for name, data, shape in zip(matrices, incoming.split(sizes, dim=1), shapes, strict=True):
        mean = codec.decode(data, *shape).mean(dim=0)
        if residuals is not None and name in residuals.server:
            mean = mean + residuals.server[name]
        answers.append(codec.encode(mean.unsqueeze(0), seed(f"{name}/server")))
        if residuals is not None:
            residuals.server[name] = mean - codec.decode(answers[-1], *shape)[0]
    gathered = torch.empty_like(outgoing)
    dist.all_gather_into_tensor(gathered.view(-1), torch.cat(answers, dim=1).view(-1), group=group)
    traffic.sent += sum(sizes) * (world_size - 1)

    return {
        name: codec.decode(data, *shape).flatten(0, 1)[: x.shape[0]]
        for (name, x), data, shape in zip(matrices.items(), gathered.split(sizes, dim=1), shapes, strict=True)
    }


@torch.no_grad()
def mean_of_matrices(
    tensors: Mapping[str, Tensor],
    codec: Codec,
    *,
    residuals: Residuals | None,
    seed: Callable[[str], int],
    traffic: Traffic,
) -> None:
    """Replace each real tensor by its mean over all ranks: matrices by :func:`compressed_mean`, vectors by :func:`plain_mean`.

    Args:
        tensors: non-empty tensors by name, with equal names and shapes on all ranks. A tensor of more than two dimensions is
            a matrix of shape (x.shape[0], rest).
        codec: as in :func:`compressed_mean`, and so are the other arguments.
    """
    plain_mean([x for x in tensors.values() if x.ndim < 2], group=None, traffic=traffic)
    matrices = {name: as_matrix(x) for name, x in tensors.items() if x.ndim >= 2}
    means = compressed_mean(matrices, codec, group=None, residuals=residuals, seed=seed, traffic=traffic)
    for name, mean in means.items():
        tensors[name].copy_(mean.view_as(tensors[name]))


@torch.no_grad()
def plain_mean(tensors: list[Tensor], *, group: dist.ProcessGroup | None, traffic: Traffic) -> None:
    """Replace each tensor by its mean over ranks, with one all-reduce per dtype; complex tensors are sent as real ones."""
    world_size = dist.get_world_size(group)
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for x in map(as_real, tensors):
        kinds.setdefault((x.dtype, x.device), []).append(x)
    for alike in kinds.values():
        flat = torch.cat([x.reshape(-1) for x in alike]).div_(world_size)
        dist.all_reduce(flat, group=group)
        traffic.all_reduce(flat.numel() * flat.element_size(), world_size)
        for x, mean in zip(alike, flat.split([x.numel() for x in alike]), strict=True):
            x.copy_(mean.view_as(x))
