"""Attention of samples that share a row: each sample's tokens attend only to one another.

``F.scaled_dot_product_attention`` is replaced wherever it is called within a block, under any name, including Hugging Face's
attention and ``nn.MultiheadAttention``. On a CPU it is computed sample by sample, whose cost depends on each sample's length,
and a causal call stays causal. Elsewhere, where many small calls would be slow, it is computed once with a block-diagonal mask.
For ``flex_attention`` see :mod:`~lightning_eff.data.tokens._packing.flex`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_eff._core.patches import Patches
from lightning_eff.data.tokens._packing.flex import Flex, Mods
from lightning_eff.data.tokens._packing.rows import Rows

APART = ("cpu",)  #: device types on which it is computed sample by sample


class Attention(TorchFunctionMode):
    """Lets attention work on samples in rows, within :meth:`within`.

    Args:
        who: the technique's name, for messages.

    Attributes:
        flex: FlexAttention on these rows.
    """

    apart_from_compiled = True  # it sees nothing in compiled code, which need not be compiled with it

    def __init__(self, who: str) -> None:
        super().__init__()
        self.who = who
        self.flex = Flex(self._check)
        self._rows: Rows | None = None
        self._around: tuple[bool, Any] = (False, None)

    @contextmanager
    def within(self, block: nn.Module, rows: Rows, mods: Mods) -> Iterator[None]:
        """Run one call of a block on these rows; each call, since a recomputing backward pass has no active modes."""
        around = self._rows, self._around
        self._rows, self._around = rows, _recording()
        try:
            with self, self.flex.within(block, rows, mods):
                yield
        finally:
            self._rows, self._around = around

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, rows = kwargs or {}, self._rows
        if rows is None or func not in (F.scaled_dot_product_attention, F.multi_head_attention_forward):
            return func(*args, **kwargs)
        self._check()
        if func is F.scaled_dot_product_attention:
            return attend(func, rows, *args, **kwargs)
        # a Python function of torch in which this mode is off, and which looks names up in F
        plain, patches = F.scaled_dot_product_attention, Patches()
        patches.set(F, "scaled_dot_product_attention", lambda *a, **kw: attend(plain, rows, *a, **kw))
        try:
            return func(*args, **kwargs)
        finally:
            patches.restore()

    def _check(self) -> None:
        if _recording() != self._around:
            raise ValueError(
                f"{self.who}: attention is within a checkpoint inside of its block, and would be recomputed without its rows."
                f" Checkpoint whole blocks, as Rematerialization does, or remove {self.who}."
            )


def _recording() -> tuple[bool, Any]:
    """Return whether a graph is recorded, and which of torch's checkpoints saves it, if any."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore[reportAttributeAccessIssue]
    if hooks is None or getattr(hooks[0], "__module__", "") != "torch.utils.checkpoint":
        return torch.is_grad_enabled(), None
    return torch.is_grad_enabled(), hooks[0]


def attend(
    func: Callable[..., Tensor],
    rows: Rows,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    apart: bool | None = None,
    **rest: Any,
) -> Tensor:
    """Compute ``F.scaled_dot_product_attention`` such that no token attends to another sample.

    Args:
        func: the plain function.
        rows: the positions of the samples.
        query: (R, H, L, E), or (R H, L, E). With other shapes the call is plain.
        key: likewise.
        value: likewise.
        attn_mask: as in the plain function.
        dropout_p: as in the plain function.
        is_causal: as in the plain function.
        apart: whether to compute sample by sample; None if the device is in :data:`APART`.
        rest: other arguments of the plain function.
    """
    tensors = (query, key, value)
    if query.ndim == 3 and all(t.ndim == 3 and t.shape[0] % rows.count == 0 for t in tensors):
        query, key, value = (t.unflatten(0, (rows.count, -1)) for t in tensors)
        if attn_mask is not None and attn_mask.ndim == 3 and attn_mask.shape[0] == tensors[0].shape[0] > 1:
            attn_mask = attn_mask.unflatten(0, (rows.count, -1))
        settings = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "apart": apart}
        return attend(func, rows, query, key, value, **settings, **rest).flatten(0, 1)
    if any(t.ndim != 4 or t.shape[0] != rows.count or t.shape[2] != rows.length for t in tensors):
        return func(query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, **rest)
    if apart is None:
        apart = query.device.type in APART
    if apart:
        return _apart(func, rows, (query, key, value), attn_mask, dropout_p=dropout_p, is_causal=is_causal, **rest)
    same = rows.same.unsqueeze(1)
    if is_causal:
        same = same.tril()
    if attn_mask is None:
        attn_mask = same
    elif attn_mask.dtype == torch.bool:
        attn_mask = attn_mask & same
    else:
        attn_mask = torch.where(same, attn_mask, -torch.inf)
    return func(query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, **rest)


def _apart(
    func: Callable[..., Tensor], rows: Rows, tensors: tuple[Tensor, ...], mask: Tensor | None, **settings: Any
) -> Tensor:
    """Make one call per sample; empty slots get zeros."""
    sizes = [piece.stop - piece.start for piece in rows.pieces]
    # consecutive tokens, so that one split and one join serve any number of samples
    parts = zip(*(t.transpose(1, 2).flatten(0, 1).split(sizes) for t in tensors), strict=True)
    found: list[Tensor | None] = []
    for piece, (q, k, v) in zip(rows.pieces, parts, strict=True):
        if piece.sample < 0:
            found.append(None)
            continue
        one = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        seen = None if mask is None else _cut(mask, piece.row, slice(piece.start, piece.stop), rows.count)
        found.append(func(*one, attn_mask=seen, **settings).squeeze(0).transpose(0, 1))
    first = next(t for t in found if t is not None)
    whole = [first.new_zeros(n, *first.shape[1:]) if t is None else t for n, t in zip(sizes, found, strict=True)]
    return torch.cat(whole).unflatten(0, (rows.count, rows.length)).transpose(1, 2)


def _cut(mask: Tensor, row: int, tokens: slice, count: int) -> Tensor:
    """Return the part of a mask of rows for one sample."""
    if mask.ndim == 4 and mask.shape[0] == count:
        mask = mask[row : row + 1]
    every = slice(None)
    return mask[..., tokens if mask.shape[-2] > 1 else every, tokens if mask.shape[-1] > 1 else every]
