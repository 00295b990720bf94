"""Identify what an operation saves for its backward pass, and what of it may be compressed.

Autograd passes every saved tensor to a hook, without the operation or the tensor's purpose. A ``TorchFunctionMode`` sees the
operation. The purpose follows from the operation's arguments, the tensor's shape, its producer and its storage. Tensors that
cannot be identified are kept exactly.
"""

import sys
from collections.abc import Callable, Iterable
from enum import Enum
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_eff._core._branches.side_by_side import seen_chains
from lightning_eff.memory._compression.affine import OPERATIONS, AffineNotes
from lightning_eff.memory._compression.attention import Call, OnResult
from lightning_eff.memory._compression.derived import NORMS, Derivations
from lightning_eff.memory._compression.derived import OPERATIONS as DERIVING
from lightning_eff.memory._compression.identity import storage_id

SMALL = 256  # elements; compressing fewer saves almost nothing


class Treatment(Enum):
    """The possible treatments of a saved tensor."""

    ALIVE = "its storage stays alive anyway, so it is neither compressed nor counted"
    EXACT = "kept as it is"
    GROUPS = "compressed by groups"
    DOUBLE = "compressed by groups, at twice the bits, or 8"
    WIDE = "compressed by groups, at 8 bits or more"
    SIGN = "one bit per element: whether it is above zero, which is all that its operation needs"
    MASK = "one bit per element if it has two values, else kept as it is"
    MASK_OR_GROUPS = "one bit per element if it has two values, else compressed by groups"


class Role(NamedTuple):
    """The category under which a saved tensor's bytes are counted, and its treatment."""

    category: str
    treatment: Treatment


# The categories that may be compressed, and those that are kept exactly.
COMPRESSED = ("linear", "attention", "norm", "activation", "elementwise", "mask")
KEPT = ("loss", "weight_copy", "statistic", "function", "other", "small", "constant", "unfit")

