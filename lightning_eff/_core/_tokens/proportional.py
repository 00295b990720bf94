"""Proportional attention: weight each token by the number of tokens that it represents (Bolya et al. 2022), in any attention.

``softmax(Q K^T / sqrt(d) + log s) V`` is attention with each token present ``s`` times. The logarithm is added where a block
calls torch's ``scaled_dot_product_attention``, or its own softmax of a product ``Q K^T``. A trial checks that this works: a
block must return the same for tokens with sizes as for repeated tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_eff._core import rng
from lightning_eff._core._tokens.checking import TOLERANCE, Trial, as_in_training
from lightning_eff._core._tokens.inputs import Call, mapped
from lightning_eff._core.blocks import hidden_of, split_output

_PRODUCTS = frozenset({torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__})
_SOFTMAX = frozenset({F.softmax, torch.softmax, Tensor.softmax})
_NAMES = ("attn_mask", "dropout_p", "is_causal")
_SUMS = frozenset({torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__})


class Proportional(TorchFunctionMode):
    """Adds ``log s`` to the scores of attention over all tokens, while it is entered.

    Args:
        samples: the number of samples.
        tokens: n, per sample. Attention with other numbers of queries or keys is not changed.
        sizes: s, (B, n); None for ones, which leaves attention bit-for-bit unchanged.

    Attributes:
        keys: the keys of the latest attention over all tokens, as a mean over heads, (B, n, d), without a graph.
        causal: whether any attention was causal.
        runs_again: whether a checkpoint within the block will recompute attention in the backward pass, without this mode.
    """

    def __init__(self, samples: int, tokens: int, sizes: Tensor | None) -> None:
        super().__init__()
        self.samples, self.tokens = samples, tokens
        self.keys: Tensor | None = None
        self.causal = False
        self.runs_again = False
        self._around = _saving()
        self._merge: tuple[Tensor, Callable[[Tensor, Tensor], Tensor]] | None = None
        self._log = None if sizes is None else sizes.log()
        self._right: Tensor | None = None  # the right factor of the latest square product, perhaps K^T

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            return self._fused(func, args, kwargs)
        if func in _SOFTMAX:
            return self._softmax(func, args, kwargs)
        output = func(*args, **kwargs)
        if func in _SUMS and self._merge is not None and self.keys is not None:
            return self._summed(output, args)
        if func in _PRODUCTS and self._of_tokens(output) and len(args) == 2:
            self._right = args[1]
        return output

    def merge_behind(self, hidden: Tensor, merge: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Replace the sum of a block's input and its attention's result by ``merge(sum, keys)``, once.

        Args:
            hidden: the block's input, (B, n, D).
            merge: takes the sum and the keys of the attention, (B, n, d), and returns fewer tokens, (B, m, D).
        """
        self._merge = hidden, merge

    def _summed(self, output: Any, args: tuple[Any, ...]) -> Any:
        assert self._merge is not None and self.keys is not None, "it was asked for"
        hidden, merge = self._merge
        if not any(value is hidden for value in args) or output.shape != hidden.shape:
            return output
        self._merge = None
        return merge(output, self.keys)

    @property
    def waits(self) -> bool:
        """Whether the tokens that were to be merged have not been."""
        return self._merge is not None

    def _fused(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        query, key, value = (*args[:3], *(kwargs.pop(name) for name in ("query", "key", "value")[len(args) :]))
        kwargs.update(zip(_NAMES, args[3:], strict=False))
        if query.shape[-2] == key.shape[-2] == self.tokens and key.ndim > 2 and key.shape[0] % self.samples == 0:
            self.causal |= bool(kwargs.get("is_causal"))
            self._note(key)
            if self._log is not None:
                kwargs["attn_mask"] = self._added(query, kwargs.get("attn_mask"))
        return func(query, key, value, **kwargs)

    def _softmax(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        scores: Any = args[0] if args else kwargs.get("input")
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if self._right is None or not self._of_tokens(scores) or dim not in (-1, scores.ndim - 1):
            return func(*args, **kwargs)
        self._note(self._right.transpose(-1, -2))
        self._right = None
        if self._log is None:
            return func(*args, **kwargs)
        scores = scores + self._added(scores, None)
        return func(scores, *args[1:], **{key: value for key, value in kwargs.items() if key != "input"})

    def _of_tokens(self, scores: Any) -> bool:
        """Return whether ``scores`` may be the scores of all tokens with all, (B, H, n, n) or (B H, n, n)."""
        shape = tuple(scores.shape) if isinstance(scores, Tensor) else ()
        return len(shape) > 2 and shape[-2:] == (self.tokens, self.tokens) and shape[0] % self.samples == 0

    def _note(self, key: Tensor) -> None:
        grad, pack = _saving()
        checkpoints = pack is not self._around[1] and getattr(pack, "__qualname__", "").startswith("_checkpoint_hook.")
        self.runs_again |= checkpoints or grad != self._around[0]
        by_sample = key.detach().reshape(self.samples, -1, *key.shape[-2:])
        self.keys = by_sample.mean(dim=1)

    def _added(self, like: Tensor, mask: Tensor | None) -> Tensor:
        """Return ``log s`` plus the mask, for scores with as many rows as ``like``."""
        assert self._log is not None, "only called with sizes"
        rows = self._log.repeat_interleave(like.shape[0] // self.samples, dim=0)
        bias = rows.reshape(len(rows), *(1,) * (like.ndim - 2), self.tokens).to(like.dtype)
        if mask is None:
            return bias
        return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else bias + mask


def _saving() -> tuple[bool, Any]:
    """Return whether autograd records, and the hook that packs saved tensors. Checkpoints of either kind change one of them."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore[reportAttributeAccessIssue]
    return torch.is_grad_enabled(), None if hooks is None else hooks[0]


def refuted(block: nn.Module, call: Call, generator: Generator) -> str | None:
    """Return why the tokens' sizes do not affect a block's attention correctly; None if they do, in a trial on a copy.

    With ``s_i`` copies of each token ``x_i``, a block must return for the first copy what it returns for ``x_i`` of size
    ``s_i``. A block in which a token sees only earlier ones fails, because the first copy does not see the others.

    Args:
        block: a block on (B, n, D), without other inputs along its tokens.
        call: a real call of it.
        generator: the source of random numbers.
    """
    reason = None
    with torch.no_grad(), rng.fork(), torch.autocast(hidden_of(*call).device.type, enabled=False):
        for dtype in (torch.float64, torch.float32):
            try:
                trial = Trial(block, call, 1, dtype, False, generator)
            except Exception as error:  # a kernel does not support this dtype
                reason = f"a copy of it in {str(dtype)[6:]} does not run ({error})"
                continue
            return _refuted(trial, dtype, generator)
    return reason


def _refuted(trial: Trial, dtype: torch.dtype, generator: Generator) -> str | None:
    hidden = trial.hidden
    samples, tokens = hidden.shape[:2]
    sizes = (torch.randperm(tokens, generator=generator) % 3 + 1).to(hidden.device)
    many = hidden.repeat_interleave(sizes, dim=1)
    with Proportional(samples, tokens, sizes.to(dtype).expand(samples, -1)) as attention:
        got = split_output(trial.run(trial.call))[0]
    if attention.keys is None:
        return (
            "its attention is neither torch's scaled_dot_product_attention nor its own softmax of a product, so it cannot use"
            " the sizes of merged tokens. Let it call scaled_dot_product_attention (in transformers:"
            " attn_implementation='sdpa')"
        )
    if attention.causal:
        return "its attention is causal, and a merged token would reveal later ones"
    try:
        copies = trial.run(mapped(trial.call, lambda _, v: many if v is hidden else v))
    except Exception as error:  # the block may have a table or a mask for a fixed number of tokens
        return f"it does not run on {many.shape[1]} tokens instead of {tokens} ({error})"
    expected = split_output(copies)[0]
    expected = expected.index_select(1, sizes.cumsum(0) - sizes)
    scale = (expected - hidden).abs().max()
    if bool((got - expected).abs().max() > TOLERANCE[dtype] * scale + 1e-12):
        return (
            "with sizes it computes something else than with as many copies of its tokens: not all of its attention uses them,"
            " or each token sees only some of the others"
        )
    return _unmerged(trial, many, expected, sizes, TOLERANCE[dtype] * scale + 1e-12)


def _unmerged(trial: Trial, many: Tensor, expected: Tensor, sizes: Tensor, tolerance: Tensor) -> str | None:
    """Return why copies cannot be merged behind a block's attention: its MLP must return the same for one of them."""
    call = mapped(trial.call, lambda _, v: many if v is trial.hidden else v.clone() if isinstance(v, Tensor) else v)
    first = sizes.cumsum(0) - sizes
    many = hidden_of(*call)
    samples, tokens = many.shape[:2]
    with Proportional(samples, tokens, None) as attention, as_in_training():
        attention.merge_behind(many, lambda total, keys: total.index_select(1, first))
        try:
            got = split_output(trial.block(*call[0], **call[1]))[0]
        except Exception as error:  # what follows may need as many tokens as before
            return f"behind its attention it does not run on merged tokens ({error})"
    if attention.waits:
        return (
            "it nowhere adds the result of its attention to its input, as x + attention(norm(x)) does, so there is no place"
            " between attention and MLP at which to merge"
        )
    if got.shape != expected.shape or bool((got - expected).abs().max() > tolerance):
        return (
            "behind its attention it computes something else with merged tokens than with copies of them, because its MLP"
            " depends on other tokens or runs beside the attention"
        )
    return None
