"""The context of a block's call besides its arguments, recorded when it runs and restored when it runs again."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

RandomState = tuple[Tensor, Tensor | None]


def random_state(device: torch.device) -> RandomState:
    """Return the state of torch's global generators: the CPU's, and that of ``device`` if it has its own."""
    if device.type in ("cpu", "meta"):
        return torch.get_rng_state(), None
    module = torch.get_device_module(device)
    return torch.get_rng_state(), module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)


def set_random_state(device: torch.device, state: RandomState) -> None:
    """Restore the result of :func:`random_state` for ``device``."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        module = torch.get_device_module(device)
        module.set_rng_state(*((state[1],) if device.type == "mps" else (state[1], device)))


class Surroundings:
    """Random state, autocast, default device and training flags around one call of a block.

    Other torch function and dispatch modes are not entered again. Most of them observe or collect, and would see the call
    twice; a mode that also holds the loss would keep the whole graph in memory. A mode that affects results has a method
    ``again``, which returns the context to enter when the block runs again.

    Args:
        modules: the block's modules.
        device: the device of its hidden state.
    """

    __slots__ = ("autocast", "cache", "defaults", "device", "flags", "random")

    def __init__(self, modules: list[nn.Module], device: torch.device) -> None:
        self.device = device
        self.random = random_state(device)
        types = ("cpu",) if device.type == "cpu" else ("cpu", device.type)
        self.autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in types
            if torch.amp.is_autocast_available(kind)
        ]
        self.cache = torch.is_autocast_cache_enabled()
        modes = _get_current_function_mode_stack()
        self.defaults: list[Any] = [mode.device for mode in modes if isinstance(mode, DeviceContext)]
        self.defaults += [mode.again() for mode in modes if hasattr(mode, "again")]
        self.flags = [m.training for m in modules]

    @contextmanager
    def again(self, modules: list[nn.Module]) -> Iterator[None]:
        """Restore the context, with autograd on. The caller must restore the random state afterwards."""
        flags = [m.training for m in modules]
        with ExitStack() as scope:
            scope.enter_context(torch.enable_grad())
            for device in self.defaults:
                scope.enter_context(device)
            for kind, enabled, dtype in self.autocast:
                scope.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self.cache))
            if flags != self.flags:
                _set_flags(modules, self.flags)
                scope.callback(_set_flags, modules, flags)
            set_random_state(self.device, self.random)
            yield


def _set_flags(modules: list[nn.Module], flags: list[bool]) -> None:
    for m, flag in zip(modules, flags, strict=True):
        m.training = flag


Owner = dict[str, Tensor | None]
Entry = tuple[Owner, str, Tensor | None, Tensor | None]


class Buffers:
    """Find the buffers that a block's forward pass changes, so that a second run begins and ends with the right values.

    They are found at the first call, by value, since BatchNorm changes its statistics without a version bump. The buffers of
    normalization layers always count as changing. A buffer that a later call changes first is found by its version; that call
    runs again from the changed value.

    Args:
        modules: the block's modules.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self._owners: list[Owner] = [m._buffers for m in modules if m._buffers]
        norms = [id(m._buffers) for m in modules if isinstance(m, _NormBase)]
        self._changing = {(i, name) for i, o in enumerate(self._owners) if id(o) in norms for name in o}
        self._learnt = False

    def before(self) -> list[tuple[int, str, Tensor, int, Tensor | None]]:
        """Record the buffers; call it before the block runs, and pass the result to :meth:`changed`."""
        return [
            (i, name, value, value._version, _copy(value) if not self._learnt or (i, name) in self._changing else None)
            for i, owner in enumerate(self._owners)
            for name, value in owner.items()
            if value is not None
        ]

    def changed(self, before: list[tuple[int, str, Tensor, int, Tensor | None]]) -> list[Entry]:
        """Return the buffers that the block changed, each with its earlier value; call it after the block has run."""
        found: list[Entry] = []
        for i, name, value, version, copy in before:
            now = self._owners[i].get(name)
            moved = now is not value or value._version != version
            if not self._learnt and copy is not None:
                moved |= not torch.equal(copy, value)
            if moved:
                self._changing.add((i, name))
            if moved or (i, name) in self._changing:
                found.append((self._owners[i], name, value, copy))
        self._learnt = True
        return found


@contextmanager
def rewound(entries: list[Entry]) -> Iterator[None]:
    """Set the buffers to their values before the call that changed them, then back, without a version bump."""
    now = [(owner, name, owner.get(name)) for owner, name, _, _ in entries]
    values = [None if value is None else _copy(value) for _, _, value in now]
    _fill(entries)
    try:
        yield
    finally:
        _fill([(*entry, value) for entry, value in zip(now, values, strict=True)])


def _fill(entries: list[Any]) -> None:
    for owner, name, buffer, value in entries:
        owner[name] = buffer
        if buffer is not None and value is not None:
            buffer.data.copy_(value)


def _copy(value: Tensor) -> Tensor:
    return value.detach().clone()
