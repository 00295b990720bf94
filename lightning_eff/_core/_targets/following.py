"""Follow a batch's labels through a ``training_step`` to the loss calls that use them as targets.

Each tensor computed from labels has a *place* for each entry: the index of the label entry to which it belongs.
Operations that move entries (shifts, reshapes, selections) also run on the places. Operations that compute a value per entry
(casts, masks, one-hot codes) keep them. The same operations, run on other labels, give the targets that the loss call would
have had with those labels.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from lightning_eff._core._targets.followed import Followed, hold, release
from lightning_eff._core._targets.operations import CASTING, COMPARING, JOINING, MOVING, POINTWISE, name_of

_NESTED = (list, tuple, dict)


class Kind(IntEnum):
    """With what the labels were compared on the way to a tensor."""

    SINGLE = 0  #: with nothing, or with single numbers, as ``labels != -100``
    MANY = 1  #: with other tensors, as predictions or all classes
    PAIRS = 2  #: with labels, as the masks of contrastive losses


@dataclass
class Trace:
    """The origin of a tensor that was computed from labels.

    Attributes:
        label: the labels' path in the batch.
        places: for each entry, the index of its entry in the flattened labels; -1 for none. In the tensor's shape.
        others: the tensor's values if the batch had each of the other labels.
        selects: whether it selects the entries that count, as ``labels != -100`` does.
        kind: with what the labels were compared.
        whole: whether it is the labels themselves, so that ``places`` counts from 0 in their shape.
    """

    label: str
    places: Tensor
    others: list[Tensor]
    selects: bool = False
    kind: Kind = Kind.SINGLE
    whole: bool = False


@dataclass
class Stray:
    """An operation, other than an observed loss call, that combines labels with the network's output."""

    name: str
    label: str
    output: Tensor


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in lists, tuples and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)


