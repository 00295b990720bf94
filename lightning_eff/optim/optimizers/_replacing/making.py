"""An optimizer as LightningCLI has it: a function of parameters, or a class path with its ``init_args``."""

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_eff._core.optimizers import evaluates_anew
from lightning_eff.optim.optimizers._matrices import parameters_of

Making = Callable[[Any], Optimizer]


def making(optimizer: Any, settings: Mapping[str, Any] | None = None) -> Making:
    """Return the function of parameters that creates the optimizer.

    Args:
        optimizer: such a function or class, a name, a class path, or a mapping with ``class_path`` and ``init_args``.
        settings: its keyword arguments, if any.

    Raises:
        ValueError: if the name or path is not that of an optimizer, or it has no such argument.
        TypeError: for any other value, such as an optimizer object.
    """
    make = _making(optimizer)
    return _checked(functools.partial(make, **settings)) if settings else make


def _making(optimizer: Any) -> Making:
    if isinstance(optimizer, Mapping):
        unknown = sorted(set(optimizer) - {"class_path", "init_args"})
        if unknown or "class_path" not in optimizer:
            raise ValueError(
                f"ReplaceOptimizer(optimizer={dict(optimizer)}): expected the keys class_path and init_args, such as"
                " {'class_path': 'lightning_eff.Muon', 'init_args': {'lr': 0.02}}."
            )
        return _checked(functools.partial(_imported(optimizer["class_path"]), **(optimizer.get("init_args") or {})))
    if isinstance(optimizer, str):
        return _imported(optimizer)
    if isinstance(optimizer, Optimizer) or not callable(optimizer):
        raise TypeError(
            f"ReplaceOptimizer(optimizer of {type(optimizer).__name__}): expected a function that makes an optimizer from"
            " parameters, such as its class or functools.partial(Muon, lr=0.02), or its class path. The parameters are"
            " chosen when the module is complete."
        )
    made_by: Any = _checked(optimizer) if isinstance(optimizer, functools.partial) else optimizer
    return made_by


def _checked(make: functools.partial[Any]) -> Making:
    """Return the function after checking its keywords.

    Raises:
        ValueError: if one of them is not.
    """
    try:
        has = inspect.signature(make.func).parameters
    except (TypeError, ValueError):  # of a function in C
        return make
    known = [*has][1:]  # without the parameters
    unknown = [name for name in make.keywords if name not in has]
    if unknown and not any(one.kind is one.VAR_KEYWORD for one in has.values()):
        near = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0.5)
        near += [one for one in known if one == _initials(unknown[0]) or _initials(one) == unknown[0]]
        raise ValueError(
            f"ReplaceOptimizer: {_name(make)} has no argument {unknown[0]!r}; expected one of {', '.join(known)}."
            f"{f' Did you mean {near[0]!r}?' if near else ' Remove it.'}"
        )
    return make


def _initials(name: str) -> str:
    return "".join(word[:1] for word in name.split("_"))


def _name(make: Making) -> str:
    return getattr(getattr(make, "func", make), "__name__", "the optimizer")


def _imported(path: str) -> Making:
    home, _, name = path.rpartition(".")
    try:
        found: Any = getattr(importlib.import_module(home), name) if home else _by_name(name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"ReplaceOptimizer: no class is found at {path!r} ({error}). Give a name or a class path, such as 'muon',"
            " 'torch.optim.SGD' or 'pytorch_optimizer.Lion', and install its package."
        ) from error
    if not inspect.isclass(found) or Optimizer not in inspect.getmro(found):
        raise ValueError(f"ReplaceOptimizer: {path!r} is not a torch.optim.Optimizer. Pass the class path of one.")
    make: Any = found
    return make


def _by_name(name: str) -> Any:
    """Return the optimizer of this package or of ``torch.optim`` with this name, ignoring case.

    Raises:
        AttributeError: if there is none.
    """
    ours: Any = importlib.import_module("lightning_eff")
    known = {
        found.lower(): (home, found)
        for home, names in ((torch.optim, dir(torch.optim)), (ours, ours.__all__))
        for found in names
        if not found.startswith("_")
    }
    if name.lower() not in known:
        near = difflib.get_close_matches(name.lower(), known, n=1)
        raise AttributeError(f"did you mean {known[near[0]][1]!r}?" if near else "no optimizer has this name")
    home, found = known[name.lower()]
    return getattr(home, found)


def made(make: Making, groups: list[dict[str, Any]], module: nn.Module) -> Optimizer:
    """Create the optimizer of these groups.

    Args:
        make: see :func:`making`.
        groups: groups with ``params`` and their own settings.
        module: the module of the parameters.

    Raises:
        ValueError: if it does not accept the groups or its arguments, has other parameters afterwards, or evaluates losses
            again.
    """
    bare = len(groups) == 1 and set(groups[0]) == {"params"}
    who = _name(make)
    try:
        with parameters_of(module):
            optimizer = make(list(groups[0]["params"]) if bare else [dict(group) for group in groups])
    except (ValueError, TypeError, KeyError, AssertionError, RuntimeError, NotImplementedError) as error:
        if (fault := _fault(make, error)) is not None:
            raise ValueError(f"ReplaceOptimizer: {fault}") from error
        shapes = sorted(
            {tuple(p.shape) for group in groups for p in group["params"]}, key=lambda shape: (len(shape), shape)
        )
        keys = sorted({key for group in groups for key in group} - {"params"})
        raise ValueError(
            f"ReplaceOptimizer: {who} does not accept these parameters, {len(groups)} groups"
            f"{f' with their own {keys}' if keys else ''} of tensors of shapes {shapes[:5]}{' ...' if len(shapes) > 5 else ''}:"
            f" {str(error).rstrip('.')}. Choose other parameters with parameters=, or another optimizer."
        ) from error
    who = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"ReplaceOptimizer: the function for the optimizer returned {who}. Return a torch.optim.Optimizer."
        )
    if evaluates_anew(optimizer):
        raise ValueError(
            f"ReplaceOptimizer: {who} evaluates the loss again in its step, which is not possible with two optimizers. Use an"
            " optimizer that needs only gradients."
        )
    wanted = {id(p) for group in groups for p in group["params"]}
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    if set(held) != wanted or len(held) != len(wanted):
        names = {id(p): name for name, p in module.named_parameters()}
        lost = [names.get(one, "a parameter") for one in wanted - set(held)]
        raise ValueError(
            f"ReplaceOptimizer: {who} has {len(held)} parameters but was given {len(wanted)}"
            f"{f', without {lost[:3]}' if lost else ''}. Use an optimizer that keeps the parameters it is given."
        )
    return optimizer


def _fault(make: Making, error: Exception) -> str | None:
    """Return the error in the optimizer's arguments, if it fails with any parameters."""
    own = _refusal(make)
    if type(own) is not type(error) or str(own) != str(error):
        return None
    why = str(error).rstrip(".")
    if isinstance(make, functools.partial):
        for name, value in make.keywords.items():
            others = {key: one for key, one in make.keywords.items() if key != name}
            if _refusal(functools.partial(make.func, *make.args, **others)) is None:
                default = inspect.signature(make.func).parameters[name].default
                like = "" if default is inspect.Parameter.empty else f", such as the default {default!r}"
                return f"{_name(make)} does not take {name}={value!r}: {why}. Give another value{like}."
    return f"{_name(make)} cannot be created with these arguments for any parameters: {why}. Correct the arguments."


def _refusal(make: Making) -> Exception | None:
    """Return the error of creating the optimizer with a small matrix, if any."""
    try:
        make([nn.Parameter(torch.zeros(2, 2))])
    except Exception as error:
        return error
    return None
