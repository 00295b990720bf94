"""The maps of a module that make queries, keys and values, from a pass over an input that is made up."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_eff._core._architecture.linear_maps import LinearMap, linear_maps, unfit
from lightning_eff._core._architecture.naming import meets
from lightning_eff._core._branches.attention import Attention, attentions
from lightning_eff._core._branches.probing import Divided, probed


class Handed(TorchFunctionMode):
    """Notes queries and keys of every call of ``scaled_dot_product_attention``.

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
    """The attentions of a module, in their order.

    Raises:
        ValueError: if nothing of it could be run, or it has none.
    """
    if any(p.is_meta for p in root.parameters()):
        raise ValueError(
            f"{who}: weights of {type(root).__name__} lie nowhere (meta device), so that what they make cannot be told;"
            " expected weights. Apply it before the module is moved there."
        )
    try:
        found = attentions(probed(root, who=who, batch=batch).graph)
    except Divided:
        raise
    except ValueError as e:
        raise ValueError(
            f"{who}: the attention of {type(root).__name__} cannot be told, since no pass over an input that is made up"
            f" shows one ({str(e).partition('. ')[0]}). Give a batch, lightning_eff.apply(module, {who}(), batch=batch), or an"
            " example_input_array to the LightningModule; or take the technique out."
        ) from e
    if not found:
        raise ValueError(
            f"{who}: found no attention in {type(root).__name__}: no scaled_dot_product_attention, nor a product with a"
            " softmax of products. Take the technique out."
        )
    return found


@contextmanager
def handed() -> Iterator[Handed]:
    """What attention is given meanwhile."""
    with Handed() as mode:
        yield mode


def maps_by_weight(root: nn.Module) -> dict[str, LinearMap]:
    """The linear maps of a module by the names of their weights."""
    names = {id(p): name for name, p in root.named_parameters()}
    return {names[id(m.module.weight)]: m for m in linear_maps(root) if id(m.module.weight) in names}


def problem(weight: str, maps: dict[str, LinearMap]) -> str | None:
    """Why the map of a weight cannot be replaced, or None."""
    if weight not in maps:
        return "its weight is of no nn.Linear or Conv1D, as in nn.MultiheadAttention"
    return unfit(maps[weight])


def is_named(weight: str, names: list[str] | None) -> bool:
    """Whether the map of a weight is meant."""
    return names is None or any(meets(weight.removesuffix(".weight"), name) for name in names)
