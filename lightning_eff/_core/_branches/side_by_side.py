"""Find lists, and modules of similar names, that are not stacks, because their blocks run in parallel, as heads or experts do.

Before the first batch it runs the module on generated inputs. The first training step verifies what remains open.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from lightning_eff._core._branches.probing import aside, attempts
from lightning_eff._core._stack.chains import Feeding, watched
from lightning_eff._core._stack.finding import Candidate, candidates, outermost, stacks

_LARGEST = 2_000_000_000  # parameters; with more, only the first step verifies the stack
_PASSES = 12
_KNOWN: "WeakKeyDictionary[nn.Module, tuple[Any, dict[str, bool]]]" = WeakKeyDictionary()


def side_by_side(
    module: nn.Module, *, always: bool = False, batch: Any = None, by_name: bool = False
) -> frozenset[str]:
    """Return the paths of the stacks whose blocks were observed to run side by side.

    Stacks by name that could not be observed are included if there are other stacks.

    Args:
        module: the LightningModule, or any module.
        always: check even if there is only one list of composite blocks, which the first step verifies anyway.
        batch: a batch of the module's data; None generates some.
        by_name: check only stacks by name.
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
    """Return the stacks in lists; without composite blocks there, also stacks by name observed to feed each other."""
    lists = candidates(module)
    named = [c for c in stacks(module) if c.by_name]
    if not named or any(c.composite and not c.by_name for c in outermost([*named, *lists])):
        return lists
    told = verdicts(module, named)
    return outermost([*(c for c in named if told.get(c.path)), *lists])


def verdicts(module: nn.Module, found: Sequence[Candidate], *, batch: Any = None) -> dict[str, bool]:
    """Return by path whether the blocks of each list feed each other; lists without observations are omitted."""
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
            except Exception:  # the module may not accept this input, but the next one
                continue
            finally:
                for path, one in feeding.items():
                    if one.verdict is not None:
                        told.setdefault(path, one.verdict)
        if len(told) == len(found) or number >= _PASSES:
            break
    return told


def _is_elsewhere(module: nn.Module) -> bool:
    """Return whether parameters are without values, sharded, or too many for a trial pass."""
    parameters = [*module.parameters()]
    return (
        sum(p.numel() for p in parameters) > _LARGEST
        or any(p.is_meta or hasattr(p, "_local_tensor") for p in parameters)
        or any(nn.parameter.is_lazy(p) for p in parameters)
    )


@contextmanager
def as_it_was(module: nn.Module) -> Iterator[None]:
    """Remove attributes and hooks that parts of ``module`` set on themselves in this context.

    Hugging Face models install hooks in their first call, and record this in an attribute.
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
