"""What a module keeps of the changes to its architecture: plain attributes, which copies of it have too.

A module that was changed carries a list of :class:`Applied`. A submodule that was swapped in carries a :class:`Swap`, and
a module whose own parameters were frozen their names, so that each part of the tree can be exported by itself.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from torch import Tensor, nn

APPLIED = "_lightning_eff_applied"
SWAP = "_lightning_eff_swap"
FROZEN = "_lightning_eff_frozen"


@dataclass
class Applied:
    """One technique's change of a module.

    Attributes:
        technique: the technique's class.
        settings: its arguments, as numbers, strings, lists and dicts.
        order: the place of its change among those of other techniques.
        where: paths of what it swapped, and of parameters that it froze.
    """

    technique: str
    settings: dict[str, Any]
    order: int
    where: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.technique}({', '.join(f'{key}={value!r}' for key, value in self.settings.items())})"


@dataclass
class Swap:
    """What was in the place of a submodule.

    Attributes:
        by: the technique's class.
        was: the module that was there, without its tensors.
        tensors: its parameters and buffers: name -> shape, and whether it took gradients.
        stays: why it cannot be had back, where the technique says so for all of its modules.
    """

    by: str
    was: nn.Module
    tensors: dict[str, tuple[list[int], bool]]
    stays: str

    @classmethod
    def of(cls, module: nn.Module, *, by: str, stays: str) -> Self:
        """The record of ``module``, which is to be swapped."""
        tensors = tensors_of(module)
        memo: dict[int, Any] = {id(t): None for t in tensors.values()}
        kept = {name: (list(t.shape), t.requires_grad) for name, t in tensors.items()}
        return cls(by, copy.deepcopy(module, memo), kept, stays)

    def put_back(self, tensors: Mapping[str, Tensor]) -> nn.Module:
        """The module that was there, with these tensors."""
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


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, each name of those that are shared."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def swap_of(module: nn.Module) -> Swap | None:
    """What stood in the place of ``module``; None of a module that was not swapped in."""
    return module.__dict__.get(SWAP)


def applied(module: nn.Module) -> list[Applied]:
    """What was applied to ``module`` or to a part of it, in the order of the changes."""
    return [record for m in module.modules() for record in m.__dict__.get(APPLIED, ())]


def swapped(module: nn.Module) -> Iterator[tuple[str, nn.Module, Swap]]:
    """Path, module and record of what was swapped in, each once."""
    for path, m in module.named_modules():
        swap = swap_of(m)
        if swap is not None:
            yield path, m, swap


def frozen(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that techniques froze, each once."""
    found = {
        id(p): p
        for m in module.modules()
        for name in m.__dict__.get(FROZEN, ())
        if (p := m._parameters.get(name)) is not None and not p.requires_grad
    }
    return list(found.values())


def described(module: nn.Module) -> list[dict[str, Any]]:
    """What was applied, as plain containers for a checkpoint."""
    return [asdict(record) for record in applied(module)]


def names(records: list[Applied]) -> str:
    """The techniques and their settings, for messages."""
    return ", ".join(map(str, records)) or "none"


def check_checkpoint(module: nn.Module, state: dict[str, Tensor] | None, entry: list[dict[str, Any]]) -> None:
    """Check that a checkpoint is of a module to which the same was applied as to this one.

    Args:
        module: the module that is to take its weights.
        state: the checkpoint's ``state_dict``; None where it lies elsewhere.
        entry: what :func:`described` said of the module that was saved.

    Raises:
        ValueError: if not, with what must be applied.
    """
    was, here = [Applied(**one) for one in entry], applied(module)
    if [(w.technique, w.settings) for w in was] == [(h.technique, h.settings) for h in here]:
        return
    if not was and (state is None or module.state_dict().keys() == state.keys()):  # saved without any technique there
        return
    if not was:
        raise ValueError(
            f"The checkpoint is of the plain module, and to this one was applied: {names(here)}; expected a checkpoint of the"
            " same architecture. To begin from its weights, load its ['state_dict'] into the plain module, and start a fit"
            " without ckpt_path."
        )
    raise ValueError(
        f"The checkpoint is of a module to which was applied: {names(was)}; to this one was applied: {names(here)}. Put"
        " the same"
        " techniques with the same settings into the Trainer's callbacks; or, without a Trainer, build the plain module and"
        " load the checkpoint's ['state_dict'] into lightning_eff.apply(module, technique, ...)."
    )
