"""Tensors in host memory: copied there in parallel with the computation, and back before they are needed."""

import weakref
from threading import RLock
from typing import Any, ClassVar

import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_eff.memory._hosting.copiers import Copier, CUDACopier, DirectCopier, Pool

_MOST_OF_BASE = (
    4  # the base of a view is copied if it has at most this many times the elements, since siblings share it
)
_MOST_OF_GAPS = (
    1.25  # the memory from its first to its last element is copied if it is at most this many times as large
)


class _Unit:
    """A unit of copying: a range of a storage's memory, or the packed elements of one tensor.

    Attributes:
        waiting: the number of tickets whose tensor has not been fetched.
        over: whether all tickets are gone and the host memory is released.
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
        self.over = True  # until there is memory to release
        self.store, self.key, self.device = store, key, source.device
        self.nbytes, self.waiting = source.numel() * source.element_size(), 0
        self._back: Tensor | None = None
        self._arrived, self._waited = None, False
        self._copier, self._pinned = store._copier(source.device), store.pin_memory and source.device.type == "cuda"
        # while this is held, no other storage has this address
        self._storage = StorageWeakRef(source.untyped_storage())
        self._buffer, self._left = store._pool.take(self.nbytes, pinned=self._pinned)
        self._host = self._buffer[: self.nbytes].view(source.dtype)
        self._left = self._copier.to_host(source, self._host.view(source.shape), self._left)
        store.bytes_to_host += self.nbytes
        store.bytes_on_host += self.nbytes
        store.peak_bytes_on_host = max(store.peak_bytes_on_host, store.bytes_on_host)
        self.over = False

    def bring(self) -> Tensor:
        """Start the copy back, unless it has started, and return its flat target."""
        if self._back is None:
            self._back = torch.empty(self._host.shape, dtype=self._host.dtype, device=self.device)
            # the host memory may be reused after this copy
            self._left = self._arrived = self._copier.to_device(self._host, self._back, self._left)
            self._waited = False
            self.store.bytes_to_device += self.nbytes
            self.store.bytes_on_device += self.nbytes
        return self._back

    def fetch(self) -> Tensor:
        """Return the flat copy on the device, for later computation."""
        back = self.bring()
        self._wait(back)
        return back

    def let_go(self) -> None:
        """Release the copy on the device; its users keep it alive."""
        if self._back is not None:
            if not self._waited:
                self._wait(self._back)  # otherwise its memory could be reused while it is written to
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
    """Stands for a tensor in host memory; without it, the host memory is reused."""

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
        """Start copying the tensor back, without waiting."""
        if self._unit is not None:
            with self._unit.store._lock:
                self._unit.bring()

    def get(self) -> Tensor:
        """Return the tensor on its device, with its values, shape and strides, and without a graph.

        Views of one tensor return as views of one copy. Only lazily conjugated or negated tensors, and expanded ones of few
        elements far apart, return with other strides. It may be called several times.

        Raises:
            RuntimeError: if the tensor, or one that shares its memory, was changed in place after :meth:`HostStore.put`.
        """
        if self._counter is not None and self._counter._version != self._expected:
            shape, dtype = list(self._view[0]), self._counter.dtype
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a"
                f" tensor of shape {shape} and {dtype} is at version {self._counter._version}; expected version"
                f" {self._expected} instead. Plain training would fail in the same way. Change a copy of it"
                " instead."
            )
        unit = self._unit
        if unit is None:
            assert self._empty is not None, "a tensor without elements is stored directly"
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
    """Host memory for tensors that are needed later, in about the reverse order, as in a backward pass.

    On CUDA, copies run on their own streams, to and from pinned buffers that later steps reuse. A tensor's device memory is
    free as soon as it is copied and no other code holds it. On other devices, copies are synchronous. A CPU gains nothing,
    and a warning says so once.

    The unit of copying is a range of memory: that of the tensor's base, if the tensor is at least a quarter of it, or the
    tensor's own. Another tensor within the same range and of the same version is not copied again.

    Attributes:
        bytes_to_host: the bytes copied to the host since the start.
        bytes_to_device: the bytes copied back since the start.
        bytes_on_host: the bytes in host memory now, each range counted once.
        peak_bytes_on_host: the most bytes in host memory; the caller may reset it.
        bytes_on_device: the bytes that were brought back and are not used yet.

    Args:
        depth: the number of earlier copies that start back together with the one that is fetched, >= 0.
        pin_memory: whether to pin the host memory. Without it, copies from CUDA are slower, and block the computation.
        copier: the copier for any device; None chooses by the device.
    """

    outlives_graph: ClassVar[bool] = True  # the owner of a ticket does not own this store's memory

    def __init__(self, *, depth: int = 1, pin_memory: bool = True, copier: Copier | None = None) -> None:
        self.depth = depth
        self.pin_memory = pin_memory
        self.bytes_to_host = self.bytes_to_device = 0
        self.bytes_on_host = self.peak_bytes_on_host = self.bytes_on_device = 0
        self._given = copier
        self._copiers: dict[torch.device, Copier] = {}
        self._pool = Pool()
        self._units: dict[tuple[Any, ...], weakref.ref[_Unit]] = {}  # in order of creation
        self._lock = RLock()  # a backward pass may run on other threads, and release units there
        self._warned = False

    @property
    def seconds_waited(self) -> float:
        """The seconds for which computation has waited for copies, as far as known."""
        copiers = [self._given] if self._given is not None else list(self._copiers.values())
        return sum(copier.waited() for copier in copiers)

    def put(self, tensor: Tensor) -> Ticket:
        """Start copying ``tensor`` to host memory, and hold nothing of it on its device.

        Args:
            tensor: a strided tensor of torch's own class, of any shape, strides and dtype.

        Raises:
            TypeError: if it is sparse or of another class.
        """
        if not can_leave(tensor):
            raise TypeError(
                f"HostStore.put: got a {type(tensor).__name__} of layout {tensor.layout}; expected a strided torch.Tensor"
                " or Parameter. Keep it, or put its plain tensors instead."
            )
        if not self._warned and tensor.device.type == "cpu":
            self._warned = True
            rank_zero_warn(
                "Offloading: nothing is gained on a CPU, because activations are in host memory already. Remove it.",
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
                self._units.pop(key, None)  # so that it becomes the last one
                self._units[key] = weakref.ref(unit)
            unit.waiting += 1
            return Ticket(tensor, unit, int(tensor.storage_offset()) - begin, packed=packed, counted=counted)

    def release(self) -> None:
        """Free the host memory; buffers in use follow when they are no longer used."""
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
        """Start copying back the ``depth`` units before ``unit`` that are still needed."""
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
    """Return whether ``tensor`` is strided and of torch's own class, so that copying its memory is enough."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.is_quantized


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _version_counter(tensor: Tensor) -> tuple[Tensor | None, int]:
    """Return an empty tensor whose ``_version`` follows that of ``tensor``, and its current version."""
    if tensor.is_inference():  # it never has one
        return None, -1
    probe = tensor.detach()
    probe.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return probe, probe._version


def _span(tensor: Tensor) -> int:
    """Return the number of elements of the storage from the first to the last of ``tensor``."""
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _stretch(tensor: Tensor) -> tuple[int, int | None]:
    """Return where in the storage the copied memory of ``tensor`` begins, and its length, in elements.

    The length is None if the elements are so far apart that they are packed.
    """
    begin, span, size = int(tensor.storage_offset()), _span(tensor), tensor.numel()
    base = tensor._base
    if base is not None and base.dtype == tensor.dtype and base.numel() > 0:
        first, length = int(base.storage_offset()), _span(base)
        if first <= begin and begin + span <= first + length and length <= _MOST_OF_BASE * size:
            return first, length
    return begin, span if span <= _MOST_OF_GAPS * size else None
