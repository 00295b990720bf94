"""A small model that predicts which samples of a batch have a large loss, at next to no cost."""

import copy
import math
import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core import rng
from lightning_eff._core.batches import map_tensors, num_samples, tensors

_PRIME = 2_654_435_761  # Knuth's multiplicative hash
_SIDE, _NUMBERS, _BOUND = 8, 256, 10.0


def buckets_of(keys: Tensor, path: str, num_buckets: int) -> Tensor:
    """Hash integers of the batch at ``path`` into buckets, long, in the shape of ``keys``."""
    return ((keys.long() + zlib.crc32(path.encode())) * _PRIME % 2**32) % num_buckets


def numbers_of(x: Tensor) -> Tensor:
    """Reduce each sample to at most 256 numbers in [-10, 10], shape (B, n), float32. Images are pooled to 8 x 8."""
    scale = 1.0 if x.is_floating_point() else 1 / 255
    x = torch.nan_to_num(x.float() * scale, posinf=_BOUND, neginf=-_BOUND).clamp(-_BOUND, _BOUND)
    if x.ndim >= 4 and min(x.shape[-2:]) > _SIDE:
        x = F.adaptive_avg_pool2d(x.flatten(1, -3), _SIDE)
    x = x.flatten(1) if x.ndim > 1 else x[:, None]
    return F.adaptive_avg_pool1d(x[:, None], _NUMBERS)[:, 0] if x.shape[1] > _NUMBERS else x


class HashedLogistic(nn.Module):
    """A logistic regression ``g(x) = <w, h(x)>`` on all tensors of a sample, hashed into few weights.

    Integers, such as tokens and labels, count as a bag: each of the ``n`` in a tensor adds the weight of its bucket, divided by
    ``n``. Floating-point values and bytes add ``x_j`` times the weight of the bucket of their position ``j``. A bias is added.

    Args:
        num_buckets: the number of weights.
    """

    def __init__(self, num_buckets: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(num_buckets, 1, dtype=torch.float32))
        self.bias = nn.Parameter(torch.zeros((), dtype=torch.float32))

    @override
    def forward(self, batch: Any) -> Tensor:
        size, num_buckets = num_samples(batch), len(self.w)
        logits = self.bias.expand(size)
        for path, x in tensors(batch):
            if x.ndim == 0 or x.shape[0] != size or not x.numel() or x.is_complex():
                continue
            if x.is_floating_point() or x.dtype == torch.uint8:
                numbers = numbers_of(x)
                at = buckets_of(torch.arange(numbers.shape[1], device=x.device), path, num_buckets)
                logits = logits + numbers @ F.embedding(at, self.w)[:, 0] / numbers.shape[1] ** 0.5
            else:
                at = buckets_of(x.reshape(size, -1), path, num_buckets)
                logits = logits + F.embedding(at, self.w)[..., 0].mean(dim=1)
        return logits