def _replaced(value: Any, by: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return by(value)
    if isinstance(value, list | tuple):
        return type(value)([_replaced(item, by) for item in value])
    return value


def _kind(name: str, traces: Sequence[Trace], data: Sequence[Tensor]) -> Kind:
    """Return with what labels are compared after an operation on these ``traces`` and other ``data``."""
    found = max(trace.kind for trace in traces)
    if name not in COMPARING or name == "isin":
        return found
    other = Kind.MANY if any(t.numel() > 1 for t in data) else Kind.SINGLE
    return max(found, Kind.PAIRS if len(traces) > 1 else other)


class Follower:
    """The tensors computed from a batch's labels, in one pass.

    Attributes:
        strays: operations that combine labels with the network's output outside of a loss call, as in a hand-written loss.
        compared: whether labels were compared with other tensors without a gradient, as in a metric.
        by_class: whether followed tensors have the class ``Followed``.
        foreign: whether a tensor was followed that cannot have it.
    """

    def __init__(self) -> None:
        self._traces: dict[int, tuple[Tensor, Trace]] = {}  # keeps the tensors, because ids of freed ones are reused
        self.by_class = False
        self.foreign = False
        self._held: list[Tensor] = []
        self.strays: list[Stray] = []
        self.compared = False

    def begin(self, label: str, tensor: Tensor, others: Sequence[Tensor] = ()) -> None:
        """Follow ``tensor``, the batch's labels at the path ``label``, and ``others``, of the same shape."""
        places = torch.arange(tensor.numel(), device=tensor.device).reshape(tensor.shape)
        self._record(tensor, Trace(label, places, [other.clone() for other in others], whole=True))

    def get(self, value: Any) -> Trace | None:
        """Return the trace of ``value``, or None if it is not a tensor computed from labels."""
        found = self._traces.get(id(value))
        return None if found is None else found[1]

    def knows(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether a tensor computed from labels is among a call's arguments, also nested. Called for each torch call."""
        traces = self._traces
        if not traces:
            return False
        for value in args:
            if id(value) in traces or (isinstance(value, _NESTED) and self._known((value,))):
                return True
        return bool(kwargs) and self._known(kwargs.values())

    def _known(self, values: Iterable[Any]) -> bool:
        traces = self._traces
        for value in values:
            if id(value) in traces:
                return True
            if isinstance(value, _NESTED) and self._known(value.values() if isinstance(value, dict) else value):
                return True
        return False

    def clear(self) -> None:
        self._traces.clear()
        self.strays.clear()
        for tensor in self._held:
            release(tensor)
        self._held.clear()

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Update the traces after a torch call, and return its output."""
        if not self._traces:
            return output
        used = [t for t in tensors((args, kwargs)) if id(t) in self._traces]
        if not used:
            return output
        name = name_of(func)
        if name in MOVING and args and self.get(args[0]) is not None:
            return self._moved(name, func, args, kwargs, output)
        if name in JOINING:
            self._joined(func, args, kwargs, output)
        elif name in ("setitem", "copy"):
            self._written(func, args, kwargs)
        elif name == "one_hot":
            self._coded(func, args, kwargs, output)
        elif name in POINTWISE and not self._meets(args, kwargs):
            self._computed(name, func, args, kwargs, output)
        else:
            self._strayed(name, used, args, kwargs, output)
        return output

    def _record(self, tensor: Tensor, trace: Trace) -> None:
        if self.by_class and id(tensor) not in self._traces and hold(tensor):
            self._held.append(tensor)
        self.foreign |= type(tensor) not in (Tensor, Followed)
        self._traces[id(tensor)] = (tensor, trace)

    def _moved(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        trace = self._traces[id(args[0])][1]
        # a view as another dtype
        if any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values())):
            return output
        if name == "iter":
            output = list(output)
        if not isinstance(output, Tensor | list | tuple):
            return output
        rest, constant = args[1:], kwargs
        if name == "pad" and kwargs.get("mode", rest[1] if len(rest) > 1 else "constant") == "constant":
            rest, constant = rest[:1], {**kwargs, "value": -1}
            constant.pop("mode", None)
        places = func(trace.places, *rest, **constant)
        others = [func(other, *args[1:], **kwargs) for other in trace.others]
        if isinstance(output, Tensor):
            self._record(output, Trace(trace.label, places, others, trace.selects, trace.kind))
            return output
        made = [list(places), *(list(other) for other in others)]
        for part, place, *rest in zip(output, *made, strict=True):
            self._record(part, Trace(trace.label, place, list(rest), trace.selects, trace.kind))
        return iter(output) if name == "iter" else output

    def _joined(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        listed = args[0] if args else kwargs["tensors"]
        rest, options = args[1:], {key: value for key, value in kwargs.items() if key not in ("tensors", "out")}
        traces = [self.get(t) for t in listed]
        first = next(trace for trace in traces if trace is not None)

        def places(t: Tensor) -> Tensor:
            trace = self.get(t)
            return torch.full(t.shape, -1, device=t.device) if trace is None else trace.places

        others = [
            func(
                [t if trace is None else trace.others[k] for t, trace in zip(listed, traces, strict=True)],
                *rest,
                **options,
            )
            for k in range(len(first.others))
        ]
        joined = func([places(t) for t in listed], *rest, **options)
        kind = max(trace.kind for trace in traces if trace is not None)
        self._record(output, Trace(first.label, joined, others, first.selects, kind))

    def _written(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Follow ``target[index] = value`` or ``target.copy_(value)``, which has been done."""
        target, *index, value = args
        of_value = self.get(value)
        if self.get(target) is None:
            if of_value is None:  # only the index comes from labels
                return
            self._begin_at(target, of_value)
        trace = self._traces[id(target)][1]
        trace.whole = False
        if of_value is not None:
            func(trace.places, *index, of_value.places, **kwargs)
        mask = self.get(index[0]) if index and getattr(index[0], "dtype", None) == torch.bool else None
        for k, other in enumerate(trace.others):
            if mask is not None and not isinstance(value, Tensor):  # labels[labels == 3] = -100
                func(other, mask.others[k], value, **kwargs)
            else:
                func(other, *index, value if of_value is None else of_value.others[k], **kwargs)

    def _begin_at(self, target: Tensor, like: Trace) -> None:
        """Follow a tensor into which labels are written, and the base of which it is a view."""
        root = target if target._base is None else target._base
        if self.get(root) is None:
            nowhere = torch.full_like(root, -1, dtype=torch.long)
            self._record(root, Trace(like.label, nowhere, [root.clone() for _ in like.others]))
        of_root = self._traces[id(root)][1]
        if target is not root:

            def view(t: Tensor) -> Tensor:
                return t.as_strided(target.shape, target.stride(), target.storage_offset() - root.storage_offset())

            self._record(target, Trace(like.label, view(of_root.places), [view(other) for other in of_root.others]))

    def _coded(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        trace = self.get(args[0] if args else kwargs.get("tensor"))
        if trace is not None:
            places = trace.places.unsqueeze(-1).expand(output.shape)
            self._record(output, Trace(trace.label, places, [func(o, output.shape[-1]) for o in trace.others]))

    def _computed(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        traces = [trace for trace in map(self.get, tensors((args, kwargs))) if trace is not None]
        if name == "where":  # the selected values before the condition
            traces.sort(key=lambda trace: trace.selects)
        first = traces[0]
        if name in CASTING and self.get(args[0] if args else None) is None:  # a cast to the type of labels
            return
        data = [t for t in tensors((args, kwargs)) if t.ndim and self.get(t) is None]
        # a confusion matrix counts ``classes * labels + predictions``
        self.compared |= name in ("eq", "ne") and bool(data)
        self.compared |= name == "add" and any(
            t.numel() == first.places.numel() and not t.is_floating_point() for t in data
        )
        if data and all(trace.selects for trace in traces) and name not in COMPARING:  # labels only select values
            return
        in_place = any(output is t for t in tensors(args))
        if not isinstance(output, Tensor) or (in_place and self.get(output) is None):
            return
        try:
            places = first.places.to(output.device).broadcast_to(output.shape)
        except RuntimeError:  # a reduction, or labels with fewer entries
            return

        def other(k: int) -> Callable[[Tensor], Tensor]:
            return lambda t: t if (trace := self.get(t)) is None else trace.others[k]

        count = len(first.others)
        others = [
            func(*_replaced(args, other(k)), **{key: _replaced(v, other(k)) for key, v in kwargs.items()})
            for k in range(count)
        ]
        selects = name in COMPARING or all(trace.selects for trace in traces)
        if not in_place:
            self._record(output, Trace(first.label, places, others, selects, _kind(name, traces, data)))

    def _meets(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a weight or an output of the network is among the arguments."""
        return any(t.requires_grad for t in tensors((args, kwargs)) if id(t) not in self._traces)

    def _strayed(
        self, name: str, used: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Record where labels are combined with the network's output. An embedding of labels is an input, not a loss."""
        traces = [trace for t in used if (trace := self.get(t)) is not None and not trace.selects]
        computed = any(t.grad_fn is not None for t in tensors((args, kwargs)))
        if traces and computed and name != "embedding" and isinstance(output, Tensor) and output.grad_fn is not None:
            self.strays.append(Stray(name, traces[0].label, output))
