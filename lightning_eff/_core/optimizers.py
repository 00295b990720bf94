"""Optimizers of any make: seeing them at their making, and moving their state between parameters."""

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_eff._core._optim.combined import CombinedOptimizer

# torch.optim's own whose step asks, for each parameter, for its gradient and its own state alone
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
    """Whether ``optimizer`` is one of ``PER_PARAMETER``, and no subclass of one."""
    return type(optimizer) in [getattr(torch.optim, name, None) for name in PER_PARAMETER if name not in but]


def evaluates_anew(optimizer: Optimizer) -> bool:
    """Whether its step cannot do without a closure, because it computes the loss by itself, as LBFGS does."""
    closure = inspect.signature(inspect.unwrap(type(optimizer).step)).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def step_in_parts(
    optimizer: Optimizer,
    closure: Callable[[], Any] | None,
    keywords: dict[str, Any],
    update: Callable[[tuple[Any, ...], dict[str, Any]], None],
) -> Any:
    """A step that is made in another way, or in parts: the optimizer's own hooks see one, with the module's parameters.

    Args:
        optimizer: whose step it is.
        closure: run between the hooks before the step and the update, with gradients on.
        keywords: of the step.
        update: gets the step's arguments, as the hooks leave them, and may call the optimizer's step without hooks.

    Returns:
        What ``closure`` returned.
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
    """Whether ``optimizer`` keeps state for ``parameter`` once it has stepped; None where that cannot be found out.

    Found by one step of a copy of the optimizer on a small stand-in, with the settings of the parameter's group; the
    optimizer itself is not touched. One that wraps another cannot be copied so.
    """
    if isinstance(optimizer, CombinedOptimizer):
        return keeps_state(optimizer.part_of(parameter), parameter)
    if any(isinstance(value, Optimizer) for value in optimizer.__dict__.values()):
        return None
    groups = [group for group in optimizer.param_groups if any(p is parameter for p in group["params"])]
    if not groups:
        return False
    if optimizer.state.get(parameter):  # some make it as they are made
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
    except Exception:  # an optimizer that cannot be copied this way tells nothing; the caller decides what that means
        return None
    return any(value is not None for value in probe.state[stand_in].values())


def copy_state(optimizers: list[Optimizer], source: Tensor, target: Tensor) -> bool:
    """Give ``target`` a copy of the state of ``source`` in whichever optimizer holds both; True if there was any."""
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
    """What ``configure_optimizers`` returned, whatever form it has, with ``fn`` applied to each optimizer in it.

    The forms are those of Lightning: an optimizer, a sequence of them, a dict with ``"optimizer"``, a sequence of such
    dicts, a pair (optimizers, schedulers), or None. ``fn`` may change an optimizer in place and return it; where it
    returns another one, schedulers are the caller's to rebuild.
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
