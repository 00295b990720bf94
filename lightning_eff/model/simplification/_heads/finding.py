"""Finds the nonlinear layers between a network's blocks and its output layer, in a pass on a made-up input.

Tensors show them: the input of the output layer is the output of a module, whose input has the same shape and comes from the
blocks. Or a module that holds the output layer returns its result, for an input of that shape.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_eff._core._architecture.linear_maps import LinearMap, linear_maps
from lightning_eff._core._branches.probing import Divided, probed
from lightning_eff._core._stack.finding import repeated
from lightning_eff._core.patches import hook_behind

_PASSED = (nn.Dropout, nn.Identity)


@dataclass
class Call:
    """The last call of a module, with one tensor in and one out."""

    given: Tensor
    output: Tensor


@dataclass(frozen=True)
class Head:
    """A nonlinear head.

    Attributes:
        path: the output layer's path.
        chain: paths of the modules to skip, in order; empty if ``around`` is set.
        around: the path of the module that holds the output layer and computes the nonlinear layers in its own code.
        given: what the first skipped module got in the pass.
    """

    path: str
    chain: tuple[str, ...]
    around: str
    given: Tensor

    def __str__(self) -> str:
        return f"{self.around or ', '.join(self.chain)} before {self.path}"


@dataclass
class Looked:
    """The heads of a module, and why other output layers have none."""

    heads: list[Head] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)


def calls(root: nn.Module, *, who: str, batch: Any) -> tuple[dict[str, Call], list[str]]:
    """The last calls of modules by path, and the paths of the output layers.

    Raises:
        ValueError: if no part of the module could be run.
    """
    found: dict[str, Call] = {}
    if any(p.is_meta for p in root.parameters()):
        raise ValueError(
            f"{who}: weights of {type(root).__name__} are on the meta device, so its head cannot be found. Apply {who} before"
            " the module is moved there."
        )

    def noting(path: str) -> Any:
        def hook(m: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
            if len(tensors) == 1 and isinstance(output, Tensor):
                found[path] = Call(tensors[0], output)
            else:
                found.pop(path, None)

        return hook

    with ExitStack() as scope:
        for path, m in root.named_modules():
            if path:
                scope.callback(hook_behind(m, noting(path), with_kwargs=True).remove)
        try:
            probe = probed(root, who=who, batch=batch)
        except Divided:
            raise
        except ValueError as e:
            raise ValueError(
                f"{who}: found no output layer in {type(root).__name__}, because no forward pass on a made-up input succeeded"
                f" ({str(e).partition('. ')[0]}). Call lightning_eff.apply(module, {who}(), batch=batch), or set"
                " example_input_array on the LightningModule."
            ) from e
    by_weight: dict[str, list[LinearMap]] = {}
    names = {id(p): name for name, p in root.named_parameters()}
    for one in linear_maps(root):
        by_weight.setdefault(names.get(id(one.module.weight), ""), []).append(one)
    return found, [one.path for name in probe.heads for one in by_weight.get(name, ()) if one.path in found]


def looked(root: nn.Module, *, who: str, batch: Any) -> Looked:
    """The nonlinear heads of ``root``.

    Raises:
        ValueError: if no part of the module could be run.
    """
    made, outputs = calls(root, who=who, batch=batch)
    blocks = tuple(path for stack in repeated(root) if stack.composite for path in stack.prefixes)
    trunk = {path for path, _ in root.named_modules() if any(f"{path}.".startswith(block) for block in blocks)}
    trunk |= {path for path, _ in root.named_modules() if any(block.startswith(f"{path}.") for block in blocks)}
    found = Looked()
    for path in dict.fromkeys(outputs):
        head = _chained(root, path, made, trunk) or _around(root, path, made, trunk)
        if isinstance(head, str) or head is None:
            found.left[path] = head or "no module outside of the blocks computes its input with a linear layer"
        else:
            found.heads.append(head)
    return found


def _chained(root: nn.Module, path: str, made: Mapping[str, Call], trunk: set[str]) -> Head | str | None:
    """The head whose layers are modules, called one after the other."""
    taken, x = made[path].given, made[path].given
    chain: list[str] = []
    seen: set[int] = set()
    while id(x) not in seen:
        seen.add(id(x))
        before = [
            p
            for p, call in made.items()
            if call.output is x and call.given is not x and p not in trunk and not path.startswith(f"{p}.")
        ]
        if not before:
            break
        outermost = min(before, key=lambda p: p.count("."))
        chain.insert(0, outermost)
        x = made[outermost].given
    while chain and not _has_linear(root.get_submodule(chain[0])):
        chain.pop(0)  # a norm or dropout that belongs to the blocks
    if not chain:
        return None
    given = made[chain[0]].given
    if given.shape != taken.shape:
        return f"{chain[0]} changes the shape from {list(given.shape)} to {list(taken.shape)}"
    shared = _shared(root, chain)
    if shared:
        return f"{shared} is used elsewhere too"
    if _affine(root, chain, given):
        return f"{', '.join(chain)} is linear already"
    return Head(path, tuple(p for p in chain if not isinstance(root.get_submodule(p), _PASSED)), "", given)


def _around(root: nn.Module, path: str, made: Mapping[str, Call], trunk: set[str]) -> Head | str | None:
    """The head whose layers are called in the code of the module that holds the output layer."""
    parent, _, name = path.rpartition(".")
    inside = [p for p in made if parent and p.startswith(f"{parent}.") and p != path and not p.startswith(f"{path}.")]
    linear = [p for p in inside if _has_linear(root.get_submodule(p))]
    if parent in trunk or not linear:
        return None
    if parent not in made or made[parent].output is not made[path].output:
        return f"{parent} does more than to return the output of {name}"
    given = made[parent].given
    if given.shape != made[path].given.shape:
        return f"{parent} changes the shape from {list(given.shape)} to {list(made[path].given.shape)}"
    return Head(path, (), parent, given)


def _shared(root: nn.Module, chain: list[str]) -> str:
    """The path outside of ``chain`` of one of its modules; empty if there is none."""
    inside = {id(m) for path in chain for m in root.get_submodule(path).modules()}
    below = tuple(f"{path}." for path in chain)
    for path, m in root.named_modules(remove_duplicate=False):
        if id(m) in inside and path not in chain and not path.startswith(below):
            return path
    return ""


def _has_linear(m: nn.Module) -> bool:
    return bool(linear_maps(nn.ModuleList([m])))


@torch.no_grad()
def _affine(root: nn.Module, chain: list[str], like: Tensor) -> bool:
    """Whether the modules together are affine: f(x) + f(y) = f(x + y) + f(0)."""

    def f(x: Tensor) -> Tensor:
        for path in chain:
            x = root.get_submodule(path)(x)
        return x

    modes = [(m, m.training) for path in chain for m in root.get_submodule(path).modules()]
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(like.shape, generator=g).to(like) for _ in range(2))
    try:
        for m, _ in modes:
            m.training = False
        a, b = f(x) + f(y), f(x + y) + f(torch.zeros_like(x))
    finally:
        for m, mode in modes:
            m.training = mode
    return bool((a - b).abs().max() <= 1e-4 * (1.0 + a.abs().max()))
