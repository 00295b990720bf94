"""Which places of a batch hold padding: by a mask in it, or by the id of padding."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_eff._core.batches import lies_at, tensors

_OTHERS = ("special", "loss", "label", "mlm", "masked", "span", "global", "decoder", "pixel", "image", "token_type")


@dataclass(frozen=True)
class Padding:
    """How a batch tells its padding.

    Attributes:
        who: the technique's name, for messages.
        path: of the mask in the batch, or of the ids, as ``tensors`` tells it.
        true_pads: the mask is true at padding, and not at tokens.
        pad_token_id: of padding, where the path is of ids.
    """

    who: str
    path: str
    true_pads: bool = False
    pad_token_id: int | None = None

    def keep(self, batch: Any) -> Tensor | None:
        """Which places hold tokens, (B, T), bool; None where the batch has no such tensor, and so no padding.

        Raises:
            ValueError: if the mask is another than of zeros and ones, (B, T).
        """
        found = dict(tensors(batch)).get(self.path)
        if found is None:
            return None
        if self.pad_token_id is not None:
            token = (found != self.pad_token_id).long()
            return (token.cumsum(1) > 0) & (token.flip(1).cumsum(1).flip(1) > 0)
        if found.ndim != 2 or not _is_binary(found):
            raise ValueError(
                f"{self.who}: the mask of padding {self.path} is {tuple(found.shape)} {str(found.dtype)[6:]} in a later batch;"
                " expected (B, T) with zeros and ones."
            )
        return (found == 0) if self.true_pads else (found != 0)


def find_padding(batch: Any, mask: str | int | None, pad_token_id: int | None, *, who: str) -> Padding:
    """How this batch tells its padding.

    Args:
        batch: any; its mask is a tensor (B, T) of bools, or of zeros and ones.
        mask: its name or position; None for ``attention_mask``, or the only mask of tokens by its name.
        pad_token_id: of padding, in the batch's first tensor of ids; None for a mask.
        who: the technique's name, for messages.

    Raises:
        ValueError: if there is none, or several.
    """
    held = tensors(batch)
    listed = ", ".join(f"{path or 'the batch'} {tuple(t.shape)} {str(t.dtype)[6:]}" for path, t in held) or "no tensor"
    if pad_token_id is not None:
        ids = [path for path, t in held if t.ndim == 2 and _is_integer(t) and (mask is None or lies_at(path, mask))]
        if not ids:
            raise ValueError(
                f"{who}(pad_token_id={pad_token_id}): found no ids in the batch: {listed}; expected an integer tensor (B, T)."
            )
        return Padding(who, ids[0], pad_token_id=pad_token_id)
    if mask is not None:
        named = [(path, t) for path, t in held if lies_at(path, mask)]
        if len(named) != 1 or named[0][1].ndim != 2 or not _is_binary(named[0][1]):
            raise ValueError(
                f"{who}(mask={mask!r}): the batch holds {listed}; expected one tensor (B, T) of that name or position, of bools"
                " or of zeros and ones."
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
            raise ValueError(f"{who}: found several masks in the batch: {', '.join(choice)}. Name one by mask=.")
    raise ValueError(
        f"{who}: found no mask of padding in the batch: {listed}; expected a tensor (B, T) of bools or of zeros and ones, as"
        " Hugging Face's attention_mask is. Let the collate function return one, name it by mask=, or give pad_token_id=."
    )


def _is_integer(t: Tensor) -> bool:
    return not (t.is_floating_point() or t.is_complex()) and t.dtype.itemsize > 1


def _is_binary(t: Tensor) -> bool:
    return t.dtype == torch.bool or (not t.is_complex() and bool(((t == 0) | (t == 1)).all()))
