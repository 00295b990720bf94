"""Tensors that wait in host memory: copied there beside the computing, and back before they are needed."""

import weakref
from threading import RLock
from typing import Any, ClassVar

import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_eff.memory._hosting.copiers import Copier, CUDACopier, DirectCopier, Pool

_MOST_OF_BASE = 4  # of what a tensor is a view of, so many times its elements are copied: its siblings' are among them
_MOST_OF_GAPS = 1.25  # of the memory from its first to its last element


class _Unit:
    """What is copied as one: a stretch of a storage's memory, or the elements of one tensor, packed.

    Attributes:
        waiting: tickets for it whose tensor has not been fetched yet.
        over: nobody holds a ticket any more, and the host memory is another's.
    """

    __slots__ = (
        "__weakref__",
        "_arrived",
        "_back",
        "_buffer",
        "_copier",
        "_host",
        "_left",
        "_pinned",
        "_storage",
        "_waited",
        "device",
        "key",
        "nbytes",
        "over",
        "store",
        "waiting",
    )

    def __init__(self, store: "HostStore", key: tuple[Any, ...], source: Tensor) -> None:
        self.over = True  # until there is something to give back
        self.store, self.key, self.device = store, key, source.device
        self.nbytes, self.waiting = source.numel() * source.element_size(), 0
        self._back: Tensor | None = None
        self._arrived, self._waited = None, False
        self._copier, self._pinned = store._copier(source.device), store.pin_memory and source.device.type == "cuda"
        # while it is held, no other storage has this address
        self._storage = StorageWeakRef(source.untyped_storage())
        self._buffer, self._left = store._pool.take(self.nbytes, pinned=self._pinned)
        self._host = self._buffer[: self.nbytes].view(source.dtype)
        self._left = self._copier.to_host(source, self._host.view(source.shape), self._left)
        store.bytes_to_host += self.nbytes
        store.bytes_on_host += self.nbytes
        store.peak_bytes_on_host = max(store.peak_bytes_on_host, store.bytes_on_host)
        self.over = False

    def bring(self) -> Tensor:
        """Begin the way back, unless it has begun; where the copy, a flat tensor, will be."""
        if self._back is None:
            self._back = torch.empty(self._host.shape, dtype=self._host.dtype, device=self.device)
            # the host memory may be written to again after this copy
            self._left = self._arrived = self._copier.to_device(self._host, self._back, self._left)
            self._waited = False
            self.store.bytes_to_device += self.nbytes
            self.store.bytes_on_device += self.nbytes
        return self._back

    def fetch(self) -> Tensor:
        """The flat copy on the device, for what is computed from now on."""
        back = self.bring()
        self._wait(back)
        return back

    def let_go(self) -> None:
        """Hold the copy on the device no longer; whoever uses it does."""
        if self._back is not None:
            if not self._waited:
                self._wait(self._back)  # else its memory would be given to others while it is written to
            self._back = None
            self.store.bytes_on_device -= self.nbytes

    def _wait(self, back: Tensor) -> None:
        if self._arrived is not None:
            self._copier.wait(self._arrived, back)
        self._waited = True

    def __del__(self) -> None:
        if self.over:
            return
        store = self.store
        with store._lock:
            self.over = True
            self.let_go()
            held = store._units.get(self.key)
            if held is not None and held() in (None, self):
                del store._units[self.key]
            store.bytes_on_host -= self.nbytes
            store._pool.give(self._buffer, self._left, pinned=self._pinned)


