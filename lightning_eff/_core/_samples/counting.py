"""Count the samples of a batch.

In a graph batch, atoms outnumber graphs, and in a packed one, tokens outnumber sequences. So the leading size of most tensors
is only the last resort. The sources in their order of trust are:

1. ``batch_size=`` in a ``self.log`` call of ``training_step``, with which a user sets it for all techniques at once.
2. The number of indices of the loader's sampler for the batch, or the loader's ``batch_size``, if a dimension of one of the
   batch's tensors has that size. (A loader of whole batches has 1, which says nothing.)
3. The batch object's own count: ``num_graphs`` (torch-geometric), ``batch_size`` (DGL, TensorDict), ``len()`` of another
   class that is not a container, ``PackedSequence`` and nested tensors.
4. The leading size, if all tensors share it.
5. The number of indices, whatever the tensors' sizes.
6. The length of lists with one item per sample, if all tensors lie in such lists.
7. The leading size of most tensors. If there are many sizes, a warning says so once.
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
    """Return the number of samples according to the batch or an object in it, or None."""
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
    """Counts the samples in the batches of one run, and learns from each batch how to count.

    :meth:`learn` sees every batch of the loader before it is counted, so a count does not depend on earlier batches. The same
    rules count parts of a batch, and several batches joined.

    Attributes:
        hears: whether the step's own ``batch_size=`` has not been seen yet.
    """

    def __init__(self) -> None:
        self.hears = True
        self._places: dict[tuple[str, ...], list[tuple[str, int]]] = {}  # dimensions that count samples
        self._told: dict[tuple[str, ...], int] = {}  # of the latest batch
        self._firm: set[tuple[str, ...]] = set()  # kinds of batches whose size the user has logged
        self._warned = False
        self._last: Any = None  # what the last call of :meth:`learn` got

    def learn(self, found: list[tuple[str, Tensor]], told: int | None, *, exact: bool = True) -> None:
        """Learn that a batch with these tensors has ``told`` samples. Unless ``exact``, the last batch may have fewer."""
        got = [(path, _shape(t)) for path, t in found], told, exact
        if got == self._last:
            return  # it would find the same again
        self._last = got
        kind = tuple(path for path, _ in found)
        self._told.pop(kind, None)
        if told is None or told < 2 or kind in self._firm:
            return
        if exact:
            self._told[kind] = told
        fitting = [(path, dim) for path, shape in got[0] for dim, size in enumerate(shape) if size == told]
        fitting.sort(key=lambda place: place[1])  # leading dimensions first
        before = self._places.get(kind)
        kept = fitting if before is None else [place for place in before if place in fitting]
        if kept or (exact and fitting):
            self._places[kind] = kept or fitting
        elif exact:
            self._places.pop(kind, None)  # another dimension had that size by chance

    def hear(self, found: list[tuple[str, Tensor]], said: list[int]) -> None:
        """Learn from the ``batch_size`` of the step's calls of ``self.log``, if it had any."""
        self.hears = False
        self._last = None
        if said:
            self._places.pop(tuple(path for path, _ in found), None)
            self.learn(found, said[0])
            self._firm.add(tuple(path for path, _ in found))

    def count(self, batch: Any, found: list[tuple[str, Tensor]]) -> int | None:
        """Return the number of samples in ``batch`` with the tensors ``found``, or None if it is unknown."""
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
        """Return the paths of the tensors with a row per sample, or None if they are unknown."""
        places = self._places.get(tuple(path for path, _ in found))
        return None if not places else {path for path, _ in places}

    def doubt(self, sizes: Sequence[int], taken: int) -> None:
        """Warn once that the number of samples was guessed."""
        if not self._warned and len(set(sizes)) > 2 and 2 * list(sizes).count(taken) <= len(sizes):
            self._warned = True
            rank_zero_warn(
                f"The tensors of a batch have the leading sizes {sorted(set(sizes))[:5]}, so its number of samples was guessed"
                f" as {taken}. Log it in training_step: self.log('loss', loss, batch_size=len(targets))."
            )


def _shape(t: Tensor) -> tuple[int, ...]:
    return (t.size(0),) if t.is_nested else tuple(t.shape)


_RULE: ContextVar[Counting | None] = ContextVar("rule", default=None)
_OF_TRAINERS: WeakKeyDictionary[Any, Counting] = WeakKeyDictionary()


def current_rule() -> Counting | None:
    """Return the rule that counts the batches of the current run."""
    return _RULE.get()


@contextmanager
def using(rule: Counting) -> Iterator[None]:
    """Count batches by ``rule`` within. Runs may take turns in threads of one process."""
    token = _RULE.set(rule)
    try:
        yield
    finally:
        _RULE.reset(token)


@contextmanager
def counting(trainer: Any, found: list[tuple[str, Tensor]]) -> Iterator[None]:
    """Count a batch of ``trainer`` with these tensors within, for callers without a session."""
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
    """Run a training step, ``run()``, while its batch with these tensors and indices is counted."""
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
    """Collect the ``batch_size`` of each call of ``module.log`` within."""
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
