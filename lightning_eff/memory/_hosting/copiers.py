"""Copies of device memory to the host and back, in parallel with the computation, and reusable host memory."""

import time
from collections import defaultdict, deque
from typing import Any, Protocol

import torch
from torch import Tensor


class Copier(Protocol):
    """Copies device memory to the host and back; an event marks the end of a copy, None a finished one."""

    def to_host(self, source: Tensor, host: Tensor, after: Any) -> Any:
        """Start copying ``source`` into ``host`` after the event ``after``; return the event of its end."""
        ...

    def to_device(self, host: Tensor, target: Tensor, after: Any) -> Any:
        """Start copying ``host`` into ``target`` after the event ``after``; return the event of its end."""
        ...

    def wait(self, event: Any, target: Tensor) -> None:
        """Let later computation on the device wait for ``event``, the end of the copy into ``target``."""
        ...

    def settle(self) -> None:
        """Release the memory held for running copies."""
        ...

    def waited(self) -> float:
        """Return the seconds for which computation has waited for copies, as far as known."""
        ...


class DirectCopier:
    """Copies synchronously, for the CPU and for devices without CUDA streams."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def to_host(self, source: Tensor, host: Tensor, after: Any) -> None:
        began = time.perf_counter()
        host.copy_(source)
        self._seconds += time.perf_counter() - began

    def to_device(self, host: Tensor, target: Tensor, after: Any) -> None:
        began = time.perf_counter()
        target.copy_(host)
        self._seconds += time.perf_counter() - began

    def wait(self, event: Any, target: Tensor) -> None:
        pass

    def settle(self) -> None:
        pass

    def waited(self) -> float:
        return self._seconds


class CUDACopier:
    """Copies on two streams, one per direction, between a CUDA device and pinned host memory.

    Memory is released in the order of the computing stream, so what is held does not depend on how far the host is ahead. The
    sources of the last few copies to the host are held until the computing stream has waited for them.

    Args:
        device: the CUDA device.
        max_pending: the number of running copies to the host, >= 1, before computation waits for the oldest.
    """

    def __init__(self, device: torch.device, *, max_pending: int = 4) -> None:
        self._device, self._max_pending = device, max_pending
        self._out, self._home = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._pending: deque[tuple[torch.cuda.Stream, torch.cuda.Event, Tensor]] = deque()
        self._pauses: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._seconds = 0.0

    def to_host(self, source: Tensor, host: Tensor, after: Any) -> torch.cuda.Event:
        stream = torch.cuda.current_stream(self._device)
        self._out.wait_stream(stream)
        event = self._copy(self._out, source, host, after)
        self._pending.append((stream, event, source))
        self._let_go(self._max_pending)
        return event

    def to_device(self, host: Tensor, target: Tensor, after: Any) -> torch.cuda.Event:
        self._let_go(0)
        # queued work of the computing stream may still use the target's memory
        self._home.wait_stream(torch.cuda.current_stream(self._device))
        return self._copy(self._home, host, target, after)

    def _copy(self, stream: torch.cuda.Stream, source: Tensor, target: Tensor, after: Any) -> torch.cuda.Event:
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=source.is_pinned() or target.is_pinned())
            event = torch.cuda.Event()
            event.record(stream)
        return event

    def _let_go(self, most: int) -> None:
        """Hold the sources of at most ``most`` copies."""
        while len(self._pending) > most:
            stream, event, _ = self._pending.popleft()
            self._pause(stream, event)

    def wait(self, event: torch.cuda.Event, target: Tensor) -> None:
        stream = torch.cuda.current_stream(self._device)
        self._pause(stream, event)
        target.record_stream(stream)  # needed if the copy began on another stream, which owns the memory then

    def settle(self) -> None:
        self._let_go(0)

    def _pause(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(stream)
        stream.wait_event(event)
        end.record(stream)
        self._pauses.append((begin, end))

    def waited(self) -> float:
        while self._pauses and self._pauses[0][1].query():
            begin, end = self._pauses.popleft()
            self._seconds += begin.elapsed_time(end) / 1000
        return self._seconds


class Pool:
    """Reusable host buffers, sized in powers of two, as torch's allocator of pinned memory rounds them up."""

    def __init__(self) -> None:
        self._free: defaultdict[tuple[int, bool], deque[tuple[Tensor, Any]]] = defaultdict(deque)
        self._closed = False
        self.num_bytes = 0

    def take(self, num_bytes: int, *, pinned: bool) -> tuple[Tensor, Any]:
        """Return a buffer of at least ``num_bytes`` bytes, and the event before which it must not be written to."""
        self._closed = False
        size = max(512, 1 << (num_bytes - 1).bit_length())
        try:
            return self._free[size, pinned].pop()
        except IndexError:
            self.num_bytes += size
            return torch.empty(size, dtype=torch.uint8, pin_memory=pinned), None

    def give(self, buffer: Tensor, event: Any, *, pinned: bool) -> None:
        if self._closed:
            self.num_bytes -= buffer.numel()
        else:
            self._free[buffer.numel(), pinned].append((buffer, event))

    def close(self) -> None:
        """Drop all free buffers, and those that return before another is taken."""
        self._closed = True
        self.num_bytes -= sum(size * len(free) for (size, _), free in self._free.items())
        self._free.clear()
