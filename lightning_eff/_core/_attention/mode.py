"""A torch function mode that replaces attention wherever it is called, also when checkpointed code runs again."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_eff._core._attention.calls import MODULE, Call, CannotReplace, read, restored
from lightning_eff._core._targets.edges import backward_by_edges, grad_by_edges
from lightning_eff._core.patches import Patches

_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)
_BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
_SEEN = frozenset({*_SOFTMAX, *_BACKWARD, F.scaled_dot_product_attention, F.multi_head_attention_forward})
_WEIGHTS = (
    "it returns attention weights, which are not computed: call nn.MultiheadAttention with need_weights=False, or set"
    " attn_implementation='sdpa' and no output_attentions of a Hugging Face model"
)


class Replacing(TorchFunctionMode):
    """Replaces each attention call by ``attend`` while it is entered.

    It covers ``F.scaled_dot_product_attention`` under any name, including Hugging Face's "sdpa", and
    ``nn.MultiheadAttention``, whose fast path in evaluation is disabled meanwhile. It also covers code that gradient
    checkpointing runs again in a backward pass that begins while the mode is entered; those calls are not counted.

    Args:
        attend: computes a call, or raises :class:`CannotReplace` with the reason.
        who: the technique's name, for messages.

    Attributes:
        calls: how many calls were replaced.
        by_hand: how often scores (B, H, L, S) went through a softmax, as in hand-written attention.
        rerunning: whether a backward pass is running.
    """

    apart_from_compiled = True  # observes nothing in compiled code, which therefore is not compiled with it

    def __init__(self, attend: Callable[[Call], Tensor], who: str) -> None:
        super().__init__()
        self.attend, self.who = attend, who
        self.calls = self.by_hand = 0
        self.rerunning = False

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _SEEN or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if func in _BACKWARD:
            around, self.rerunning = self.rerunning, True
            try:
                with self:  # torch has suspended the mode, which must also see recomputed calls
                    return (grad_by_edges if func is torch.autograd.grad else backward_by_edges)(*args, **kwargs)
            finally:
                self.rerunning = around
        if func is F.scaled_dot_product_attention:
            return self.replace(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self._of_module(args, kwargs)
        if func in _SOFTMAX and not self.rerunning:
            scores = args[0] if args else kwargs.get("input")
            if isinstance(scores, Tensor) and scores.ndim == 4 and min(scores.shape[-2:]) > 1:
                self.by_hand += 1
                return self.softmaxed(func(*args, **kwargs))
        return func(*args, **kwargs)

    def softmaxed(self, weights: Tensor) -> Tensor:
        """Return the result for a hand-written softmax of scores (B, H, L, S)."""
        return weights

    def replace(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the result of a call with these arguments of ``F.scaled_dot_product_attention``."""
        try:
            call, front = read(args, kwargs)
            self.calls += not self.rerunning
            output = self.attend(call)
        except CannotReplace as e:
            raise CannotReplace(
                f"{self.who}: a call of attention cannot be replaced: {e}. Remove the technique, or train with attention that"
                " it supports."
            ) from None
        query = args[0] if args else kwargs["query"]
        return restored(output, call, front, query.ndim)

    def _of_module(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # a Python function of torch, in which this mode is off and names are looked up in F
        given = MODULE.bind(*args, **kwargs)
        given.apply_defaults()
        if given.arguments["need_weights"]:
            raise CannotReplace(f"{self.who}: a call of nn.MultiheadAttention cannot be replaced: {_WEIGHTS}.")
        plain = F.scaled_dot_product_attention
        modes = [*getattr(plain, "modes", ()), self]  # later modes come first
        patches = Patches()
        patches.set(F, "scaled_dot_product_attention", _Inner(modes, getattr(plain, "plain", plain)))
        try:
            return F.multi_head_attention_forward(*args, **kwargs)
        finally:
            patches.restore()


class _Inner:
    """Replaces ``F.scaled_dot_product_attention`` within torch's function: applies each mode in turn.

    Args:
        modes: the modes, in the order in which they act.
        plain: the original function.
    """

    def __init__(self, modes: list[Replacing], plain: Callable[..., Tensor]) -> None:
        self.modes, self.plain = modes, plain

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        first, *rest = self.modes
        patches = Patches()
        patches.set(F, "scaled_dot_product_attention", _Inner(rest, self.plain) if rest else self.plain)
        try:
            return first.replace(*args, **kwargs)
        finally:
            patches.restore()