class Assistant:
    """A model that learns, step by step, which samples have a loss above the recent mean, the same on all ranks.

    Args:
        given: the user's model, which returns one logit per sample of a batch, shape (B,). It is copied. None takes a
            :class:`HashedLogistic`.
        num_buckets: the number of weights of the :class:`HashedLogistic`.
        lr: the learning rate of its AdaGrad.
        smoothing: the weight of earlier steps in the mean of the losses.
        seed: the seed of the user's model's random draws.
        device: the device that it runs on.

    Attributes:
        threshold: ``T``, the moving mean of the losses. NaN before the first.
        accuracy: the moving fraction of samples that it predicted correctly.
    """

    def __init__(
        self,
        given: nn.Module | None,
        *,
        num_buckets: int,
        lr: float,
        smoothing: float,
        seed: int,
        device: torch.device,
    ) -> None:
        self.net = HashedLogistic(num_buckets) if given is None else copy.deepcopy(given)
        self.net.to(device)
        self.optimizer = torch.optim.Adagrad(self.net.parameters(), lr=lr, foreach=False)
        self.smoothing, self.seed = smoothing, seed
        self.draws = given is not None
        self.threshold, self.accuracy = float("nan"), float("nan")
        self._batch: Any = None

    def logits(self, batch: Any, *, training: bool) -> Tensor:
        """Compute ``g(x_i)``, shape (B,), float32. The caller decides about gradients.

        Raises:
            ValueError: if the user's model returns something else.
        """
        size = num_samples(batch)
        device = next(self.net.parameters()).device
        single = map_tensors(batch, lambda t: t.detach().float() if t.is_floating_point() else t.detach())
        self.net.train(training)
        with torch.autocast(device.type, enabled=False):
            found = self.net(single)
        if not isinstance(found, Tensor) or found.shape not in ((size,), (size, 1)):
            got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(
                f"AutoAssist(assistant={type(self.net).__name__}(...)): it returned {got} for a batch of {size} samples;"
                f" expected one logit per sample. Return a tensor of shape ({size},), for example self.head(x).squeeze(-1)."
            )
        return found.reshape(size).float()

    def probabilities(self, batch: Any, *key: int | str) -> Tensor:
        """Compute ``p_i = sigmoid(g(x_i))`` on the CPU, shape (B,), float64."""
        with torch.no_grad(), self._apart(*key):
            return torch.sigmoid(self.logits(batch, training=False).double()).cpu()

    def gradients(self, batch: Any, losses: Tensor, count: int, *key: int | str) -> tuple[list[Tensor], int]:
        """Compute this rank's part of the gradient of the mean cross-entropy, and its number of correct predictions.

        The target is ``z_i = 1[l_i > T]``.

        Args:
            batch: the samples that were trained on.
            losses: ``l_i``, shape (B,).
            count: the number of samples of all ranks.
            key: the key of the model's random draws.
        """
        parameters = [p for p in self.net.parameters() if p.requires_grad]
        with torch.enable_grad(), self._apart(*key):
            logits = self.logits(batch, training=True)
            z = (losses > self.threshold).to(logits)
            loss = F.binary_cross_entropy_with_logits(logits, z, reduction="sum") / count
            found = torch.autograd.grad(loss, parameters, allow_unused=True)
        right = int(((logits.detach() > 0) == (z > 0)).sum())
        return [(torch.zeros_like(p) if g is None else g).cpu() for p, g in zip(parameters, found, strict=True)], right

    def see(self, total: float, count: int) -> None:
        """Update the mean with the losses of all ranks: ``T <- s T + (1 - s) mean``."""
        mean = total / count
        self.threshold = self._moved(self.threshold, mean)

    def step(self, parts: Sequence[list[Tensor]], right: int, count: int) -> None:
        """Take one step with the sum of all ranks' gradients."""
        for p, *gradients in zip((p for p in self.net.parameters() if p.requires_grad), *parts, strict=True):
            p.grad = torch.stack(gradients).sum(dim=0).to(p.device)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.accuracy = self._moved(self.accuracy, right / count)

    def buffers(self) -> list[Tensor]:
        """The model's buffers, such as running statistics, which differ between ranks."""
        return [b.detach().cpu() for b in self.net.buffers()]

    @torch.no_grad()
    def set_buffers(self, parts: Sequence[list[Tensor]]) -> None:
        """Set buffers to the mean over all ranks, and counters to those of the first rank."""
        for b, *values in zip(self.net.buffers(), *parts, strict=True):
            b.copy_(torch.stack(values).mean(dim=0) if b.is_floating_point() else values[0])

    def _moved(self, before: float, now: float) -> float:
        return now if math.isnan(before) else self.smoothing * before + (1 - self.smoothing) * now

    def _apart(self, *key: int | str) -> Any:
        return rng.keyed(self.seed, "AutoAssist", *key) if self.draws else nullcontext()

    def state_dict(self) -> dict[str, Any]:
        return {
            "net": {name: value.detach().cpu().clone() for name, value in self.net.state_dict().items()},
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "threshold": self.threshold,
            "accuracy": self.accuracy,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self.threshold, self.accuracy = state["threshold"], state["accuracy"]
