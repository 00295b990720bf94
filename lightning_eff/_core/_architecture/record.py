"""A module's record of changes to its architecture, in plain attributes that copies of it have too.

A changed module has a list of :class:`Applied`. A replacement has a :class:`Swap`. A module whose own parameters were
frozen, or replaced by those of another module, has their names. So each part of the tree can be exported separately.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn

from lightning_eff._core._stack.walking import modules_by_path, modules_of

APPLIED = "_lightning_eff_applied"
SWAP = "_lightning_eff_swap"
FROZEN = "_lightning_eff_frozen"
SHARED = "_lightning_eff_shared"

_SIMPLE = (bool, int, float, str, torch.dtype, type(None))


@dataclass
class Applied:
    """One technique's change of a module.

    Attributes:
        technique: the technique's class.
        settings: its arguments, as numbers, strings, lists and dicts.
        order: the order of its change among those of other techniques.
        where: the paths of replaced submodules and of frozen parameters.
    """

    technique: str
    settings: dict[str, Any]
    order: int
    where: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.technique}({', '.join(f'{key}={value!r}' for key, value in self.settings.items())})"


@dataclass
class Swap:
    """The original of a replaced submodule.

    Attributes:
        by: the technique's class.
        was: the original module, without its tensors.
        tensors: its parameters and buffers: name -> shape, and whether it took gradients.
        stays: why it cannot be restored, if the technique declares this for all of its modules.
    """

    by: str
    was: nn.Module
    tensors: dict[str, tuple[list[int], bool]]
    stays: str

    @classmethod
    def of(cls, module: nn.Module, tensors: Mapping[str, Tensor], *, by: str, stays: str) -> Self:
        """Return the record of ``module``, which will be replaced, and whose tensors are the result of :func:`tensors_of`."""
        kept = {name: (list(t.shape), t.requires_grad) for name, t in tensors.items()}
        return cls(by, _without_tensors(module, tensors), kept, stays)

    def put_back(self, tensors: Mapping[str, Tensor]) -> nn.Module:
        """Return the original module with these tensors."""
        module = copy.deepcopy(self.was)
        made: dict[int, nn.Parameter] = {}
        for name, t in tensors.items():
            path, _, key = name.rpartition(".")
            owner = module.get_submodule(path)
            if key not in owner._parameters:
                owner._buffers[key] = t
                continue
            p = t if isinstance(t, nn.Parameter) else made.setdefault(id(t), nn.Parameter(t.detach(), False))
            p.requires_grad_(self.tensors[name][1])
            owner._parameters[key] = p
        return module


def _without_tensors(module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return a deep copy of ``module`` in which its tensors are None."""
    if _is_plain_layer(module):  # copy.deepcopy takes ten times as long, and a module may have thousands of layers
        bare = module.__new__(type(module))
        for name, value in module.__dict__.items():
            bare.__dict__[name] = value.copy() if isinstance(value, dict | set | list) else value
        for held in (bare._parameters, bare._buffers):
            held.update(dict.fromkeys(held))
        return bare
    return copy.deepcopy(module, {id(t): None for t in tensors.values()})


def _is_plain_layer(module: nn.Module) -> bool:
    """Return whether ``module`` is a layer of torch, with only numbers, strings and tensors of its own."""
    if not type(module).__module__.startswith("torch.nn.modules.") or module._modules:
        return False
    if "__deepcopy__" in module.__dict__ or hasattr(type(module), "__deepcopy__"):
        return False
    for name, value in module.__dict__.items():
        if isinstance(value, _SIMPLE) or name in ("_parameters", "_buffers"):
            continue
        if isinstance(value, set | tuple | list) and all(isinstance(one, _SIMPLE) for one in value):
            continue
        if not (isinstance(value, dict) and not value):
            return False
    return True


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, under each name of shared ones."""
    if not module._modules:
        own = (*module._parameters.items(), *module._buffers.items())
        return {name: t for name, t in own if t is not None}
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def swap_of(module: nn.Module) -> Swap | None:
    """Return the original of a replacement; None if ``module`` is not one."""
    return module.__dict__.get(SWAP)


def applied(module: nn.Module) -> list[Applied]:
    """Return the changes of ``module`` and its parts, in order."""
    return [record for m in modules_of(module) for record in m.__dict__.get(APPLIED, ())]


def swapped(module: nn.Module) -> Iterator[tuple[str, nn.Module, Swap]]:
    """Yield the path, module and record of each replacement, once."""
    for path, m in modules_by_path(module):
        swap = swap_of(m)
        if swap is not None:
            yield path, m, swap


def frozen(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that techniques froze, each once."""
    found = {
        id(p): p
        for m in modules_of(module)
        for name in m.__dict__.get(FROZEN, ())
        if (p := m._parameters.get(name)) is not None and not p.requires_grad
    }
    return list(found.values())


def described(module: nn.Module) -> list[dict[str, Any]]:
    """Return the changes as plain containers for a checkpoint."""
    return [asdict(record) for record in applied(module)]


def names(records: list[Applied]) -> str:
    """Return the techniques and their settings as text."""
    return ", ".join(map(str, records)) or "none"


def check_checkpoint(module: nn.Module, state: dict[str, Tensor] | None, entry: list[dict[str, Any]]) -> None:
    """Check that a checkpoint is of a module with the same changes as this one.

    Args:
        module: the module that will load the weights.
        state: the checkpoint's ``state_dict``; None if it is stored elsewhere.
        entry: the result of :func:`described` for the module that was saved.

    Raises:
        ValueError: if not, with the techniques to apply.
    """
    was, here = [Applied(**one) for one in entry], applied(module)
    if [(w.technique, w.settings) for w in was] == [(h.technique, h.settings) for h in here]:
        return
    if not was and (state is None or module.state_dict().keys() == state.keys()):  # saved without any technique
        return
    if not was:
        raise ValueError(
            f"The checkpoint is of the plain module, but this module was changed by {names(here)}; expected a checkpoint of"
            " the same architecture. To start from its weights, load its ['state_dict'] into the plain module, and start a"
            " fit without ckpt_path."
        )
    raise ValueError(
        f"The checkpoint is of a module changed by {names(was)}, but this module was changed by {names(here)}. Add the same"
        " techniques with the same settings to the Trainer's callbacks. Or, without a Trainer, load the checkpoint's"
        " ['state_dict'] into lightning_eff.apply(module, technique, ...) with the plain module."
    )
