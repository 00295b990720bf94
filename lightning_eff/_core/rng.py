"""Random state: saved as plain containers, and keyed generators that need no saved state.

Techniques draw from :func:`keyed_generator`. The numbers follow from the run's seed and a key such as the step, so a
resumed run draws the same numbers as an uninterrupted one. The global stream stays that of plain Lightning.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """Return the state of Python's, NumPy's and torch's global generators, loadable with ``weights_only=True``."""
    return for_checkpoint(look())


def for_checkpoint(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state from :func:`look` as :func:`capture` returns it."""
    version, internal, cached = state["python"]
    numbers = torch.from_numpy(np.array(internal, dtype=np.int64))  # a checkpoint then loads 1 object instead of 625
    return {**state, "python": [version, numbers, cached]}


def look() -> dict[str, Any]:
    """Return the state of the generators for :func:`restore`, in a fifth of the time of :func:`capture`."""
    name, keys, position, has_gauss, gauss = cast("tuple[Any, ...]", np.random.get_state(legacy=True))
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [str(name), torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(gauss)],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
        state["cuda_device"] = torch.cuda.current_device()
    return state


def restore(state: dict[str, Any]) -> None:
    """Set the global generators to a state from :func:`capture`, also in a process with another current GPU."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal.tolist() if isinstance(internal, torch.Tensor) else internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        for device, cuda in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(cuda, device)
        if "cuda_device" in state:
            torch.cuda.set_rng_state(state["cuda"][state["cuda_device"]])


@contextmanager
def fork(state: dict[str, Any] | None = None) -> Iterator[None]:
    """Restore the global generators on exit; start inside from ``state`` if given."""
    before = look()
    try:
        if state is not None:
            restore(state)
        yield
    finally:
        restore(before)


def keyed_generator(seed: int, *key: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator whose numbers depend only on ``seed``, ``key`` and the type of device.

    Args:
        seed: the run's seed, the same on all ranks.
        key: identifies this draw, for example the technique's name, the step and the rank.
        device: where the numbers are drawn.
    """
    return torch.Generator(device).manual_seed(_number(seed, *key))


def _number(seed: int, *key: int | str) -> int:
    digest = hashlib.blake2b(repr((seed, *key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=False) >> 1


@contextmanager
def keyed(seed: int, *key: int | str) -> Iterator[None]:
    """Restore the global generators on exit; inside, their numbers depend only on ``seed`` and ``key``."""
    with fork():
        set_keyed(seed, *key)
        yield


def set_keyed(seed: int, *key: int | str) -> None:
    """Make the numbers of the global generators depend only on ``seed`` and ``key``, within :func:`fork`."""
    number = _number(seed, *key)
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)
