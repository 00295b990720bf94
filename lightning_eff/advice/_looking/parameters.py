"""Which parameters get gradients, and which optimizer has them."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

SHOWN = 5


@dataclass(frozen=True)
class Owned:
    """Parameters with their places in the optimizers."""

    twice: tuple[str, ...]
    nowhere: tuple[str, ...]
    frozen: tuple[str, ...]
    frozen_bytes: int


class Gradients:
    """Which of a module's parameters got gradients.

    Args:
        module: the user's, at the start of training.
    """

    def __init__(self, module: nn.Module) -> None:
        self.trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.got: set[str] = set()
        self.passes = 0
        self.whole = 0  # of the passes, those after which every parameter had a gradient
        self._alive: dict[str, Tensor] = {}
        self._heads = {name: _head(p) for name, p in self.trained.items()}
        self._hooked = any(getattr(p, "_post_accumulate_grad_hooks", None) for p in self.trained.values())

    @property
    def known(self) -> bool:
        """Whether gradients stay on the parameters, where they can be seen."""
        return self.passes > 0 and not self._hooked

    def look(self) -> None:
        """Look, after a backward pass."""
        have = {name for name, p in self.trained.items() if p.grad is not None}
        self.passes += 1
        self.got |= have
        self.whole += len(have) == len(self.trained)

    def look_for_zeros(self) -> None:
        """Look whether the gradients of matrices are all zero, without waiting for the device."""
        for name, p in self.trained.items():
            if p.ndim < 2 or p.grad is None or p.grad.layout is not torch.strided:
                continue
            some = (p.grad != 0).any().detach()
            before = self._alive.get(name)
            self._alive[name] = some if before is None else before | some

    def zeros(self) -> list[str]:
        """The matrices whose gradient was zero in every pass."""
        return [name for name, some in self._alive.items() if not bool(some)]

    def never(self, module: nn.Module) -> list[str]:
        """The parameters that never got a gradient and stayed as they were.

        Experts and the like, which may be used now and then, are left out.
        """
        absent = [n for n, p in self.trained.items() if n not in self.got and p.requires_grad and not self.moved(n)]
        return [name for name in absent if not self._now_and_then(name, module)]

    def _now_and_then(self, name: str, module: nn.Module) -> bool:
        """Whether a parameter's module is in a list or dict beside one like it that got a gradient."""
        return any(other in self.got for other in self._siblings(name, module))

    def _siblings(self, name: str, module: nn.Module) -> Iterator[str]:
        parts = name.split(".")
        owner = module
        for depth, part in enumerate(parts[:-1]):
            if isinstance(owner, nn.ModuleList | nn.ModuleDict):
                for key, child in owner.named_children():
                    if key != part and type(child) is type(owner.get_submodule(part)):
                        yield ".".join((*parts[:depth], key, *parts[depth + 1 :]))
            owner = owner.get_submodule(part)

    def quiet(self, names: Iterable[str], module: nn.Module) -> list[str]:
        """Those of ``names`` whose siblings in a list are no livelier."""
        alive = {name for name, some in self._alive.items() if bool(some)}
        return [name for name in names if not any(other in alive for other in self._siblings(name, module))]

    def moved(self, name: str) -> bool:
        """Whether a parameter has other values than at the start, whoever wrote them."""
        return not torch.equal(self._heads[name], _head(self.trained[name]))


def _head(parameter: Tensor) -> Tensor:
    if parameter.numel() == 0 or type(parameter) not in (Tensor, nn.Parameter):
        return torch.zeros(0)
    return parameter.detach().reshape(-1)[:256].clone()


def optimizers_of(module: LightningModule, optimizers: Iterable[Any]) -> list[Any]:
    """The trainer's optimizers, and those that the module keeps to itself."""
    found = [getattr(o, "optimizer", o) for o in optimizers]
    own: list[Any] = []
    for owner in module.modules():
        for value in vars(owner).values():
            items = (
                value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else (value,)
            )
            own += [item for item in items if isinstance(item, Optimizer)]
    return found + [one for one in own if all(one is not other for other in found)]


def owned(gradients: Gradients, module: LightningModule, optimizers: list[Any]) -> Owned:
    """Where the optimizers have the module's parameters."""
    names = {id(p): name for name, p in module.named_parameters()}
    places = Counter(id(p) for o in optimizers for group in o.param_groups for p in group["params"])
    held: dict[str, int] = {}
    for optimizer in optimizers:
        state = getattr(optimizer, "state", {})
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.requires_grad or id(p) not in names or p not in state:
                    continue
                tensors = [v for v in state[p].values() if isinstance(v, Tensor) and v.numel() > 1]
                if tensors:
                    held[names[id(p)]] = sum(v.numel() * v.element_size() for v in tensors)
    nowhere = [
        name
        for name, p in gradients.trained.items()
        if id(p) not in places and name in gradients.got and p.requires_grad
    ]
    return Owned(
        twice=tuple(names[i] for i, n in places.items() if n > 1 and i in names),
        nowhere=tuple(name for name in nowhere if not gradients.moved(name)),
        frozen=tuple(held),
        frozen_bytes=sum(held.values()),
    )


def listed(names: Iterable[str], sizes: Mapping[str, Any]) -> str:
    """At most five names, with how many there are and how many numbers they hold.

    Args:
        names: of parameters.
        sizes: the parameters by name.
    """
    names = list(names)
    numbers = sum(sizes[name].numel() for name in names if name in sizes)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    what = "parameter tensor" if len(names) == 1 else "parameter tensors"
    return f"{len(names)} {what} ({numbers:,} numbers): {', '.join(names[:SHOWN])}{more}"
