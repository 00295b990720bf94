"""Apply edits of texts to a batch, and move labels, masks and other tensors along with the tokens."""

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

#: The visible tokens of a text in their new order, each with its old position, or None for an inserted token.
Edited = list[tuple[int, int | None]]
_PLACES = re.compile(r"position|index|length", re.IGNORECASE)
_MASK = re.compile(r"attention_mask|padding_mask")


def apply_edits(
    rows: Sequence[Edited | None],
    path: str,
    ids: Tensor,
    seen: Tensor,
    beside: Mapping[str, Tensor],
    *,
    labels: set[str],
    pad: int,
    ignored: int,
) -> dict[str, Tensor]:
    """Return the new tokens, and the other tensors that belong to tokens, by path.

    Args:
        rows: the new text of each sample, or None for an unchanged one.
        path: the path of the tokens.
        ids: the tokens (B, T).
        seen: which of them are no padding, (B, T). Padding stays on the same side.
        beside: other tensors of the same shape.
        labels: the paths of those that are labels.
        pad: the padding token.
        ignored: the value of ignored labels.
    """
    size, width = ids.shape
    at = torch.arange(width).expand(size, width).clone()  # the old position of each token; -1 inserted, -2 padding
    new, there = ids.cpu().clone(), seen.cpu()
    for i, edited in enumerate(rows):
        if edited is None:
            continue
        first = width - len(edited) if bool(there[i, -1]) and not bool(there[i, 0]) else 0
        at[i] = -2
        new[i] = pad
        places = slice(first, first + len(edited))
        at[i, places] = torch.tensor([-1 if t is None else t for _, t in edited], dtype=torch.long)
        new[i, places] = torch.tensor([x for x, _ in edited], dtype=new.dtype)
    changed = torch.tensor([edited is not None for edited in rows], device=ids.device)[:, None]
    at, new = at.to(ids.device), new.to(ids.device)
    made = {path: new}
    for name, t in beside.items():
        if name in labels:
            made[name] = torch.where(changed, _labels(t, ids, new, at, seen, ignored), t)
        elif _MASK.search(name):
            made[name] = _moved(t, at).masked_fill(at == -1, 1).masked_fill(at == -2, 0)
        elif not _PLACES.search(name):
            made[name] = _moved(t, at).masked_fill(at == -2, 0)
    return made


def _moved(t: Tensor, at: Tensor) -> Tensor:
    """Move values with their tokens. An inserted token copies the value of the token before it."""
    places = torch.where(at == -1, 0, torch.arange(at.shape[1], device=at.device))
    return t.gather(1, at.gather(1, places.cummax(dim=1).values).clamp(min=0))


def _labels(labels: Tensor, ids: Tensor, new: Tensor, at: Tensor, seen: Tensor, ignored: int) -> Tensor:
    """Return labels of tokens: those of the new text if they were the text itself, otherwise moved with the tokens."""
    counts, old = labels != ignored, at >= 0
    if bool((labels == ids)[counts].all()):  # the text itself: tokens with a label keep one
        return torch.where(_moved(counts, at) & old, new, ignored)
    inner = counts.scatter(1, _last(seen), False)[
        :, :-1
    ]  # without the last token, whose next token is not in the batch
    if not bool((labels[:, :-1] == ids[:, 1:])[inner].all()):
        return _moved(labels, at).masked_fill(~old, ignored)
    # the next token: its label is one position before it, and the label of the last token stays
    asked = _moved(torch.cat([counts[:, :1], counts[:, :-1]], dim=1), at) & old
    found = torch.where(asked, new, ignored).roll(-1, dims=1)
    end = labels.gather(1, _last(seen))
    return found.scatter(1, _last(at != -2), end).masked_fill(at == -2, ignored)


def _last(held: Tensor) -> Tensor:
    """Return the last true position of each row, (B, 1)."""
    return (held * torch.arange(1, held.shape[1] + 1, device=held.device)).argmax(dim=1, keepdim=True)
