"""Mixes a module's self-attention on patches with attention to positions, whatever function computes it."""

import inspect
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_eff._core._attention.calls import as_term
from lightning_eff.model.initialization._gated.rule import mixed, position_scores

FUSED = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)
MODULE = inspect.signature(F.multi_head_attention_forward)


class Grid(NamedTuple):
    """The places of an image's patches among a sample's tokens: row by row, in one piece.

    Attributes:
        height: in patches.
        width: in patches.
        before: the number of other tokens in front of the patches, such as a class token.
        after: the number of other tokens behind them.
    """

    height: int
    width: int
    before: int
    after: int

    def of(self, tokens: int) -> "Grid":
        """Return the grid for this number of tokens; for another image size, one of the same proportions.

        Raises:
            ValueError: if there is none.
        """
        patches = tokens - self.before - self.after
        if patches == self.height * self.width:
            return self
        scale = math.sqrt(max(patches, 0) / (self.height * self.width))
        height, width = round(self.height * scale), round(self.width * scale)
        if height * width != patches or patches < 1:
            raise ValueError(
                f"GatedPositionalAttention: {tokens} tokens, {self.before + self.after} of which are not patches, do not form"
                f" a grid in the proportion of {self.height} x {self.width}. Use images of this shape, or show it a batch:"
                " lightning_eff.apply(module, technique, batch=batch)."
            )
        return Grid(height, width, self.before, self.after)


class Mixing(TorchFunctionMode):
    """Adds positions to self-attention on all tokens while the context is open.

    A token that is not a patch attends by content alone, and is attended to by content alone.

    Args:
        gate: lambda, (H,).
        weights: v, (H, 3).
        grid: the grid of patches.
    """

    def __init__(self, gate: Tensor, weights: Tensor, grid: Grid) -> None:
        super().__init__()
        self.gate, self.weights, self.grid = gate, weights, grid

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            given: dict[str, Any] = {**dict(zip(FUSED, args, strict=False)), **kwargs}
            q, k = given["query"], given["key"]
            if q.ndim == 4 and q.shape[1] == len(self.gate) and q.shape[2] == k.shape[2]:
                return self.fused(**given)
        if func is F.multi_head_attention_forward and args[0] is args[1]:
            return self._of_module(MODULE.bind(*args, **kwargs))
        if func in SOFTMAX:
            return self._softmax(func, args, kwargs)
        return func(*args, **kwargs)

    def positions(self, tokens: int, mask: Tensor | None = None) -> Tensor:
        """Return the softmax of ``v^T r`` over the patches: (H, n, n), or (B, H, n, n) under a mask; zero in rows of other
        tokens.
        """
        grid = self.grid.of(tokens)
        part = slice(grid.before, tokens - grid.after)
        scores = position_scores(self.weights, grid.height, grid.width)
        if mask is not None:
            hidden = mask.logical_not() if mask.dtype == torch.bool else mask == -torch.inf
            scores = scores.masked_fill(hidden.expand(*hidden.shape[:-2], tokens, tokens)[..., part, part], -torch.inf)
        return F.pad(scores.softmax(dim=-1), (grid.before, grid.after, grid.before, grid.after))

    def mix(self, content: Tensor, position: Tensor) -> Tensor:
        """Mix both by the gate in the rows of patches; (..., H, n, anything)."""
        tokens = content.shape[-2]
        part = slice(self.grid.before, tokens - self.grid.after)
        patches = mixed(content[..., part, :], position[..., part, :], self.gate)
        return torch.cat(
            [content[..., : self.grid.before, :], patches, content[..., tokens - self.grid.after :, :]], dim=-2
        )

    def fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        **options: Any,
    ) -> Tensor:
        """Compute ``scaled_dot_product_attention`` on (B, H, n, d) and mix its result with what positions make of the
        values.
        """
        position = self.positions(query.shape[-2], attn_mask).to(value.dtype)
        content = F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, **options)
        if options.get("enable_gqa"):
            value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        return self.mix(content, F.dropout(position, dropout_p) @ value)

    def _softmax(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        content = func(*args, **kwargs)
        scores = args[0] if args else kwargs["input"]
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        heads, tokens = len(self.gate), scores.shape[-1]
        square = scores.ndim in (3, 4) and scores.shape[-2] == tokens and dim in (-1, scores.ndim - 1)
        if not square or scores.shape[-3] % heads or (scores.ndim == 4 and scores.shape[1] != heads):
            return content
        hidden = scores.detach() == -torch.inf
        hidden = hidden.view(-1, heads, tokens, tokens)
        mask = hidden.logical_not() if bool(hidden.any()) else None
        whole = self.mix(content.view(-1, heads, tokens, tokens), self.positions(tokens, mask))
        return whole.view(content.shape)

    def _of_module(self, bound: inspect.BoundArguments) -> tuple[Tensor, Tensor | None]:
        """Compute ``nn.MultiheadAttention`` of one tensor (n, B, D) to itself."""
        bound.apply_defaults()
        given = bound.arguments
        x: Tensor = given["query"]
        single = x.ndim == 2
        x = x.unsqueeze(1) if single else x
        tokens, size, width = x.shape
        heads, p = given["num_heads"], given["dropout_p"] if given["training"] else 0.0
        weight, bias = given["in_proj_weight"], given["in_proj_bias"]
        if given["use_separate_proj_weight"]:
            weight = torch.cat([given[f"{name}_proj_weight"] for name in ("q", "k", "v")])
        q, k, v = (
            part.view(tokens, size, heads, width // heads).permute(1, 2, 0, 3)
            for part in F.linear(x, weight, bias).chunk(3, dim=-1)
        )
        mask = as_term(given["attn_mask"], x)
        if mask is not None and mask.ndim == 3:
            mask = mask.view(size, heads, tokens, tokens)
        padding = as_term(given["key_padding_mask"], x)
        if padding is not None:
            padding = padding.view(size, 1, 1, tokens)
            mask = padding if mask is None else mask + padding
        weights: Tensor | None = None
        if given["need_weights"]:
            scores = q @ k.mT / math.sqrt(width // heads)
            scores = scores if mask is None else scores + mask
            weights = F.dropout(self.mix(scores.softmax(dim=-1), self.positions(tokens, mask)), p)
            attended = weights @ v
            weights = weights.mean(dim=1) if given["average_attn_weights"] else weights
            weights = weights.squeeze(0) if single else weights
        else:
            attended = self.fused(q, k, v, mask, p)
        attended = attended.permute(2, 0, 1, 3).reshape(tokens, size, width)
        output = F.linear(attended, given["out_proj_weight"], given["out_proj_bias"])
        return output.squeeze(1) if single else output, weights
