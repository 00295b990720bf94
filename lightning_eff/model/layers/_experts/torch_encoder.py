"""Hooks that keep torch's encoder from its fused kernel in evaluation, which reads the layers' weights without calling them."""

from typing import Any

from torch import nn

from lightning_eff._core._architecture.surgeon import Surgeon

_WAS = "_lightning_eff_nested"


def call_layers(surgeon: Surgeon, path: str) -> None:
    """Let ``nn.TransformerEncoder`` call the layer at ``path``, and give it ordinary tensors where samples are padded."""
    surgeon.before(surgeon.root.get_submodule(path), _called)
    names = path.split(".")
    for i in range(len(names)):
        outer = surgeon.root.get_submodule(".".join(names[:i]))
        if isinstance(outer, nn.TransformerEncoder) and outer.use_nested_tensor:
            surgeon.before(outer, _without_nested)
            surgeon.behind(outer, _as_before)


def _called(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Do nothing; the hook's presence makes torch call the module."""


def _without_nested(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Only the fused kernel accepts nested tensors."""
    module.__dict__.setdefault(_WAS, module.use_nested_tensor)
    module.use_nested_tensor = False  # pyright: ignore[reportArgumentType]


def _as_before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    module.use_nested_tensor = module.__dict__.pop(_WAS, module.use_nested_tensor)