class Ticket:
    """Stands for a tensor that waits in host memory; without it, the host memory is used for others."""

    __slots__ = ("_counter", "_empty", "_expected", "_fetched", "_packed", "_unit", "_view", "nbytes")

    def __init__(self, tensor: Tensor, unit: _Unit | None, offset: int, *, packed: bool, counted: Tensor) -> None:
        self.nbytes = tensor.numel() * tensor.element_size()
        self._unit, self._packed, self._fetched = unit, packed, False
        self._view = (tuple(tensor.shape), tensor.stride(), offset)
        self._counter, self._expected = _version_counter(counted)
        self._empty = (
            torch.empty_strided(*self._view[:2], dtype=tensor.dtype, device=tensor.device) if unit is None else None
        )

    def prefetch(self) -> None:
        """Begin to bring the tensor back, without waiting."""
        if self._unit is not None:
            with self._unit.store._lock:
                self._unit.bring()

    def get(self) -> Tensor:
        """The tensor, on its device, with its values, shape and strides, and without a graph.

        Views of one tensor come back as views of one copy. Only lazily conjugated or negated ones, and expanded ones of few
        elements far apart, come back with strides of their own. It may be called again.

        Raises:
            RuntimeError: if the tensor, or one that shares its memory, was changed in place after :meth:`HostStore.put`.
        """
        if self._counter is not None and self._counter._version != self._expected:
            shape, dtype = list(self._view[0]), self._counter.dtype
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a"
                f" tensor of shape {shape} and {dtype} is at version {self._counter._version}; expected version"
                f" {self._expected} instead. It was copied to host memory as it was before; plain training would fail"
                " in the same way. Change a copy of it instead."
            )
        unit = self._unit
        if unit is None:
            assert self._empty is not None, "a tensor without elements is kept itself"
            return self._empty
        with torch.no_grad(), unit.store._lock:
            flat = unit.fetch()
            if not self._fetched:
                self._fetched = True
                unit.waiting -= 1
            unit.store._prefetch_before(unit)
            if unit.waiting <= 0:
                unit.let_go()
            size, stride, offset = self._view
            if not self._packed:
                return flat.as_strided(size, stride, offset)
            if any(step == 0 and n > 1 for n, step in zip(size, stride, strict=True)):
                return flat.view(size)
            return torch.empty_strided(size, stride, dtype=flat.dtype, device=flat.device).copy_(flat.view(size))


