"""Modules that are in the wrong mode: eval while they train, or train while they are validated."""

from collections.abc import Callable, Collection, Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd


def _drops(module: nn.Module) -> bool:
    return isinstance(module, _DropoutNd) and module.p > 0


def _tracks(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.track_running_stats


def _outermost(
    module: nn.Module, wrong: Callable[[nn.Module], bool], path: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules for which ``wrong`` holds, with their paths."""
    if wrong(module):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _outermost(child, wrong, f"{path}.{name}" if path else name)


def asleep(module: nn.Module, trained: Collection[str]) -> list[tuple[str, int, int]]:
    """The modules in eval mode that train all the same, with their numbers of dropouts and BatchNorms.

    A module whose parameters are all frozen is meant to be in eval mode. So is a single BatchNorm, whose statistics are kept.

    Args:
        module: the user's, within a training step.
        trained: the names of the parameters that are trained.
    """
    found: list[tuple[str, int, int]] = []
    for path, one in _outermost(module, lambda m: not m.training):
        dropouts = sum(_drops(m) and not m.training for m in one.modules())
        norms = sum(_tracks(m) and not m.training for m in one.modules())
        names = [f"{path}.{name}" if path else name for name, _ in one.named_parameters()]
        if dropouts + norms and not _tracks(one) and any(name in trained for name in names):
            found.append((path, dropouts, norms))
    return found


def awake(module: nn.Module) -> list[tuple[str, int, int]]:
    """The modules in train mode during validation, with their numbers of dropouts and BatchNorms.

    A single dropout is meant to be so, where a network is asked several times for its uncertainty.
    """
    found: list[tuple[str, int, int]] = []
    for path, one in _outermost(module, lambda m: m.training):
        dropouts = sum(_drops(m) and m.training for m in one.modules())
        norms = sum(_tracks(m) and m.training for m in one.modules())
        if norms or (dropouts and not _drops(one)):
            found.append((path, dropouts, norms))
    return found


def contents(dropouts: int, norms: int) -> str:
    """In words."""
    parts = [(dropouts, "dropout layer"), (norms, "BatchNorm layer")]
    return " and ".join(f"{n} {what}{'s' if n > 1 else ''}" for n, what in parts if n)
