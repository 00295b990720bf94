"""Finds the activations of a module, and the linear layers before and after each."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_eff._core._architecture.linear_maps import LinearMap, linear_maps, unfit
from lightning_eff._core._branches.probing import probed
from lightning_eff._core.patches import hook_behind

#: Classes of rectifier-like activations, which are replaced if no names are given.
_RECTIFIERS = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish),
    *(nn.RReLU, nn.Softplus),
)
_OTHERS = (nn.Tanh, nn.Sigmoid, nn.Hardsigmoid, nn.Hardtanh, nn.LogSigmoid, nn.Softsign, nn.Tanhshrink, nn.PReLU)
_PASSED = (nn.Dropout, nn.Identity)


def is_rectifier(m: nn.Module) -> bool:
    """Whether ``m`` is an activation of torch or transformers that is close to zero on one side."""
    return isinstance(m, _RECTIFIERS) or (_of_transformers(m) and not _is_linear(m))


def is_activation(m: nn.Module) -> bool:
    """Whether ``m`` is an activation of any kind."""
    return is_rectifier(m) or isinstance(m, _OTHERS) or _of_transformers(m)


def _of_transformers(m: nn.Module) -> bool:
    return type(m).__module__ == "transformers.activations" and not any(True for _ in m.children())


def _is_linear(m: nn.Module) -> bool:
    return type(m).__name__ == "LinearActivation"


def computes(m: nn.Module, function: Any) -> bool:
    """Whether an activation has this function's values from -4 to 4, up to rounding."""
    x = torch.linspace(-4.0, 4.0, 65, device="cpu")
    with torch.no_grad():
        try:
            return bool(torch.allclose(m(x.clone()), function(x), atol=1e-6))
        except (RuntimeError, ValueError, TypeError):  # it takes images, or its parameters are on another device
            return False


@dataclass
class Between:
    """What a pass showed about one activation.

    Attributes:
        calls: the number of its calls.
        taken: the number of calls in which a linear layer took its output.
        first: paths of the linear layers that computed its inputs.
        last: paths of the linear layers that took its outputs, with dropout in between allowed.
        odd: why it is not between two linear layers; empty if it is.
    """

    calls: int = 0
    taken: int = 0
    first: dict[str, None] = field(default_factory=dict)
    last: dict[str, None] = field(default_factory=dict)
    odd: str = ""


def between(root: nn.Module, activations: Mapping[str, nn.Module], *, who: str, batch: Any) -> dict[str, Between]:
    """The linear layers before and after each activation, by path, in one pass on a made-up input.

    Raises:
        ValueError: if no part of the module could be run.
    """
    found = {path: Between() for path in activations}
    maps = {m.path: m for m in linear_maps(root)}
    kept: list[Tensor] = []  # keeps ids unique
    made: dict[int, str] = {}
    acted: dict[int, str] = {}

    def after_map(path: str) -> Any:
        def hook(m: nn.Module, args: Any, output: Any) -> None:
            if args and id(args[0]) in acted:
                one = found[acted[id(args[0])]]
                one.last[path] = None
                one.taken += 1
            if isinstance(output, Tensor):
                kept.append(output)
                made[id(output)] = path

        return hook

    def after_activation(path: str) -> Any:
        def hook(m: nn.Module, args: Any, output: Any) -> None:
            one = found[path]
            one.calls += 1
            if args and id(args[0]) in made:
                one.first[made[id(args[0])]] = None
            else:
                one.odd = "its input is not just the output of a linear layer"
            kept.append(output)
            acted[id(output)] = path

        return hook

    def after_passed(m: nn.Module, args: Any, output: Any) -> None:
        if args and id(args[0]) in acted and output is not args[0]:
            kept.append(output)
            acted[id(output)] = acted[id(args[0])]

    with ExitStack() as scope:
        for path, one in maps.items():
            scope.callback(hook_behind(one.module, after_map(path)).remove)
        for path, m in activations.items():
            scope.callback(hook_behind(m, after_activation(path)).remove)
        for m in root.modules():
            if isinstance(m, _PASSED):
                scope.callback(hook_behind(m, after_passed).remove)
        try:
            probed(root, who=who, batch=batch)
        except ValueError:
            if not any(one.calls for one in found.values()):
                raise
    for one in found.values():
        one.odd = one.odd or _odd(one, maps)
    return found


def _odd(one: Between, maps: Mapping[str, LinearMap]) -> str:
    if not one.calls:
        return "the forward pass does not call it"
    if one.taken < one.calls:
        return "its output does not go straight into a linear layer; it may be gated already"
    for path in (*one.first, *one.last):
        reason = unfit(maps[path])
        if reason is not None:
            return f"{path} cannot be replaced: {reason}"
    return ""