_LOSSES = (
    "cross_entropy nll_loss log_softmax logsumexp mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy"
    " binary_cross_entropy_with_logits kl_div ctc_loss cosine_embedding_loss margin_ranking_loss triplet_margin_loss"
    " triplet_margin_with_distance_loss multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss"
    " soft_margin_loss hinge_embedding_loss poisson_nll_loss gaussian_nll_loss logsigmoid logaddexp"
    " linear_cross_entropy"
)
LOSSES = frozenset(_LOSSES.split())
SIGNS = frozenset(("relu", "relu_", "leaky_relu", "leaky_relu_"))
# Operations whose derivative is a smooth function of what they save, which is compressed by groups. A pole or a jump
# (division, clamp, maximum) would turn a small error into a large one, so all other operations are exact.
_FAMILIES = {
    "linear": "linear bilinear matmul __matmul__ __rmatmul__ mm bmm addmm addbmm baddbmm addmv mv einsum conv1d conv2d"
    " conv3d conv_transpose1d conv_transpose2d conv_transpose3d tensordot",
    "attention": "scaled_dot_product_attention multi_head_attention_forward softmax _softmax",
    "norm": "layer_norm rms_norm batch_norm group_norm instance_norm",
    "activation": "gelu silu tanh sigmoid elu selu celu mish softplus softsign glu erf",
    "elementwise": "mul mul_ multiply __mul__ __rmul__ __imul__ pow pow_ __pow__ square exp expm1 sin cos addcmul"
    " addcmul_ lerp max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d"
    " adaptive_avg_pool2d adaptive_avg_pool3d",
    "mask": "dropout dropout_ dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout feature_dropout"
    " native_dropout",
}
CONVOLUTIONS = frozenset(name for name in _FAMILIES["linear"].split() if name.startswith("conv"))
FAMILY = {name: family for family, names in _FAMILIES.items() for name in names.split()}
_FUSED = ("scaled_dot_product_attention", "multi_head_attention_forward")
_PRODUCTS = frozenset(("matmul", "__matmul__", "softmax", "_softmax"))
_WEIGHTED = (F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
_OF_LOSSES = ("LogSoftmax", "Logsumexp", "LogSigmoid", "NllLoss")
_VIEWS = (
    "Alias", "AsStrided", "Detach", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Split", "SplitWithSizes",
    "Squeeze", "T", "ToCopy", "Transpose", "Unbind", "Unsqueeze", "UnsafeSplit", "UnsafeView", "View", "Chunk",
)  # fmt: skip
_VIEW_NODES = frozenset(f"{name}Backward{number}" for name in _VIEWS for number in range(3))


def origin(x: Tensor) -> Any:
    """Return the autograd node that made ``x``, through views and casts; None for a leaf."""
    node = x.grad_fn
    while node is not None and node.name() in _VIEW_NODES:
        node = node.next_functions[0][0]
    return node


def is_weight_copy(x: Tensor) -> bool:
    """Return whether ``x`` is a parameter, a view of one, or autocast's copy of one in another dtype."""
    if isinstance(x if x._base is None else x._base, nn.Parameter):
        return True
    return isinstance(getattr(origin(x), "variable", None), nn.Parameter)


class SavedTensors(TorchFunctionMode):
    """Knows the running operation, and identifies the tensors that it saves.

    Args:
        module: the module that is trained, whose parameters and buffers stay alive anyway.

    Attributes:
        on_output: a function that is called with the output of each operation.
        on_attention: a function that attention asks for the receiver of its result (see :meth:`Call.run`), which is then
            recomputed in the backward pass. None leaves it to autograd.
        notes: the tensors of this pass that are affine functions of others.
        derivations: the tensors of this pass that follow from what a norm or an activation saves.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module
        self._names = {id(m): path for path, m in module.named_modules()}
        stacks = seen_chains(module)
        self._blocks = tuple(prefix for found in stacks for prefix in found.prefixes)
        self._families = [
            (path, f"{c.path}.*" if c.in_list else c.path, (f"{path}.", f"{path}:"))
            for c in stacks
            for path in c.named_blocks
        ]
        self._early = self._before_blocks()
        self._block_seen = False
        self._alive: frozenset[int] = frozenset()
        self.on_output: Callable[[Any], None] | None = None
        self.on_attention: Callable[[], OnResult | None] | None = None
        self.notes = AffineNotes(SMALL)
        self.derivations = Derivations(SMALL)
        self._statistics: list[Tensor] = []  # saved by the running norm
        self._op: Any = None
        self._anew = False  # whether the running attention is recomputed in the backward pass
        self._args: tuple[Any, ...] = ()
        self._kwargs: dict[str, Any] = {}

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        outer = self._op, self._args, self._kwargs
        self._op, self._args, self._kwargs, self._statistics = func, args, kwargs or {}, []
        try:
            name = getattr(func, "__name__", "")
            output = self._attention() if name == _FUSED[0] else None
            if output is None:
                output = func(*args, **self._kwargs)
            if name in OPERATIONS:
                self.notes.note(name, args, self._kwargs, output)
            elif name in DERIVING:
                self.derivations.note(name, args, self._kwargs, output, self._statistics)
            if self.on_output is not None:
                self.on_output(output)
            return output
        finally:
            self._op, self._args, self._kwargs = outer

    def _attention(self) -> Tensor | None:
        """Return fused attention's result, if it is recomputed in the backward pass; else None."""
        on_result = None if self.on_attention is None else self.on_attention()
        call = None if on_result is None else Call.of(self._args, self._kwargs)
        if on_result is None or call is None:
            return None
        self._args, self._kwargs, self._anew = call.tensors, {}, True
        try:
            return call.run(on_result)
        finally:
            self._anew = False

    def begin(self, batch: Iterable[Tensor]) -> None:
        """Begin a forward pass on these tensors, which stay alive, as do the current parameters and buffers."""
        tensors = [*self._module.parameters(), *self._module.buffers(), *batch]
        self._block_seen = False
        self._alive = frozenset(storage_id(t) for t in tensors if type(t) in (Tensor, nn.Parameter))

    @property
    def operation(self) -> str:
        """The name of the running operation; "function" for a custom autograd Function."""
        return "function" if self._op is None else getattr(self._op, "__name__", "function")

    def role(self, x: Tensor) -> Role:
        """Return the role of ``x``, which the running operation saves."""
        if type(x) not in (Tensor, nn.Parameter) or x.layout is not torch.strided:
            return Role("function", Treatment.EXACT)
        if storage_id(x) in self._alive or isinstance(x if x._base is None else x._base, nn.Parameter):
            return Role("alive", Treatment.ALIVE)
        if self._op is None:
            return Role("function", Treatment.EXACT)  # also the inputs of torch's own checkpoints
        name = self.operation
        if name in NORMS and x.shape[-1:] == (1,):
            self._statistics.append(x)
        if name in LOSSES:
            return Role("loss", Treatment.EXACT)
        if x.numel() < SMALL:
            return Role("small", Treatment.EXACT)
        if x.dtype is torch.bool:
            return Role("mask", Treatment.MASK)
        if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return Role("other", Treatment.EXACT)
        if name in SIGNS:
            return Role("mask", Treatment.SIGN)
        if x.requires_grad and is_weight_copy(x):
            return Role("weight_copy", Treatment.EXACT)
        if x.shape[-1] == 1:
            return Role("statistic", Treatment.EXACT)  # one number per row
        return self._by_family(x, name, FAMILY.get(name, "other"))

    def _by_family(self, x: Tensor, name: str, family: str) -> Role:
        groups = Role(family, Treatment.GROUPS)
        if family == "other" or (name in ("pow", "pow_", "__pow__") and not self._whole_power()):
            return Role("other", Treatment.EXACT)
        if name in _FUSED:
            return self._of_attention(x)
        if family == "attention":  # softmax outside blocks belongs to the loss
            return groups if self._in_block() else Role("loss", Treatment.EXACT)
        if family == "mask":
            return Role("mask", Treatment.MASK_OR_GROUPS)
        if family == "norm":
            first = self._argument(0, "input")
            if not isinstance(first, Tensor) or x.numel() * 2 <= first.numel():
                return Role("statistic", Treatment.EXACT)
        elif family == "linear" and self._is_weight(x):
            return Role("weight_copy", Treatment.EXACT)
        elif family == "elementwise":
            node = origin(x)
            if node is None and not x.requires_grad:
                return Role("constant", Treatment.MASK)
            if node is not None and node.name().startswith(_OF_LOSSES):
                return Role("loss", Treatment.EXACT)
        if family in ("linear", "norm") and self._blocks and not self._in_block():
            # the head has few bytes and a large part of the gradient's error; the embeddings have a small part
            return Role(family, Treatment.DOUBLE if self._is_early() else Treatment.WIDE)
        return groups

    def _of_attention(self, x: Tensor) -> Role:
        """Return the role in fused attention, where q and k determine ``exp(q k - lse)`` and get more bits."""
        node = x.grad_fn
        if node is None and not x.requires_grad and x.ndim < 4:
            return Role("attention", Treatment.MASK)  # log-sum-exp, or the dropout of unfused attention
        made_by = "" if node is None else node.name()
        if x.ndim < 4 or made_by.startswith(("Softmax", "SafeSoftmax", "ScaledDotProduct")):
            return Role("attention", Treatment.GROUPS)
        if self.operation == _FUSED[0]:
            q, k, v = (self._argument(i, key) for i, key in enumerate(("query", "key", "value")))
            at = x.data_ptr()
            if at == v.data_ptr() and at not in (q.data_ptr(), k.data_ptr()):
                return Role("attention", Treatment.GROUPS)
            if at not in (q.data_ptr(), k.data_ptr()) and not x.requires_grad:
                return Role("attention", Treatment.MASK)  # an attention mask, or a dropout mask
        return Role("attention", Treatment.DOUBLE if self._anew else Treatment.WIDE)

    def heads(self, x: Tensor) -> tuple[int, int] | None:
        """Return the dimension of ``x`` with attention's heads, and their number; None if it is not attention's.

        Attention is an operation on 4-D arguments (B, H, ., .). It saves tensors of that form, or of (B * H, ., .), for
        which the number is still H.
        """
        if self.operation == _FUSED[1]:
            number = self._argument(4, "num_heads")
            return (1, number) if x.ndim == 4 and x.shape[1] == number else None
        given = self._argument(0, "query" if self.operation == _FUSED[0] else "input")
        if not isinstance(given, Tensor) or given.ndim != 4 or self.operation not in {_FUSED[0], *_PRODUCTS}:
            return None
        batch, number = given.shape[:2]
        if x.ndim == 4:
            return 1, x.shape[1]
        return (0, number) if x.ndim == 3 and x.shape[0] == batch * number else None

    def _argument(self, position: int, name: str) -> Any:
        return self._args[position] if len(self._args) > position else self._kwargs.get(name)

    def _is_weight(self, x: Tensor) -> bool:
        """Return whether ``x`` was computed from parameters, or is autocast's copy of a frozen one, which has no graph."""
        if self._op in _WEIGHTED:
            weight = self._argument(1, "weight")
            if isinstance(weight, Tensor) and storage_id(weight) == storage_id(x):
                return True
        if x.requires_grad:
            return False
        given = [t for t in (*self._args, *self._kwargs.values()) if isinstance(t, Tensor) and t.dtype != x.dtype]
        parameters = [t for t in given if isinstance(t if t._base is None else t._base, nn.Parameter)]
        return any(x.shape in (t.shape, t.shape[::-1]) for t in parameters)

    def _whole_power(self) -> bool:
        exponent = self._argument(1, "exponent")
        return isinstance(exponent, int | float) and exponent >= 1 and float(exponent).is_integer()

    def _in_block(self) -> bool:
        if not self._blocks or not f"{self.path(sys._getframe(1))}.".startswith(self._blocks):
            return False
        self._block_seen = True
        return True

    def _before_blocks(self) -> frozenset[str]:
        """Return the paths of the modules that were registered before the first block."""
        paths: list[str] = []
        for path in self._names.values():
            if self._blocks and f"{path}.".startswith(self._blocks):
                return frozenset(paths)
            paths.append(path)
        return frozenset()

    def _is_early(self) -> bool:
        """Return whether the running operation comes before the blocks, both in registration and in execution."""
        return not self._block_seen and self.path(sys._getframe(2)) in self._early

    def path(self, frame: FrameType | None) -> str:
        """Return the path of the innermost module with a method running in ``frame`` or one of its callers."""
        while frame is not None:
            code = frame.f_code
            if code.co_varnames[:1] == ("self",):
                path = self._names.get(id(frame.f_locals.get("self")))
                if path is not None:
                    return path
            frame = frame.f_back
        return ""

    def family(self, key: str) -> str:
        """Return ``key``, which begins with a path, without the index of its block, the same for all blocks of a stack."""
        for block, family, starts in self._families:
            if key.startswith(starts):
                return f"{family}{key.removeprefix(block)}"
        return key
