"""Optimizers of any kind: find them in ``configure_optimizers``' result, and copy state between parameters."""

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_eff._core._optim.combined import CombinedOptimizer

# torch.optim's classes whose step reads only a parameter's own gradient and state
PER_PARAMETER = (
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
    "SparseAdam",
)


def is_per_parameter(optimizer: Optimizer, *, but: tuple[str, ...] = ()) -> bool:
    """Return whether the class of ``optimizer`` is in ``PER_PARAMETER`` and not in ``but``; a subclass does not count."""
    return type(optimizer) in [getattr(torch.optim, name, None) for name in PER_PARAMETER if name not in but]


def evaluates_anew(optimizer: Optimizer) -> bool:
    """Return whether its step requires a closure because it computes the loss itself, as LBFGS does."""
    closure = inspect.signature(inspect.unwrap(type(optimizer).step)).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def step_in_parts(
    optimizer: Optimizer,
    closure: Callable[[], Any] | None,
    keywords: dict[str, Any],
    update: Callable[[tuple[Any, ...], dict[str, Any]], None],
) -> Any:
    """Run a step in another way or in parts, while the optimizer's own hooks see one step with the module's parameters.

    Args:
        optimizer: the optimizer.
        closure: runs between the pre-hooks and the update, with gradients enabled.
        keywords: the step's keyword arguments.
        update: gets the step's arguments as the hooks leave them. It may call the optimizer's step, without hooks.

    Returns:
        The result of ``closure``.
    """
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    args: tuple[Any, ...] = (optimizer,)
    keywords = {**keywords, "closure": closure}
    for hook in list(before.values()):
        changed: Any = hook(optimizer, args, keywords)
        if changed is not None:
            args, keywords = changed
    closure = keywords.pop("closure", None)
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        update(args[1:], keywords)
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = before, after
    for hook in list(after.values()):
        hook(optimizer, args, {**keywords, "closure": closure})
    return loss


def keeps_state(optimizer: Optimizer, parameter: Tensor) -> bool | None:
    """Return whether ``optimizer`` keeps state for ``parameter`` after a step; None if that cannot be determined.

    A copy of the optimizer steps once on a small tensor, with the settings of the parameter's group. The optimizer itself
    does not change. An optimizer that wraps another cannot be copied this way.
    """
    if isinstance(optimizer, CombinedOptimizer):
        return keeps_state(optimizer.part_of(parameter), parameter)
    if any(isinstance(value, Optimizer) for value in optimizer.__dict__.values()):
        return None
    groups = [group for group in optimizer.param_groups if any(p is parameter for p in group["params"])]
    if not groups:
        return False
    if optimizer.state.get(parameter):  # some create state in __init__
        return any(value is not None for value in optimizer.state[parameter].values())
    probe: Any = object.__new__(type(optimizer))
    probe.__dict__.update(optimizer.__dict__)
    probe.state = defaultdict(dict)
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(probe, name, OrderedDict())
    try:
        stand_in = torch.zeros([2] * parameter.ndim, dtype=parameter.dtype, device=parameter.device, requires_grad=True)
        stand_in.grad = torch.ones_like(stand_in)
        probe.param_groups = [{**groups[0], "params": [stand_in]}]
        with torch.enable_grad():
            type(optimizer).step(probe)
    except Exception:  # an optimizer that cannot be copied this way: the caller decides what None means
        return None
    return any(value is not None for value in probe.state[stand_in].values())


def copy_state(optimizers: list[Optimizer], source: Tensor, target: Tensor) -> bool:
    """Copy the state of ``source`` to ``target`` in each optimizer that has both; return whether there was any."""
    copied = False
    for optimizer in optimizers:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if id(source) in held and id(target) in held and optimizer.state.get(source):
            optimizer.state[target] = {
                key: value.detach().clone() if isinstance(value, Tensor) else deepcopy(value)
                for key, value in optimizer.state[source].items()
            }
            copied = True
    return copied


def rewrite_configured(configured: Any, fn: Callable[[Optimizer], Optimizer]) -> Any:
    """Apply ``fn`` to each optimizer in the result of ``configure_optimizers``, and return it in the same form.

    The forms are Lightning's: an optimizer, a sequence of them, a dict with ``"optimizer"``, a sequence of such dicts, a
    pair (optimizers, schedulers), or None. ``fn`` may change an optimizer in place and return it. If it returns another
    one, the caller must rebuild the schedulers.
    """
    if configured is None:
        return None
    if isinstance(configured, Optimizer):
        return fn(configured)
    if isinstance(configured, dict):
        if "optimizer" not in configured:
            raise TypeError(
                f"configure_optimizers returned a dict with the keys {list(configured)}; expected the key 'optimizer'."
            )
        return {**configured, "optimizer": fn(configured["optimizer"])}
    if isinstance(configured, list | tuple):
        if len(configured) == 2 and isinstance(configured[0], list | tuple):
            return type(configured)([[fn(o) for o in configured[0]], configured[1]])
        return type(configured)([rewrite_configured(item, fn) for item in configured])
    raise TypeError(
        f"configure_optimizers returned {type(configured).__name__}; expected an optimizer, a list of them, a dict with"
        " 'optimizer', or (optimizers, schedulers)."
    )
