"""While it is entered, attention is computed otherwise, wherever it is called and also where it runs again."""

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
    "attention weights are asked for, which are not computed: call nn.MultiheadAttention with need_weights=False, or"
    " set attn_implementation='sdpa' and no output_attentions of a Hugging Face model"
)


class Replacing(TorchFunctionMode):
    """While it is entered, each call of attention is what ``attend`` makes of it.

    Seen are ``F.scaled_dot_product_attention``, by whatever name (Hugging Face's "sdpa" among them), and
    ``nn.MultiheadAttention``, whose fast path in evaluation is off meanwhile. What gradient checkpointing runs again in a
    backward pass that begins while it is entered is seen too, and not counted.

    Args:
        attend: what is computed; :class:`CannotReplace` says why it is not.
        who: the technique's name, for messages.

    Attributes:
        calls: how many were seen.
        by_hand: how many times scores (B, H, L, S) went through a softmax, as where attention is written by hand.
        rerunning: whether a backward pass is under way.
    """

    apart_from_compiled = True  # sees nothing in compiled code, which need not be compiled with it

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
                with self:  # torch has put the mode aside, and what checkpoints run again is to be seen, too
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
        """What a softmax of scores (B, H, L, S) that is written by hand returns."""
        return weights

    def replace(self, *args: Any, **kwargs: Any) -> Tensor:
        """What a call with these arguments of ``F.scaled_dot_product_attention`` returns."""
        try:
            call, front = read(args, kwargs)
            self.calls += not self.rerunning
            output = self.attend(call)
        except CannotReplace as e:
            raise CannotReplace(
                f"{self.who}: a call of attention cannot be replaced: {e}. Take the technique out, or train with attention"
                " that it can do."
            ) from None
        query = args[0] if args else kwargs["query"]
        return restored(output, call, front, query.ndim)

    def _of_module(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # a function of torch's own in Python, in which this mode is off and names are looked up in F
        given = MODULE.bind(*args, **kwargs)
        given.apply_defaults()
        if given.arguments["need_weights"]:
            raise CannotReplace(f"{self.who}: a call of nn.MultiheadAttention cannot be replaced: {_WEIGHTS}.")
        plain = F.scaled_dot_product_attention
        modes = [*getattr(plain, "modes", ()), self]  # those that were entered later come first
        patches = Patches()
        patches.set(F, "scaled_dot_product_attention", _Inner(modes, getattr(plain, "plain", plain)))
        try:
            return F.multi_head_attention_forward(*args, **kwargs)
        finally:
            patches.restore()


class _Inner:
    """What torch's function finds in the place of ``F.scaled_dot_product_attention``: the replacement of each mode in turn.

    Args:
        modes: in the order in which they act.
        plain: the function that was there.
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
