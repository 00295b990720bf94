"""How many samples a batch holds, told by whoever knows best.

In a graph batch, atoms outnumber graphs; in a packed one, tokens outnumber sequences. So the leading size that most tensors
share is the last resort. In their order of trust:

1. ``batch_size=`` in a ``self.log`` call of ``training_step``: how a user says it, for all techniques at once.
2. The number of indices that the loader's sampler gave for the batch, or its ``batch_size``, where a dimension of one of
   the batch's tensors has that size. (A loader of whole batches says 1, which tells nothing.)
3. The batch object's own count: ``num_graphs`` (torch-geometric), ``batch_size`` (DGL, TensorDict), ``len()`` of another
   class that is no container, ``PackedSequence`` and nested tensors.
4. The leading size, where all tensors share it.
5. The number of indices, whatever the tensors' sizes.
6. The leading size that most tensors share. Where sizes are many, a warning says so once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import is_dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_eff._core.patches import Patches


def own_count(batch: Any) -> int | None:
    """What a batch, or an object in it, says of its number of samples; None where nothing does."""
    if isinstance(batch, PackedSequence):
        return int(batch.batch_sizes[0])
    if isinstance(batch, Tensor):
        return batch.size(0) if batch.is_nested else None
    told = _says(batch)
    if told is not None:
        return told
    items: Any = ()
    if isinstance(batch, Mapping):
        items = batch.values()
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        items = batch
    elif is_dataclass(batch) and not isinstance(batch, type):
        items = vars(batch).values() if hasattr(batch, "__dict__") else ()
    elif hasattr(type(batch), "__len__") and type(batch).__module__.partition(".")[0] not in ("builtins", "numpy"):
        return _length(batch)
    return next((found for item in items if (found := own_count(item)) is not None), None)


def _says(batch: Any) -> int | None:
    if isinstance(batch, type) or batch is None or isinstance(batch, int | float | str | bytes):
        return None
    for name in ("num_graphs", "batch_size"):
        if not hasattr(type(batch), name) and name not in getattr(batch, "__dict__", {}):
            continue
        value = getattr(batch, name, None)
        if isinstance(value, torch.Size | tuple | list) and value:
            value = value[0]
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _length(batch: Any) -> int | None:
    try:
        return len(batch) or None
    except TypeError:
        return None


class Counting:
    """How many samples the batches of one run hold, learnt from what the run says of each.

    Every batch of the loader is shown to :meth:`learn` before it is counted, so that its count does not depend on batches of
    before. What they have taught counts parts of a batch, and several put together.

    Attributes:
        hears: whether the step's own ``batch_size=`` is still waited for.
    """

    def __init__(self) -> None:
        self.hears = True
        self._places: dict[tuple[str, ...], list[tuple[str, int]]] = {}  # dimensions that count samples
        self._told: dict[tuple[str, ...], int] = {}  # of the latest batch
        self._firm: set[tuple[str, ...]] = set()  # kinds of batches of which the user has said it
        self._warned = False

    def learn(self, found: list[tuple[str, Tensor]], told: int | None, *, exact: bool = True) -> None:
        """Take in that a batch with these tensors has ``told`` samples; unless ``exact``, the last one may have fewer."""
        kind = tuple(path for path, _ in found)
        self._told.pop(kind, None)
        if told is None or told < 2 or kind in self._firm:
            return
        if exact:
            self._told[kind] = told
        fitting = [(path, dim) for path, t in found for dim, size in enumerate(_shape(t)) if size == told]
        fitting.sort(key=lambda place: place[1])  # leading dimensions first
        before = self._places.get(kind)
        kept = fitting if before is None else [place for place in before if place in fitting]
        if kept or (exact and fitting):
            self._places[kind] = kept or fitting

    def hear(self, found: list[tuple[str, Tensor]], said: list[int]) -> None:
        """Take in the ``batch_size`` of the step's calls of ``self.log``, if it had any."""
        self.hears = False
        if said:
            self._places.pop(tuple(path for path, _ in found), None)
            self.learn(found, said[0])
            self._firm.add(tuple(path for path, _ in found))

    def count(self, batch: Any, found: list[tuple[str, Tensor]]) -> int | None:
        """The number of samples in ``batch``, whose tensors are ``found``; None where nothing tells."""
        kind, sizes = tuple(path for path, _ in found), dict(found)
        for path, dim in self._places.get(kind, ()):
            if dim < sizes[path].ndim:
                return sizes[path].shape[dim]
        own = own_count(batch)
        if own is not None:
            return own
        leading = {_shape(t)[0] for t in sizes.values() if t.ndim > 0}
        return None if len(leading) == 1 else self._told.get(kind)

    def counting_samples(self, found: list[tuple[str, Tensor]]) -> set[str] | None:
        """The paths of the tensors that have a row for each sample; None where that is not known."""
        places = self._places.get(tuple(path for path, _ in found))
        return None if not places else {path for path, _ in places}

    def doubt(self, sizes: Sequence[int], taken: int) -> None:
        """Say once that the number of samples was guessed."""
        if not self._warned and len(set(sizes)) > 2 and 2 * list(sizes).count(taken) <= len(sizes):
            self._warned = True
            rank_zero_warn(
                f"The tensors of a batch have the leading sizes {sorted(set(sizes))[:5]}, so its number of samples was guessed"
                f" as {taken}. Say it in training_step, as in self.log('loss', loss, batch_size=len(targets))."
            )


def _shape(t: Tensor) -> tuple[int, ...]:
    return (t.size(0),) if t.is_nested else tuple(t.shape)


_RULE: ContextVar[Counting | None] = ContextVar("rule", default=None)
_OF_TRAINERS: WeakKeyDictionary[Any, Counting] = WeakKeyDictionary()


def current_rule() -> Counting | None:
    """What counts the batches of the run that this call is part of."""
    return _RULE.get()


@contextmanager
def using(rule: Counting) -> Iterator[None]:
    """Batches are counted by ``rule`` within; runs may take turns in threads of one process."""
    token = _RULE.set(rule)
    try:
        yield
    finally:
        _RULE.reset(token)


@contextmanager
def counting(trainer: Any, found: list[tuple[str, Tensor]]) -> Iterator[None]:
    """A batch of ``trainer`` with these tensors, as its loader gave it, is counted within: for those without a session."""
    if current_rule() is not None:
        yield
        return
    rule = _OF_TRAINERS.setdefault(trainer, Counting())
    loader = trainer.train_dataloader
    size = getattr(loader, "batch_size", None)
    rule.learn(found, size if isinstance(size, int) else None, exact=False)
    with using(rule):
        yield


def counted(module: Any, found: list[tuple[str, Tensor]], indices: list[Any] | None, run: Callable[[], Any]) -> Any:
    """A training step, ``run()``, within which its batch with these tensors and indices is counted."""
    rule = current_rule()
    if rule is None:
        return run()
    rule.learn(found, None if indices is None else len(indices))
    if not rule.hears:
        return run()
    with hearing(module) as said:
        output = run()
    if output is not None:
        rule.hear(found, said)
    return output


@contextmanager
def hearing(module: Any) -> Iterator[list[int]]:
    """The ``batch_size`` of each call of ``module.log`` within that has one."""
    log, patches, said = module.log, Patches(), list[int]()

    def heard(*args: Any, **kwargs: Any) -> Any:
        size = kwargs.get("batch_size")
        if isinstance(size, int) and size > 0:
            said.append(size)
        return log(*args, **kwargs)

    patches.set(module, "log", heard)
    try:
        yield said
    finally:
        patches.restore()
