"""The position in Lightning's loops at which a checkpoint is saved, and the hooks that are still due there."""

import dis
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from lightning.pytorch import Trainer

from lightning_eff._core.patches import Patches

#: Hooks after which a resumed run continues exactly, in the order of the loops.
EPOCH_START = "on_train_epoch_start"
BATCH_END = "on_train_batch_end"
VALIDATION_EPOCH_END = "on_validation_epoch_end"
VALIDATION_END = "on_validation_end"
EPOCH_END = "on_train_epoch_end"
#: A hook within validation; a resumed run validates again from the first batch.
IN_VALIDATION = "validation"
EXACT = (EPOCH_START, BATCH_END, VALIDATION_EPOCH_END, VALIDATION_END, EPOCH_END)

_CALLERS = ("_call_callback_hooks", "_call_lightning_module_hook", "_call_strategy_hook")
_LOOKS_ANYWHERE = {"locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe"}


class Position:
    """The hook of Lightning's loops in which a checkpoint is being saved.

    Attributes:
        hook: its name. Within validation, hooks other than those at its end are :data:`IN_VALIDATION`.
        called_in: the hook's own name.
        args: Lightning's arguments of the hook.
        pending: the callbacks whose hook is still due, in the trainer's order.
        module_pending: whether the module's own hook is still due.
        saver: the callback whose hook is running; None in the module's.
    """

    def __init__(
        self, hook: str, called_in: str, args: Sequence[Any], pending: list[Any], module_pending: bool, saver: Any
    ) -> None:
        self.hook, self.called_in, self.args = hook, called_in, tuple(args)
        self.pending, self.module_pending, self.saver = pending, module_pending, saver


def current_position(trainer: Trainer) -> Position | None:
    """Return the position of a fit while a checkpoint is saved; None if no hook of its loops is running.

    Lightning does not record the callback whose hook it calls. So this reads it from the stack, and only when a checkpoint is
    saved.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        values = frame.f_locals if frame.f_code.co_name in _CALLERS else {}
        if values.get("trainer") is trainer:
            return _read(trainer, frame, values)
        frame = frame.f_back
    return None


def _read(trainer: Trainer, frame: FrameType, values: dict[str, Any]) -> Position | None:
    name = str(values["hook_name"])
    if not trainer.fit_loop.epoch_progress.total.ready or trainer.sanity_checking:
        return None
    if name == "on_exception" or not (name.startswith("on_train_") or trainer.validating or trainer.training):
        return None
    callbacks: list[Any] = list(trainer.callbacks)  # pyright: ignore[reportAttributeAccessIssue]
    pending: list[Any] = []
    module_pending, saver = False, None
    if frame.f_code.co_name == "_call_callback_hooks":
        own, saver = values["callbacks"], values["callback"]
        index = next(i for i, callback in enumerate(own) if callback is saver)
        pending, module_pending = list(own[index + 1 :]), True
        monitoring = values.get("monitoring_callbacks")
        if monitoring is not None:
            module_pending = not monitoring
            others = [c for c in callbacks if not any(c is o for o in own)]
            pending += [] if monitoring else others
    elif name == EPOCH_END and frame.f_code.co_name == "_call_lightning_module_hook":
        kinds = _monitoring(frame)
        pending = [c for c in callbacks if isinstance(c, kinds)]
    hook = name
    if trainer.validating and name not in EXACT:
        hook = VALIDATION_END if name == "on_validation_model_train" else IN_VALIDATION
    return Position(hook, name, values["args"], pending, module_pending, saver)


def _monitoring(frame: FrameType) -> tuple[type, ...]:
    """Return the classes whose hooks at the end of an epoch come after the module's."""
    names = frame.f_globals
    return names["EarlyStopping"], names["Checkpoint"]


def keys(callbacks: Sequence[Any]) -> list[str]:
    """Return the state keys of ``callbacks``."""
    return [callback.state_key for callback in callbacks]


def with_state_keys(callbacks: Sequence[Any], wanted: Sequence[str]) -> list[Any]:
    """Return those of ``callbacks`` with the state keys ``wanted``; of several with one key, the last ones."""
    left = Counter(wanted)
    found: list[Any] = []
    for callback in reversed(callbacks):
        if left[callback.state_key] > 0:
            left[callback.state_key] -= 1
            found.insert(0, callback)
    return found


@contextmanager
def calling_only(trainer: Trainer, hook: str, callbacks: Sequence[Any], *, module: bool) -> Iterator[None]:
    """Make Lightning call ``hook`` only on ``callbacks``, and on the module if ``module``."""
    patches = Patches()
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        if not any(callback is c for c in callbacks):
            patches.set(callback, hook, None)
    if not module:
        patches.set(trainer.lightning_module, hook, None)
    try:
        yield
    finally:
        patches.restore()


def reads(fn: Callable[..., Any], position: int) -> bool:
    """Return whether the function reads the argument at this position.

    If no instruction of its body loads the argument, its value does not matter.
    """
    inner = getattr(fn, "__func__", fn)
    code = getattr(inner, "__code__", None)
    if not isinstance(code, CodeType):
        return True
    index = position + (inner is not fn)
    if index < code.co_argcount:
        name = code.co_varnames[index]
    elif code.co_flags & 0x04:  # *args
        name = code.co_varnames[code.co_argcount + code.co_kwonlyargcount]
    else:
        return False
    if name in code.co_cellvars or _LOOKS_ANYWHERE & set(code.co_names):
        return True
    loaded = (i.argval for i in dis.get_instructions(code) if "LOAD" in i.opname)
    return any(name == value or (isinstance(value, tuple) and name in value) for value in loaded)
