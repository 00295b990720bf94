"""Convex combinations of samples: which tensors of a batch are mixed, and with which shares."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor
from typing_extensions import override

from lightning_eff._core.batches import lies_at, tensors, top_key
from lightning_eff.data.augmentation._boxes import numbers
from lightning_eff.data.augmentation._engine import BASELINE
from lightning_eff.data.augmentation._mixing import Mixing, draw_shares


def mixup(x: Tensor, partner: Tensor, share: Tensor) -> Tensor:
    """Return ``lambda_i x_i + (1 - lambda_i) x_j`` with ``j = partner[i]``, in the shape and dtype of ``x``.

    Args:
        x: samples, (B, ...), floating point.
        partner: ``j``, (B,), integers.
        share: ``lambda``, (B,) or (1,), in [0, 1].
    """
    share = share.to(x.device, torch.float64 if x.dtype == torch.float64 else torch.float32)
    share = share.reshape(-1, *(1,) * (x.ndim - 1))
    mixture = share * x
    other = x.index_select(0, partner.to(x.device))
    if x.dtype == mixture.dtype and not x.requires_grad:  # no further tensors of the batch's size
        return mixture.add_(other.mul_(1 - share))
    return (mixture + (1 - share) * other).to(x.dtype)


class Convex(Mixing):
    """Mixes samples as ``lambda x_i + (1 - lambda) x_j``, with ``lambda ~ Beta(alpha, alpha)``; ``alpha=0`` is plain training.

    Class attributes, in addition to those of :class:`Mixing`:
        mend: what to do if a batch holds nothing that can be averaged.
    """

    by_sample: ClassVar[bool] = False
    mend: ClassVar[str] = "Remove the technique."
    neutral_at: ClassVar[Mapping[str, Any]] = {"alpha": 0}
    control = BASELINE

    @override
    def inputs(self, batch: Any, labels: dict[str, Tensor]) -> list[Tensor]:
        who, beside = type(self).__name__, {id(y) for y in labels.values()}
        named = [
            (path, t) for path, t in tensors(batch) if t.is_floating_point() and t.ndim > 1 and id(t) not in beside
        ]
        if self.keys is None and len(named) == 1 and named[0][1].ndim != 4:
            return [named[0][1]]
        if self.keys is None and not named and not any(t.ndim == 4 for _, t in tensors(batch)):
            held = ", ".join(f"{path or 'the batch'} {tuple(t.shape)} {str(t.dtype)[6:]}" for path, t in tensors(batch))
            raise ValueError(
                f"{who}: found no images in the batch, and no other tensor (B, ...) of floating point beside the labels:"
                f" {held}. It cannot mix token ids, because ids of tokens have no mean. {self.mend}"
            )
        if self.keys is None and len(named) > 1 and not any(t.ndim == 4 for _, t in tensors(batch)):
            held = ", ".join(f"{path} {tuple(t.shape)}" for path, t in named)
            keys = list(dict.fromkeys(top_key(path) for path, _ in named))
            raise ValueError(
                f"{who}: the batch has several tensors that could be mixed: {held}. Name those to mix, for example with"
                f" {who}(keys={keys})."
            )
        if self.keys is not None and (found := self._named(batch, self.keys)) and all(t.ndim != 4 for t in found):
            return found
        return super().inputs(batch, labels)

    def _named(self, batch: Any, keys: Sequence[str | int]) -> list[Tensor]:
        found = [t for path, t in tensors(batch) if any(lies_at(path, key) for key in keys) and t.is_floating_point()]
        if not found:
            held = ", ".join(f"{path or 'the batch'} {tuple(t.shape)} {str(t.dtype)[6:]}" for path, t in tensors(batch))
            raise ValueError(
                f"{type(self).__name__}(keys={list(keys)}): none of them is a tensor of floating point in the batch, which"
                f" holds {held}. Name the tensors to mix, or leave keys out."
            )
        return found

    @override
    def mix(self, inputs: list[Tensor], partner: Tensor, generator: Generator) -> tuple[list[Tensor], Tensor]:
        share = self.shares(len(partner), generator)
        return [mixup(x, partner, share) for x in inputs], share.expand(len(partner))

    def shares(self, size: int, generator: Generator) -> Tensor:
        """Draw ``lambda`` of each sample, (B,), or of all, (1,), at least one half."""
        share = draw_shares(self.alpha, size if self.per_sample else 1, numbers(generator))
        # swapping the roles of i and j does not change the distribution of mixtures
        return torch.maximum(share, 1 - share).float()