class HostStore:
    """Host memory for tensors that are needed later, in about the reverse order, as a backward pass needs them.

    On CUDA the copies run on streams of their own, out of and into pinned buffers that later steps use again; a tensor's
    device memory is free for others as soon as it is copied and nobody else holds it. On other devices they are made at
    once. On the CPU nothing is gained, which is said once.

    What is copied is a stretch of memory, and no tensor within it, of the same version, is copied again: the memory of what
    the tensor is a view of, where the tensor is at least a quarter of it, or the tensor's own.

    Attributes:
        bytes_to_host: bytes copied to the host since the start.
        bytes_to_device: bytes copied back since the start.
        bytes_on_host: bytes that wait in host memory now, each stretch counted once.
        peak_bytes_on_host: the most that has waited there; the caller may set it back.
        bytes_on_device: bytes that were brought back and wait for use now.

    Args:
        depth: how many of the copies made before the one that is fetched begin their way back with it, >= 0.
        pin_memory: pin the host memory; without it copies from CUDA are slower, and stop the computing.
        copier: how to copy, whatever the device; None chooses by the device.
    """

    outlives_graph: ClassVar[bool] = True  # what holds a ticket does not hold the memory that is kept for others

    def __init__(self, *, depth: int = 1, pin_memory: bool = True, copier: Copier | None = None) -> None:
        self.depth = depth
        self.pin_memory = pin_memory
        self.bytes_to_host = self.bytes_to_device = 0
        self.bytes_on_host = self.peak_bytes_on_host = self.bytes_on_device = 0
        self._given = copier
        self._copiers: dict[torch.device, Copier] = {}
        self._pool = Pool()
        self._units: dict[tuple[Any, ...], weakref.ref[_Unit]] = {}  # in the order of their making
        self._lock = RLock()  # a backward pass may run on threads of its own, and end units there
        self._told = False

    @property
    def pool_bytes(self) -> int:
        """Bytes of host memory taken, in use or waiting for use again."""
        return self._pool.num_bytes

    @property
    def seconds_waited(self) -> float:
        """Seconds for which computing has stood still for copies since the start, as far as is known by now."""
        copiers = [self._given] if self._given is not None else list(self._copiers.values())
        return sum(copier.waited() for copier in copiers)

    def put(self, tensor: Tensor) -> Ticket:
        """Begin to copy ``tensor`` to host memory, and keep nothing of it on its device.

        Args:
            tensor: of any shape, strides and dtype, strided and of torch's own class.

        Raises:
            TypeError: if it is sparse or of a class of its own, whose memory is not its own to copy.
        """
        if not can_leave(tensor):
            raise TypeError(
                f"HostStore.put: got a {type(tensor).__name__} of layout {tensor.layout}; expected a strided torch.Tensor"
                " or Parameter. Keep it, or put the plain tensors that it consists of."
            )
        if not self._told and tensor.device.type == "cpu":
            self._told = True
            rank_zero_warn(
                "activations are in host memory already: nothing is gained on a CPU, where they are copied all the same.",
                category=PossibleUserWarning,
            )
        with torch.no_grad(), self._lock:
            counted = tensor
            if tensor.is_conj() or tensor.is_neg():
                tensor = tensor.resolve_conj().resolve_neg()
            if tensor.numel() == 0:
                return Ticket(tensor, None, 0, packed=False, counted=counted)
            begin, length = _stretch(tensor)
            packed = length is None
            place = (begin, tuple(tensor.shape), tensor.stride()) if packed else (begin, length)
            key = (tensor.untyped_storage()._cdata, tensor.dtype, _version(tensor), *place)
            held = self._units.get(key)
            unit = None if held is None else held()
            if unit is None or unit.over:
                plain = tensor.detach()
                unit = _Unit(self, key, plain if length is None else plain.as_strided((length,), (1,), begin))
                self._units.pop(key, None)  # so that it is the last
                self._units[key] = weakref.ref(unit)
            unit.waiting += 1
            return Ticket(tensor, unit, int(tensor.storage_offset()) - begin, packed=packed, counted=counted)

    def release(self) -> None:
        """Give the host memory back to the system, and what still waits in it as soon as that is over."""
        with self._lock:
            for copier in self._copiers.values():
                copier.settle()
            self._pool.close()

    def _copier(self, device: torch.device) -> Copier:
        if self._given is not None:
            return self._given
        if device not in self._copiers:
            self._copiers[device] = CUDACopier(device) if device.type == "cuda" else DirectCopier()
        return self._copiers[device]

    def _prefetch_before(self, unit: _Unit) -> None:
        """Begin the way back of the ``depth`` units before ``unit`` that are waited for."""
        left, found = self.depth, False
        if not left:
            return
        for held in reversed(list(self._units.values())):
            other = held()
            if other is unit:
                found = True
            elif found and other is not None and other.waiting > 0:
                other.bring()
                left -= 1
                if not left:
                    return


def can_leave(tensor: Tensor) -> bool:
    """Whether ``tensor`` is strided and of torch's own class, so that a copy of its memory is all there is to it."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.is_quantized


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _version_counter(tensor: Tensor) -> tuple[Tensor | None, int]:
    """An empty tensor whose ``_version`` goes on with that of ``tensor`` and keeps no memory, and what it is now."""
    if tensor.is_inference():  # never has one
        return None, -1
    probe = tensor.detach()
    probe.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return probe, probe._version


def _span(tensor: Tensor) -> int:
    """How many elements of its storage lie between the first and the last of ``tensor``, both included."""
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _stretch(tensor: Tensor) -> tuple[int, int | None]:
    """Where in the storage the memory begins that is copied for ``tensor``, and its length, in elements.

    The length is None where the tensor's elements lie so far apart that they are packed.
    """
    begin, span, size = int(tensor.storage_offset()), _span(tensor), tensor.numel()
    base = tensor._base
    if base is not None and base.dtype == tensor.dtype and base.numel() > 0:
        first, length = int(base.storage_offset()), _span(base)
        if first <= begin and begin + span <= first + length and length <= _MOST_OF_BASE * size:
            return first, length
    return begin, span if span <= _MOST_OF_GAPS * size else None
