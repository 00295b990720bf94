"""Find the padding of a batch, by a mask in it or by the id of padding."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_eff._core.batches import lies_at, tensors
from lightning_eff.data.tokens._texts.batches import listed

_OTHERS = ("special", "loss", "label", "mlm", "masked", "span", "global", "decoder", "pixel", "image", "token_type")


@dataclass(frozen=True)
class Padding:
    """How a batch marks its padding.

    Attributes:
        who: the technique's name, for messages.
        path: the path of the mask in the batch, or of the ids.
        true_pads: whether the mask is true at padding instead of at tokens.
        pad_token_id: the id of padding, if the path is of ids.
    """

    who: str
    path: str
    true_pads: bool = False
    pad_token_id: int | None = None

    def keep(self, batch: Any) -> Tensor | None:
        """Return which places hold tokens, (B, T), bool; None if the batch has no such tensor, and so no padding.

        Raises:
            ValueError: if the mask is not a (B, T) tensor of zeros and ones.
        """
        found = dict(tensors(batch)).get(self.path)
        if found is None:
            return None
        if self.pad_token_id is not None:
            token = (found != self.pad_token_id).long()
            return (token.cumsum(1) > 0) & (token.flip(1).cumsum(1).flip(1) > 0)
        if found.ndim != 2 or not _is_binary(found):
            raise ValueError(
                f"{self.who}: the mask of padding {self.path} is {tuple(found.shape)} {str(found.dtype)[6:]} in a later batch,"
                " but must be (B, T) with zeros and ones. Correct the batch."
            )
        return (found == 0) if self.true_pads else (found != 0)


def find_padding(batch: Any, mask: str | int | None, pad_token_id: int | None, *, who: str) -> Padding:
    """Find how this batch marks its padding.

    Args:
        batch: any batch; its mask is a tensor (B, T) of bools, or of zeros and ones.
        mask: its name or position; None for ``attention_mask``, or the only mask of tokens by its name.
        pad_token_id: the id of padding, in the batch's first tensor of ids; None for a mask.
        who: the technique's name, for messages.

    Raises:
        ValueError: if there is none, or several.
    """
    held = tensors(batch)
    if pad_token_id is not None:
        ids = [path for path, t in held if t.ndim == 2 and _is_integer(t) and (mask is None or lies_at(path, mask))]
        if not ids:
            raise ValueError(
                f"{who}(pad_token_id={pad_token_id}): found no ids in the batch, which holds {listed(batch)}. Return an"
                " integer tensor (B, T), and name it with mask=."
            )
        return Padding(who, ids[0], pad_token_id=pad_token_id)
    if mask is not None:
        named = [(path, t) for path, t in held if lies_at(path, mask)]
        if len(named) != 1 or named[0][1].ndim != 2 or not _is_binary(named[0][1]):
            raise ValueError(
                f"{who}(mask={mask!r}): the batch holds {listed(batch)}. Name one tensor (B, T) of bools or of zeros and"
                " ones."
            )
        return Padding(who, named[0][0], "pad" in named[0][0].lower())
    fits = [(path, t) for path, t in held if t.ndim == 2 and _is_binary(t)]
    for choice in (
        [path for path, _ in fits if path.endswith(("['attention_mask']", ".attention_mask"))],
        [path for path, _ in fits if "pad" in path.lower()],
        [path for path, _ in fits if "mask" in path.lower() and not any(part in path.lower() for part in _OTHERS)],
        [path for path, t in fits if t.dtype == torch.bool and not any(c.isalpha() for c in path)],
    ):
        if len(choice) == 1:
            return Padding(who, choice[0], "pad" in choice[0].lower())
        if choice:
            raise ValueError(f"{who}: found several masks in the batch: {', '.join(choice)}. Name one with mask=.")
    raise ValueError(
        f"{who}: found no mask of padding in the batch, which holds {listed(batch)}. Return an attention_mask (B, T) of zeros"
        " and ones, name a mask with mask=, or set pad_token_id=."
    )


def _is_integer(t: Tensor) -> bool:
    return not (t.is_floating_point() or t.is_complex()) and t.dtype.itemsize > 1


def _is_binary(t: Tensor) -> bool:
    return t.dtype == torch.bool or (not t.is_complex() and bool(((t == 0) | (t == 1)).all()))
