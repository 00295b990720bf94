"""Explain why a step fails in bfloat16: an unsupported operation, or float32 buffers, found by repeating the step."""

import re
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_eff._core import rng
from lightning_eff._core._lightning.names import is_lightnings

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_MIXED = re.compile(r"dtype|scalar type|same type|data type|type torch\.")
_MISSING = re.compile(
    r"bfloat16\b.*\bnot (implemented|supported)|\b(not implemented|unsupported|not supported)\b.*bfloat16", re.I
)
Buffers = Mapping[str, tuple[nn.Module, str]]


def is_mixed(error: Exception) -> bool:
    """Return whether torch reports an operation with several dtypes."""
    return isinstance(error, RuntimeError) and _MIXED.search(str(error)) is not None


def without_bfloat16(error: Exception, who: str) -> str | None:
    """Return the message if something in the step does not support bfloat16, such as NumPy; None for other errors."""
    if _MISSING.search(str(error)) is None:
        return None
    torchs = Path(torch.__file__).parent
    frames = [f for f in traceback.extract_tb(error.__traceback__) if torchs not in Path(f.filename).parents]
    at = f"line {frames[-1].lineno} of {'/'.join(Path(frames[-1].filename).parts[-2:])}"
    return (
        f"{who}: {at} gives a bfloat16 tensor to something that does not support bfloat16 ({error}). Convert it there with"
        " x.float(), or remove StochasticRoundingBF16."
    )


def mixed(error: Exception, who: str, names: tuple[str, ...], needed: list[str] | None) -> str:
    """Return the message for an operation that mixes dtypes because buffers stay float32.

    Args:
        error: torch's own error.
        who: the plugin with its arguments.
        names: the buffers that are already cast.
        needed: the result of :func:`to_be_cast`.
    """
    if needed:
        return (
            f"{who}: an operation was given different dtypes ({error}), because {', '.join(needed)}"
            f" {'stay' if len(needed) > 1 else 'stays'} float32. Write StochasticRoundingBF16("
            f"cast_buffers={(*names, *needed)!r}), with which this step runs."
        )
    return (
        f"{who}: an operation was given different dtypes ({error}), and casting the module's buffers does not help. The module"
        " creates float32 values or gets them in the batch. Convert them, as in y.to(x.dtype), or use"
        " precision='bf16-mixed'."
    )


def step_of(traceback: TracebackType | None) -> Callable[[], Any] | None:
    """Return the step that raised an error, to be repeated; None if the traceback has no step of a strategy."""
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
    """Return the fewest ``buffers`` to cast to bfloat16 for the step to run, or None if casting all of them is not enough.

    Args:
        step: the step that failed.
        root: the module, whose other buffers stay unchanged.
        buffers: by path, the module that holds the buffer and its name there.
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
        except Exception:  # with any error, these buffers are not enough
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
