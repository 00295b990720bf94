"""Finds the weights of linear layers and convolutions that a module calls, and the rows of a call."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from lightning_eff._core._architecture.linear_maps import is_conv1d

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_PATCHES = 2**24  # elements of input patches in memory at a time


@dataclass(frozen=True)
class Map:
    """The weight of a linear layer or a convolution, which several modules can own.

    Attributes:
        name: name of the weight in the module.
        weight: shape (out, in), (in, out) if ``transposed``, or (out, in / groups, ...) for a convolution.
        bias_name: name of its bias of shape (out,), or None without a bias, or with one per owner.
        owners: the modules with the weight.
        transposed: whether it is transformers' ``Conv1D``.
        groups: ``G``, the number of groups of a convolution.
    """

    name: str
    weight: nn.Parameter
    bias_name: str | None
    owners: tuple[nn.Module, ...]
    transposed: bool
    groups: int

    def gradient(self, gradients: Mapping[str, Tensor]) -> tuple[Tensor, bool] | None:
        """Return the gradient of the weight, with the bias's as its last column, and whether it has that column.

        The shape is (G, m, n) or (G, m, n + 1). The result is None if the weight has no gradient.

        Args:
            gradients: gradients by parameter name.
        """
        if self.name not in gradients:
            return None
        g = gradients[self.name].mT if self.transposed else gradients[self.name]
        g = g.reshape(self.groups, g.shape[0] // self.groups, -1)
        if self.bias_name is None or self.bias_name not in gradients:
            return g, False
        return torch.cat([g, gradients[self.bias_name].to(g.dtype).view(self.groups, -1, 1)], dim=-1), True

    def parts(self, values: Tensor, *, with_bias: bool) -> dict[str, Tensor]:
        """Split ``values`` in the shape of :meth:`gradient` into weight and bias by name, in their shapes."""
        found: dict[str, Tensor] = {}
        if with_bias:
            assert self.bias_name is not None
            found[self.bias_name] = values[..., -1].reshape(-1)
            values = values[..., :-1]
        shape = self.weight.shape
        found[self.name] = values.reshape(shape[::-1]).mT if self.transposed else values.reshape(shape)
        return found

    @property
    def has_bias(self) -> bool:
        """Whether inputs get a constant 1, whose weight is the bias."""
        return self.bias_name is not None


def maps_of(module: nn.Module, held: Collection[int]) -> tuple[list[Map], dict[str, str]]:
    """Return the maps whose weights have an id in ``held``, and the reasons for skipped parameters by name."""
    owners: dict[int, list[nn.Module]] = {}
    for owner in module.modules():
        for p in owner.parameters(recurse=False):
            owners.setdefault(id(p), []).append(owner)
    names = {id(p): name for name, p in module.named_parameters()}
    found: list[Map] = []
    left: dict[str, str] = {}
    for name, weight in module.named_parameters():
        users = owners[id(weight)]
        if id(weight) not in held or not any(_kind(owner) and owner.weight is weight for owner in users):
            continue
        reason = _unfit(users, weight)
        if reason is not None:
            left[name] = reason
            continue
        bias = users[0]._parameters.get("bias")
        own = bias is not None and id(bias) in held and all(o._parameters.get("bias") is bias for o in users)
        groups = users[0].groups if isinstance(users[0], CONVOLUTIONS) else 1
        bias_name = names[id(bias)] if own else None
        found.append(Map(name, weight, bias_name, tuple(users), is_conv1d(users[0]), groups))
    return found, left


def _kind(owner: nn.Module) -> type | None:
    """Return the kind of a linear layer or convolution, or None. Calls are averaged within one kind."""
    if isinstance(owner, nn.Linear):
        return nn.Linear
    if isinstance(owner, CONVOLUTIONS):
        return next(kind for kind in CONVOLUTIONS if isinstance(owner, kind))
    return type(owner) if is_conv1d(owner) else None


def _unfit(users: list[nn.Module], weight: nn.Parameter) -> str | None:
    """Return why a weight is skipped, or None."""
    for owner in users:
        if isinstance(owner, nn.Embedding | nn.EmbeddingBag):
            return "it is tied to an embedding"
        if isinstance(owner, NonDynamicallyQuantizableLinear):
            return "nn.MultiheadAttention does not call its output layer"
        kind = _kind(owner)
        if kind is not None and type(owner).forward is not kind.forward:
            return (
                f"{type(owner).__name__} has a forward of its own, and may compute something else than {kind.__name__}"
            )
    if len({_kind(owner) for owner in users}) > 1 or any(
        owner._parameters.get("weight") is not weight for owner in users
    ):
        return f"{' and '.join(sorted({type(owner).__name__ for owner in users}))} share it"
    if isinstance(users[0], CONVOLUTIONS) and len({(o.groups, o.kernel_size) for o in users}) > 1:  # pyright: ignore[reportAttributeAccessIssue]
        return "convolutions of several groups share it"
    return None


# -- the rows of a call


def rows_of(owner: nn.Module, a: Tensor, g: Tensor, *, bias: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the rows of one call in parts: inputs (G, R, n), with a last 1 for a bias, and gradients (G, R, m).

    Args:
        owner: the called module.
        a: its input, (..., n) for a linear layer, (N, C, ...) or (C, ...) for a convolution.
        g: the gradient at its output.
        bias: whether to append a constant 1 to the input.
    """
    if not isinstance(owner, CONVOLUTIONS):
        yield _with_one(_fine(a.reshape(1, -1, a.shape[-1])), bias), _fine(g.reshape(1, -1, g.shape[-1]))
        return
    if g.ndim == len(owner.kernel_size) + 1:
        a, g = a.unsqueeze(0), g.unsqueeze(0)
    per_sample = max(owner.weight[0].numel() * owner.groups * g[0, 0].numel(), 1)
    size = max(_PATCHES // per_sample, 1)
    for some, gradient in zip(a.split(size), g.split(size), strict=True):
        at_places = gradient.unflatten(1, (owner.groups, -1)).flatten(3).permute(1, 0, 3, 2)  # (G, N, L, m)
        yield _with_one(_fine(patches(some, owner)), bias), _fine(at_places.flatten(1, 2))


def patches(x: Tensor, conv: nn.Module) -> Tensor:
    """Return the input patches of a convolution of any dimension.

    Args:
        x: shape (N, C, ...).
        conv: ``nn.Conv1d``, ``Conv2d`` or ``Conv3d``.

    Returns:
        Shape (G, N * L, C / G * k), with the positions of a sample in order and elements as in ``weight.flatten(1)``.
    """
    assert isinstance(conv, CONVOLUTIONS)
    padding: list[int] = []
    for i, (k, d) in enumerate(zip(conv.kernel_size, conv.dilation, strict=True)):
        around = d * (k - 1) if conv.padding == "same" else 0
        low, high = (around // 2, around - around // 2) if isinstance(conv.padding, str) else (conv.padding[i],) * 2
        padding = [low, high, *padding]  # the last dimension comes first
    x = F.pad(x, padding, mode="constant" if conv.padding_mode == "zeros" else conv.padding_mode)
    for i, (k, s, d) in enumerate(zip(conv.kernel_size, conv.stride, conv.dilation, strict=True)):
        x = x.unfold(2 + i, d * (k - 1) + 1, s)[..., ::d]
    n = len(conv.kernel_size)
    x = x.unflatten(1, (conv.groups, -1))  # (N, G, C / G, L..., k...)
    places, kernel = range(3, 3 + n), range(3 + n, 3 + 2 * n)
    return x.permute(1, 0, *places, 2, *kernel).flatten(2 + n).flatten(1, 1 + n)


def _fine(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _with_one(a: Tensor, bias: bool) -> Tensor:
    return F.pad(a, (0, 1), value=1.0) if bias else a
