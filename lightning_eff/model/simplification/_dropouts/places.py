"""The attributes of a module that hold probabilities of dropout, found by what reaches the calls that drop.

Each float attribute gets a value of its own that differs from the true one by less than a rounding error of the network. The
probability of a call then shows from which attribute it came, whatever the attribute is called.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from lightning_eff._core.patches import Patches

_STEP = 1e-12  # relative; a double resolves 2e-16
_FOREIGN = ("torch", "lightning", "pytorch_lightning", "lightning_eff", "torchmetrics")


class Place(NamedTuple):
    """An attribute that holds a number.

    Attributes:
        path: the module's dotted path.
        holder: the module's attribute, such as ``config``, whose attribute it is; "" for the module's own.
        name: the attribute's name.
    """

    path: str
    holder: str
    name: str

    def __str__(self) -> str:
        return ".".join(part for part in self if part)

    def owner(self, root: nn.Module) -> Any:
        """The object that has the attribute."""
        m = root.get_submodule(self.path)
        return getattr(m, self.holder) if self.holder else m


def places(root: nn.Module) -> Iterator[tuple[Place, Any]]:
    """Each float in (0, 1] that a module or one of its plain objects holds, once, with its owner."""
    seen: set[int] = set()
    for path, m in root.named_modules():
        for place, owner in ((Place(path, "", ""), m), *_holders(path, m)):
            if id(owner) in seen:
                continue
            seen.add(id(owner))
            for name, value in list(vars(owner).items()):
                if type(value) is float and 0.0 < value <= 1.0:
                    yield place._replace(name=name), owner


def _holders(path: str, m: nn.Module) -> Iterator[tuple[Place, Any]]:
    """The module's public plain objects, such as a config."""
    for name, value in list(vars(m).items()):
        if name.startswith("_") or isinstance(value, nn.Module | Tensor | type) or not hasattr(value, "__dict__"):
            continue
        if callable(value) or type(value).__module__.partition(".")[0] in (*_FOREIGN, "builtins"):
            continue
        yield Place(path, name, ""), value


@contextmanager
def tagged(root: nn.Module) -> Iterator[Mapping[float, Place]]:
    """Give each float attribute its own value until the context ends; returns the places by these values."""
    found: dict[float, Place] = {}
    held: list[tuple[dict[str, Any], str, float]] = []
    try:
        for place, owner in places(root):
            value = vars(owner)[place.name]
            k = 1
            while (tag := value * (1.0 - k * _STEP)) in found:
                k += 1
            found[tag] = place
            held.append((vars(owner), place.name, value))
            vars(owner)[place.name] = tag
        yield found
    finally:
        for namespace, name, value in held:
            namespace[name] = value


def known(root: nn.Module) -> list[Place]:
    """The attributes of torch's own classes that hold a probability of dropout."""
    found: list[Place] = []
    for place, owner in places(root):
        own = isinstance(owner, _DropoutNd) and place.name == "p"
        if own or (isinstance(owner, nn.MultiheadAttention | nn.RNNBase) and place.name == "dropout"):
            found.append(place)
    return found


def alike(root: nn.Module, found: Mapping[Place, None]) -> list[Place]:
    """All attributes with the same name, of the same classes of owners, as those that were found."""
    kinds = {(type(place.owner(root)), place.name) for place in found}
    return [place for place, owner in places(root) if (type(owner), place.name) in kinds]


def zeroed(root: nn.Module, found: Iterable[Place]) -> Patches:
    """Set these attributes to zero until the patches are restored.

    A plain object is replaced by a copy wherever a module has it, because checkpoints may hold it as a hyperparameter.
    """
    patches = Patches()
    copies: dict[int, Any] = {}
    for place in found:
        owner = place.owner(root)
        if isinstance(owner, nn.Module):
            patches.set(owner, place.name, 0.0)
        else:
            other = copies.setdefault(id(owner), copy.copy(owner))
            vars(other)[place.name] = 0.0
    for m in root.modules() if copies else ():
        for name, value in list(vars(m).items()):
            if id(value) in copies and not isinstance(value, nn.Module):
                patches.set(m, name, copies[id(value)])
    return patches
