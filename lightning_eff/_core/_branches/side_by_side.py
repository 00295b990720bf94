"""Which lists, and modules of like names, are no stacks: their blocks run side by side, as heads, experts and towers do.

It is looked at before a first batch is there, in passes over inputs that are made up. What these do not tell is looked at
again in the first training step.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from lightning_eff._core._branches.probing import aside, attempts
from lightning_eff._core._stack.chains import Feeding, watched
from lightning_eff._core._stack.finding import Candidate, candidates, outermost, stacks

_LARGEST = 2_000_000_000  # parameters; a pass of more takes longer than a first step tells
_PASSES = 12
_KNOWN: "WeakKeyDictionary[nn.Module, tuple[Any, dict[str, bool]]]" = WeakKeyDictionary()


def side_by_side(
    module: nn.Module, *, always: bool = False, batch: Any = None, by_name: bool = False
) -> frozenset[str]:
    """The paths of the stacks whose blocks were seen to run side by side.

    Blocks that only their names hold together also count as such where nothing was seen of them, and others could be meant.

    Args:
        module: the LightningModule, or any module.
        always: look even where only one list of composite blocks could be meant, which the first step tells soon enough.
        batch: of the module's own data; None to make some up.
        by_name: answer for blocks alone that only their names hold together.
    """
    found = stacks(module)
    named = [c for c in found if c.by_name]
    lists = [c for c in found if c.in_list and isinstance(c.container, nn.ModuleList)]
    looked_at = named if by_name else [*lists, *named]
    if not looked_at or not (always or named or not found[0].composite or (len(found) > 1 and found[0] in lists)):
        return frozenset()
    told = verdicts(module, looked_at, batch=batch)
    others = any(c.composite and not c.by_name for c in outermost(found))
    unknown = [c.path for c in named if others and c.path not in told]
    return frozenset([*(path for path, chain in told.items() if not chain), *unknown])


def seen_chains(module: nn.Module) -> list[Candidate]:
    """The stacks in lists; where none is of composite blocks, also those by name whose blocks were seen to feed each other."""
    lists = candidates(module)
    named = [c for c in stacks(module) if c.by_name]
    if not named or any(c.composite and not c.by_name for c in outermost([*named, *lists])):
        return lists
    told = verdicts(module, named)
    return outermost([*(c for c in named if told.get(c.path)), *lists])


def verdicts(module: nn.Module, found: Sequence[Candidate], *, batch: Any = None) -> dict[str, bool]:
    """By path, whether the blocks of each list are a chain; lists of which nothing was seen are left out."""
    key = (batch is None, *((c.path, c.length) for c in found))
    if module in _KNOWN and _KNOWN[module][0] == key:
        return _KNOWN[module][1]
    told = {} if batch is None and _is_elsewhere(module) else _look(module, found, batch)
    _KNOWN[module] = (key, told)
    return told


def _look(module: nn.Module, found: Sequence[Candidate], batch: Any) -> dict[str, bool]:
    told: dict[str, bool] = {}
    for number, (_, call) in enumerate(attempts(module, batch, blocks=False)):
        feeding = {c.path: Feeding() for c in found}
        with as_it_was(module), ExitStack() as scope:
            scope.enter_context(aside(module))
            for c in found:
                scope.enter_context(watched(c.named_blocks.values(), feeding[c.path].seen))
            try:
                call()
            except Exception:  # what is made up may not be what the module takes: the next may be
                continue
            finally:
                for path, one in feeding.items():
                    if one.verdict is not None:
                        told.setdefault(path, one.verdict)
        if len(told) == len(found) or number >= _PASSES:
            break
    return told


def _is_elsewhere(module: nn.Module) -> bool:
    """Whether parameters have no values here, or only a rank's part, or are too many to be run for a look."""
    parameters = [*module.parameters()]
    return (
        sum(p.numel() for p in parameters) > _LARGEST
        or any(p.is_meta or hasattr(p, "_local_tensor") for p in parameters)
        or any(nn.parameter.is_lazy(p) for p in parameters)
    )


@contextmanager
def as_it_was(module: nn.Module) -> Iterator[None]:
    """What parts of ``module`` set on themselves meanwhile is gone afterwards, hooks too.

    Hugging Face's models install hooks in their first call, and note on themselves that they have.
    """
    before = [(m.__dict__, dict(m.__dict__)) for m in module.modules()]
    hooks = [(v, set(v)) for _, had in before for name, v in had.items() if "_hooks" in name and isinstance(v, dict)]
    lengths = [(v, len(v)) for _, had in before for v in had.values() if type(v) is list]
    try:
        yield
    finally:
        for namespace, had in before:
            for name in [name for name in namespace if name not in had]:
                del namespace[name]
            namespace.update((name, value) for name, value in had.items() if namespace.get(name) is not value)
        for registered, names in hooks:
            for name in [name for name in registered if name not in names]:
                del registered[name]
        for values, length in lengths:
            del values[length:]
