"""Records the active dropout of a pass: which function, with which probability, in which module."""

import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

_INPUT = ("input", "p", "training")
_TORCH = ("input", "p", "train")
_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p")
_HEADS = (
    *("query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v"),
    *("add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias", "training"),
)
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@dataclass(frozen=True)
class _Signature:
    """How a function takes its probability.

    Attributes:
        names: its arguments, in order.
        p: the name of the probability.
        training: the name of the argument that turns dropout on; "" if it always is.
        defaults: of arguments that a call may omit.
    """

    names: tuple[str, ...]
    p: str
    training: str
    defaults: tuple[tuple[str, Any], ...] = ()


def _signatures() -> dict[Any, _Signature]:
    found: dict[Any, _Signature] = {}
    for name, p, training in (
        ("dropout", 0.5, True),
        ("dropout1d", 0.5, True),
        ("dropout2d", 0.5, True),
        ("dropout3d", 0.5, True),
        ("alpha_dropout", 0.5, False),
        ("feature_alpha_dropout", 0.5, False),
    ):
        found[getattr(F, name)] = _Signature(_INPUT, "p", "training", (("p", p), ("training", training)))
    for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"):
        for suffix in ("", "_"):
            found[getattr(torch, name + suffix)] = _Signature(_TORCH, "p", "train")
    found[torch.native_dropout] = _Signature(_TORCH, "p", "train")
    found[F.scaled_dot_product_attention] = _Signature(_ATTENTION, "dropout_p", "", (("dropout_p", 0.0),))
    found[F.multi_head_attention_forward] = _Signature(_HEADS, "dropout_p", "training", (("training", True),))
    return found


SIGNATURES = _signatures()
_NETS = {getattr(torch, name): name for name in _RECURRENT}


def active(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """The probability with which this call of a torch function drops; 0 if it drops nothing."""
    if func in _NETS:  # (..., has_biases, num_layers, dropout, train, bidirectional, [batch_first])
        at = next((i for i, a in enumerate(args) if type(a) is float), None)
        return float(args[at]) if at is not None and args[at + 1] is True else 0.0
    how = SIGNATURES.get(func)
    if how is None:
        return 0.0
    given = {**dict(how.defaults), **dict(zip(how.names, args, strict=False)), **kwargs}
    return float(given[how.p]) if not how.training or given[how.training] else 0.0


@dataclass(frozen=True)
class Dropped:
    """One call that drops.

    Attributes:
        function: its name.
        p: its probability.
        module: the innermost module whose code made the call, or None.
        line: where that code is, as ``file:line``.
    """

    function: str
    p: float
    module: nn.Module | None
    line: str


class Dropouts(TorchFunctionMode):
    """Records the calls that drop something, until the context ends.

    Attributes:
        calls: the calls in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Dropped] = []

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        p = active(func, args, kwargs)
        if p > 0.0:
            self.calls.append(Dropped(getattr(func, "__name__", str(func)), p, *_caller()))
        return func(*args, **kwargs)


def _caller() -> tuple[nn.Module | None, str]:
    frame = sys._getframe(2)
    line = ""
    while frame is not None:
        inside = frame.f_code.co_filename
        if not line and "/torch/" not in inside:
            line = f"{inside.rpartition('/')[2]}:{frame.f_lineno}"
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return owner, line or f"{inside.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return None, line
