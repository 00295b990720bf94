"""Check whether a module computes something else because some of its layers have another class."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_eff._core import rng
from lightning_eff._core._architecture.record import Swap, swapped
from lightning_eff._core._architecture.updates import without_updates
from lightning_eff._core._stack.compiled import uncompiled
from lightning_eff._core._stack.walking import modules_by_path, modules_of, without_collections
from lightning_eff._core.patches import as_another, hook_before, hook_behind
from lightning_eff._core.steps import Step, looking_on, silent

_SAMPLES = 256  # elements of a tensor that are compared, in addition to its mean
_RTOL = 1e-3


def check_classes(step: Step, batch: Any) -> bool:
    """Raise ``ValueError`` if the user's step branches on the class of a replaced layer.

    A module may test ``type(layer) is nn.Linear`` or ``isinstance(layer, nn.LayerNorm)``, and compute something else once the
    layer has another class. The step runs twice without a trace: with the replacements, and with objects of the original
    classes that call them. The inputs of each replacement, and the outputs of the modules around it, must be the same in both.
    The loss is not compared, because a penalty on weights may now cover other weights.

    Args:
        step: the first step that returns a loss, or that runs replacements under manual optimization.
        batch: its batch.

    Returns:
        Whether a replacement ran, or nothing is left to check.
    """
    places = [(path, m, swap) for path, m, swap in swapped(step.module) if _is_layer(m, swap)]
    if not places:
        return True
    manual = not step.module.automatic_optimization
    for grad in (True,) if manual else (False, True):  # some steps compute derivatives themselves
        ours = _pass(step, batch, places, grad=grad, plain=False)
        theirs = _pass(step, batch, places, grad=grad, plain=True)
        if ours is None and theirs is None:
            continue
        if theirs is not None:
            _compare(step.module, places, ours, theirs)
        replaced = {path for path, _, _ in places}
        return any(path in replaced for path, _ in (*(ours or ()), *(theirs or ())))
    if manual:  # the real step may succeed although the one without updates failed
        by, name = places[0][2].by, type(step.module).__name__
        rank_zero_warn(
            f"{by}: could not check whether {name} tests the class of a replaced layer, because training_step fails"
            f" without optimizer steps. Check that {name}'s output is the same before and after"
            f" lightning_eff.apply(module, {by}(...))."
        )
    return True


def _is_layer(m: nn.Module, swap: Swap) -> bool:
    """Return whether a torch layer was replaced that an object calling the replacement can represent."""
    cls = type(swap.was)
    return (
        type(m) is not cls
        and cls.__module__.startswith("torch.nn.modules.")
        and cls.forward is not nn.Module.forward
        and not any(child is not None for child in swap.was._modules.values())
    )


_Call = tuple[str, list[tuple[list[int], Tensor]]]


def _pass(
    step: Step, batch: Any, places: list[tuple[str, nn.Module, Swap]], *, grad: bool, plain: bool
) -> list[_Call] | None:
    """Return the inputs of each replacement and the outputs of modules around, in call order; None if the pass raises."""
    calls: list[_Call] = []
    with ExitStack() as scope:
        scope.enter_context(torch.set_grad_enabled(grad))
        scope.enter_context(rng.fork())
        scope.enter_context(silent(step.module))
        scope.enter_context(looking_on())
        scope.enter_context(uncompiled())
        if not step.module.automatic_optimization:
            scope.enter_context(without_updates(step.module))
        around = {path[:i] for path, _, _ in places for i in (0, *(i for i, c in enumerate(path) if c == "."))}
        with without_collections():
            at = dict(modules_by_path(step.module, once=False))
            for path in sorted(around):
                hook = hook_behind(at[path], _noting_output(path, calls))
                scope.callback(hook.remove)
            for path, m, _ in places:
                hook = hook_before(m, _noting(path, calls), with_kwargs=True)
                scope.callback(hook.remove)
            if plain:
                scope.enter_context(_of_plain_classes(step.module, places))
        try:
            step.chain.call(step, batch, stages=())
        except Exception:  # the real step raises it too
            return None
    step.chain.cost.forward_passes += 1
    return calls


def _noting(path: str, calls: list[_Call]) -> Callable[..., None]:
    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((path, _sketches((args, kwargs))))

    return note


def _noting_output(path: str, calls: list[_Call]) -> Callable[..., None]:
    def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        calls.append((path, _sketches(output)))

    return note


@torch.no_grad()
def _sketches(values: Any) -> list[tuple[list[int], Tensor]]:
    """Return the shape of each tensor in ``values`` with all its elements, or some of many and then their mean magnitude."""
    found: list[tuple[list[int], Tensor]] = []
    for t in tree_leaves(values):
        if isinstance(t, Tensor) and t.numel() and not t.is_sparse:
            flat = t.detach().reshape(-1)
            if flat.numel() <= _SAMPLES:
                found.append((list(t.shape), flat.to(torch.float32, copy=True)))
                continue
            few = flat[:: math.ceil(flat.numel() / _SAMPLES)].to(torch.float32)
            found.append((list(t.shape), torch.cat([few, flat.to(torch.float32).abs().mean()[None]])))
    return found


@contextmanager
def _of_plain_classes(module: nn.Module, places: list[tuple[str, nn.Module, Swap]]) -> Iterator[None]:
    """Put an object of the original class, which calls the replacement, in place of each replacement."""
    made = {id(m): _posing(m, swap) for _, m, swap in places}
    held: list[tuple[nn.Module, str, nn.Module]] = []
    for parent in modules_of(module):
        for name, child in list(parent._modules.items()):
            if child is not None and id(child) in made:
                held.append((parent, name, child))
                parent._modules[name] = made[id(child)]
    try:
        yield
    finally:
        for parent, name, child in held:
            parent._modules[name] = child


def _posing(m: nn.Module, swap: Swap) -> nn.Module:
    """Return an object of the class that ``m`` replaced, with tensors of its shapes, that computes what ``m`` does."""
    posing = copy.copy(swap.was)
    posing.__dict__.update({k: dict(v) if isinstance(v, dict) else v for k, v in swap.was.__dict__.items()})
    for name, (shape, _) in swap.tensors.items():
        tensor = getattr(m, name, None)
        if not isinstance(tensor, Tensor) or list(tensor.shape) != shape:
            first = next((t for t in (*m.parameters(), *m.buffers()) if t.is_floating_point()), torch.empty(0))
            tensor = torch.zeros((), dtype=first.dtype, device=first.device).expand(shape)
        (posing._buffers if name in posing._buffers else posing._parameters)[name] = tensor  # type: ignore[assignment]
    posing.training = m.training
    posing.__dict__["forward"] = m.__call__
    posing.__dict__["__reduce_ex__"] = lambda protocol: as_another(m.__reduce_ex__(protocol))  # copies are of m
    return posing


def _compare(
    module: LightningModule,
    places: list[tuple[str, nn.Module, Swap]],
    ours: list[_Call] | None,
    theirs: list[_Call],
) -> None:
    path = _first_difference(ours, theirs) if ours is not None else places[0][0]
    if path is None:
        return
    of = {at: (m, swap) for at, m, swap in places}
    path = next((at for at in of if at == path or at.startswith(f"{path}." if path else "")), places[0][0])
    m, swap = of[path]
    raise ValueError(
        f"{swap.by}: {type(module).__name__} computes something else when {path} is a {type(m).__name__} instead of a"
        f" {type(swap.was).__name__}, because its forward pass tests the layer's class. Leave {path} out of {swap.by}, or"
        " remove the test from the forward pass."
    )


def _first_difference(ours: list[_Call], theirs: list[_Call]) -> str | None:
    """Return where two passes differ: the path of the first layer with another input, or module with another output."""
    if _are_equal(ours, theirs):
        return None
    for (path, given), (other, wanted) in zip(ours, theirs, strict=False):
        if path != other:
            return other or path
        if len(given) != len(wanted):
            return path
        for (shape, a), (wanted_shape, b) in zip(given, wanted, strict=True):
            if shape != wanted_shape:
                return path
            mean = b.abs().mean() if len(b) <= _SAMPLES else b[-1]
            scale = float(mean) if mean.isfinite() else 1.0
            if not torch.allclose(a, b, rtol=_RTOL, atol=_RTOL * scale + 1e-12, equal_nan=True):
                return path
    return None if len(ours) == len(theirs) else ""


def _are_equal(ours: list[_Call], theirs: list[_Call]) -> bool:
    """Return whether two passes have the same calls bit for bit, which takes one comparison for all of them."""
    shapes = [[(path, [shape for shape, _ in given]) for path, given in calls] for calls in (ours, theirs)]
    if shapes[0] != shapes[1]:
        return False
    values = [[t.to("cpu") for _, given in calls for _, t in given] for calls in (ours, theirs)]
    return not values[0] or torch.equal(torch.cat(values[0]), torch.cat(values[1]))
