"""The linear layers of a module that compute queries, keys and values, from a pass on a made-up input."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_eff._core._architecture.linear_maps import LinearMap, linear_maps, unfit
from lightning_eff._core._branches.attention import Attention, attentions
from lightning_eff._core._branches.probing import Divided, probed
from lightning_eff.model.layers._shared.choosing import is_named


class Handed(TorchFunctionMode):
    """Records queries and keys of every call of ``scaled_dot_product_attention``.

    Attributes:
        calls: queries and keys, detached.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, Tensor]] = []

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            query, key = (args[i] if len(args) > i else kwargs[name] for i, name in enumerate(("query", "key")))
            self.calls.append((query.detach(), key.detach()))
        return func(*args, **kwargs)


def attended(root: nn.Module, *, who: str, batch: Any) -> list[Attention]:
    """The attentions of a module, in order.

    Raises:
        ValueError: if no part of the module could be run, or it has no attention.
    """
    if any(p.is_meta for p in root.parameters()):
        raise ValueError(
            f"{who}: weights of {type(root).__name__} are on the meta device, so its attention cannot be found. Apply {who}"
            " before the module is moved there."
        )
    try:
        found = attentions(probed(root, who=who, batch=batch).graph)
    except Divided:
        raise
    except ValueError as e:
        raise ValueError(
            f"{who}: found no attention in {type(root).__name__}, because no forward pass on a made-up input succeeded"
            f" ({str(e).partition('. ')[0]}). Call lightning_eff.apply(module, {who}(), batch=batch), or set"
            " example_input_array on the LightningModule."
        ) from e
    if not found:
        raise ValueError(
            f"{who}: found no attention in {type(root).__name__}: neither scaled_dot_product_attention nor a product with a"
            " softmax of products. Remove the callback."
        )
    return found


@contextmanager
def handed() -> Iterator[Handed]:
    """Record the inputs of attention until the context ends."""
    with Handed() as mode:
        yield mode


def maps_by_weight(root: nn.Module) -> dict[str, LinearMap]:
    """The linear layers of a module by the names of their weights."""
    names = {id(p): name for name, p in root.named_parameters()}
    return {names[id(m.module.weight)]: m for m in linear_maps(root) if id(m.module.weight) in names}


def problem(weight: str, maps: dict[str, LinearMap]) -> str | None:
    """Why the linear layer of a weight cannot be replaced, or None."""
    if weight not in maps:
        return "its weight belongs to no nn.Linear or Conv1D, as in nn.MultiheadAttention"
    return unfit(maps[weight])


def is_meant(weight: str, names: list[str] | None) -> bool:
    """Whether the linear layer of a weight is meant; None means every layer."""
    return names is None or is_named(weight.removesuffix(".weight"), names)
