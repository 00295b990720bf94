"""Which float32 buffers make a step fail in bfloat16: tried by running the step again with some of them cast."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_eff._core import rng
from lightning_eff._core._lightning.names import is_lightnings

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
Buffers = Mapping[str, tuple[nn.Module, str]]


def step_of(traceback: TracebackType | None) -> Callable[[], Any] | None:
    """The step in which an error was raised, to be run again; None where no strategy's step is on the way."""
    while traceback is not None:
        frame = traceback.tb_frame
        name, values = frame.f_code.co_name, frame.f_locals
        strategy = values.get("self")
        if name in _STEPS and any(is_lightnings(cls) for cls in type(strategy).__mro__) and "args" in values:
            module = getattr(strategy, "lightning_module", None)
            if module is not None:
                return lambda: getattr(module, name)(*values["args"], **values.get("kwargs", {}))
        traceback = traceback.tb_next
    return None


def to_be_cast(step: Callable[[], Any], root: nn.Module, buffers: Buffers) -> list[str] | None:
    """The fewest of ``buffers`` with which the step runs once they are bfloat16; None if it fails with all of them cast too.

    Args:
        step: the step that failed.
        root: the module, whose other buffers stay as they are.
        buffers: by path, the module that holds it and its name there.
    """
    needed = list(buffers)
    if not _runs(step, root, buffers, needed):
        return None
    for path in list(buffers):
        without = [other for other in needed if other != path]
        if _runs(step, root, buffers, without):
            needed = without
    return needed


def _runs(step: Callable[[], Any], root: nn.Module, buffers: Buffers, paths: Collection[str]) -> bool:
    with _cast(buffers, paths), _unmoved(root), rng.fork(), torch.no_grad():
        try:
            step()
        except Exception:  # whatever it is, these buffers are no remedy
            return False
    return True


@contextmanager
def _cast(buffers: Buffers, paths: Collection[str]) -> Iterator[None]:
    before = [(owner, name, owner._buffers[name]) for owner, name in (buffers[path] for path in paths)]
    try:
        for owner, name, value in before:
            owner._buffers[name] = None if value is None else value.to(torch.bfloat16)
        yield
    finally:
        for owner, name, value in before:
            owner._buffers[name] = value


@contextmanager
def _unmoved(root: nn.Module) -> Iterator[None]:
    held: list[tuple[Tensor, Tensor]] = [(b, b.detach().clone()) for b in root.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in held:
                buffer.copy_(value)
