"""Finds the parameters of a module that can be masked: weights of linear layers and convolutions."""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from math import prod

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_eff._core._architecture.computed import computed_weights
from lightning_eff._core._architecture.linear_maps import is_conv1d
from lightning_eff._core._architecture.naming import meets, nearest

Block = tuple[int, int]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_ATTENTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


@dataclass(frozen=True)
class Weight:
    """A parameter that is masked.

    Attributes:
        name: the name in ``module.named_parameters()``.
        shape: the shape.
        stack: whether it is (k, ..., ...), a matrix for each of k experts.
    """

    name: str
    shape: tuple[int, ...]
    stack: bool = False

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def dims(self) -> tuple[int, ...]:
        """The sizes of one matrix or kernel: inputs, outputs and the sides of the kernel."""
        return self.shape[1:] if self.stack else self.shape

    @property
    def _matrices(self) -> tuple[int, int, int]:
        """The sizes as (k, rows, columns)."""
        if self.stack:
            return self.shape[0], self.shape[1], self.shape[2]
        return 1, self.shape[0], prod(self.shape[1:])

    def num_blocks(self, block: Block) -> int:
        """The number of blocks."""
        return self.numel // prod(block)

    def divides(self, block: Block) -> bool:
        """Whether it consists of whole blocks."""
        _, rows, columns = self._matrices
        return rows % block[0] == 0 and columns % block[1] == 0

    def pool(self, values: Tensor, block: Block) -> Tensor:
        """The sum of ``values``, which have the weight's shape, in each block: (blocks,)."""
        if block == (1, 1):
            return values.reshape(-1)
        k, rows, columns = self._matrices
        return values.reshape(k, rows // block[0], block[0], columns // block[1], block[1]).sum((2, 4)).flatten()

    def spread(self, blocks: Tensor, block: Block) -> Tensor:
        """The value in ``blocks``, (blocks,), for each element, in the weight's shape."""
        if block == (1, 1):
            return blocks.reshape(self.shape)
        k, rows, columns = self._matrices
        wide = blocks.view(k, rows // block[0], 1, columns // block[1], 1)
        return wide.expand(-1, -1, block[0], -1, block[1]).reshape(self.shape)


def prunable(module: nn.Module, masked: Container[str] = ()) -> dict[str, Weight]:
    """The trainable weights of linear layers and convolutions by name, however the modules that hold them are called.

    These are torch's modules, transformers' ``Conv1D``, modules with ``in_features`` and ``out_features``, and experts'
    matrices in one tensor. Norms, biases, embeddings, and weights tied to an embedding are never included.

    Args:
        module: the module.
        masked: names of weights that are masked already, which may be frozen by now.
    """
    trains = _training(module, masked)
    tables = {id(p) for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) for p in m.parameters()}
    found: dict[int, bool] = {}
    for path, owner in module.named_modules():
        for own, p in owner._parameters.items():
            if p is None or p.ndim < 2 or id(p) in tables or id(p) not in trains:
                continue
            stack = _is_stack(path, own, p)
            if stack or _is_map(owner, own):
                found[id(p)] = stack
    for one in computed_weights(module):
        carrier = one.carrier() if _is_map(one.layer, one.name) else None
        if carrier is not None and id(one.sources[carrier]) in trains:
            found[id(one.sources[carrier])] = False
    return {name: Weight(name, tuple(p.shape), found[id(p)]) for name, p in module.named_parameters() if id(p) in found}


def _training(module: nn.Module, masked: Container[str]) -> set[int]:
    """The ids of parameters that are trained, or masked already."""
    return {
        id(p) for name, p in module.named_parameters() if p.is_floating_point() and (p.requires_grad or name in masked)
    }


def _is_stack(path: str, own: str, p: Tensor) -> bool:
    return p.ndim == 3 and min(p.shape) > 1 and "expert" in f"{path}.{own}".lower()


def _is_map(owner: nn.Module, own: str) -> bool:
    if isinstance(owner, nn.MultiheadAttention):
        return own in _ATTENTION
    if isinstance(owner, nn.RNNBase | nn.RNNCellBase):
        return own.startswith("weight_")
    if own != "weight":
        return False
    return (
        isinstance(owner, (*_CONVOLUTIONS, nn.Bilinear))
        or is_conv1d(owner)
        or (hasattr(owner, "in_features") and hasattr(owner, "out_features"))
    )


def chosen(
    module: nn.Module,
    names: Sequence[str] | None,
    dense: Sequence[str],
    block: Block,
    *,
    who: str,
    masked: Container[str] = (),
    use: str = "masked",
) -> dict[str, Weight]:
    """The weights that a technique masks, in the module's order.

    Args:
        module: the module.
        names: patterns of weights or of the modules that hold them; None for all that :func:`prunable` finds. Another weight,
            such as an embedding, is masked if a pattern means it and none of those.
        dense: patterns of weights that are left alone.
        block: rows and columns of the blocks that each weight must consist of.
        who: the technique.
        masked: names of weights with masks in a checkpoint, which may be frozen by now.
        use: what the technique does to them, for the message.

    Raises:
        ValueError: if a pattern means nothing, nothing is left, or a weight does not consist of whole blocks.
    """
    maps, trains = prunable(module, masked), _training(module, masked)
    every = {
        alias: Weight(alias, tuple(p.shape))
        for alias, p in module.named_parameters(remove_duplicate=False)
        if p.ndim > 1 and id(p) in trains
    }
    firsts = {id(p): name for name, p in module.named_parameters()}
    owners = {alias: firsts[id(p)] for alias, p in module.named_parameters(remove_duplicate=False)}
    found = maps if names is None else {}
    for pattern in names or ():
        met = [name for name in maps if _means(name, pattern)] or [owners[a] for a in every if _means(a, pattern)]
        if not met:
            _refuse(pattern, "names", [*maps], [*every], module, who)
        found |= {name: maps.get(name) or Weight(name, every[name].shape) for name in met}
    for pattern in dense:
        if not any(_means(name, pattern) for name in maps):
            _refuse(pattern, "dense", [*maps], [*every], module, who)
    if names is None:
        _tell_computed(module, trains, who=who, use=use)
    order = [name for name, _ in module.named_parameters() if name in found]
    left = {name: found[name] for name in order if not any(_means(name, pattern) for pattern in dense)}
    if not left:
        raise ValueError(
            f"{who}: {type(module).__name__} has no trainable weight of a linear layer or convolution that could be {use}"
            f"{' besides dense=' + repr([*dense]) if dense else ''}. Name weights with names=[...], or remove the callback."
        )
    uneven = [f"{name} {w.shape}" for name, w in left.items() if not w.divides(block)]
    if uneven:
        raise ValueError(
            f"{who}(block={block}): {len(uneven)} weights do not consist of whole blocks, such as {uneven[0]}. Leave them out"
            " with dense=[...], or give another block."
        )
    return left


def _tell_computed(module: nn.Module, trains: set[int], *, who: str, use: str) -> None:
    """Warn about weights that cannot have zeros, because a parametrization computes them."""
    left = [
        f"{one.path}.{one.name}"
        for one in computed_weights(module)
        if _is_map(one.layer, one.name) and any(id(p) in trains for p in one.sources.values()) and one.carrier() is None
    ]
    if left:
        rank_zero_warn(
            f"{who}: {', '.join(left[:5])}{' and others' if len(left) > 5 else ''} cannot be {use}, because a parametrization"
            " computes them and would fill the zeros. Remove the parametrization, or name other weights with names=[...]."
        )


def _means(name: str, pattern: str) -> bool:
    """Whether ``pattern`` means a weight, the module that holds it, or the layer that computes its weight from it."""
    owner = name.rpartition(".")[0]
    layer = owner.partition(".parametrizations.")[0]
    return any(meets(at, pattern) for at in dict.fromkeys((name, owner, layer, f"{layer}.weight")))


def _refuse(pattern: str, argument: str, maps: list[str], every: list[str], module: nn.Module, who: str) -> None:
    near = nearest(pattern, maps or every) or (maps or every)[:4]
    raise ValueError(
        f"{who}({argument}=[{pattern!r}, ...]): it means none of the {len(maps)} weights of linear layers and convolutions of"
        f" {type(module).__name__}. Give a dotted path, its last part, or a pattern. Nearest: {', '.join(near) or 'none'}."
    )


def largest(scores: Tensor, count: int) -> Tensor:
    """A mask of the ``count`` largest of ``scores``, (n,); ties keep the first, and NaN counts as the smallest."""
    order = scores.nan_to_num(nan=-torch.inf).argsort(descending=True, stable=True)
    return torch.zeros_like(scores, dtype=torch.bool).index_fill_(0, order[:count], True)
