"""``--recipe`` of the command line: the recipe's callbacks in the trainer, and in the config that is saved with the run."""

from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_info

from lightning_eff._core._lightning.names import is_a

HELP = "techniques chosen for the module, such as gpt or gpt:fast; `lightning-eff recipe list` lists them"


def take(name: str, config: Any, trainer: Any, module: Any, data: Any) -> None:
    """Put a recipe's callbacks behind the user's own, into the trainer and the config.

    Args:
        name: of the recipe.
        config: of the subcommand. Afterwards it lists all callbacks, and its recipe is None. A later release can therefore
            change the recipe without changing a run of this config.
        trainer: made of the config.
        module: likewise.
        data: the data module; None if there is none.

    Raises:
        UsageError: see :func:`~lightning_eff.recipes.resolving.recipe`.
    """
    from lightning_eff.recipes.resolving import resolve

    given = config.trainer.callbacks
    given = [] if given is None else [*given] if isinstance(given, list) else [given]
    own = [c for c in trainer.callbacks if not is_a(c, Checkpoint)][: len(given)]
    at = sum(not is_a(callback, Checkpoint) for callback in trainer.callbacks[: len(given)])
    steps, seconds = _length(config)
    resolved = resolve(name, module, data=data, steps=steps, seconds=seconds, own=own, trainer=trainer)
    rank_zero_info(resolved.told())
    trainer.callbacks[at:at] = resolved.callbacks()
    config.trainer.callbacks = [*given, *(_namespace(entry) for entry in resolved.config())]
    config.recipe = None


def _length(config: Any) -> tuple[int | None, float | None]:
    """Steps and seconds of the run, as far as the config says them; -1 steps for a run without an end."""
    steps, epochs, time = (config.trainer.get(name) for name in ("max_steps", "max_epochs", "max_time"))
    seconds = _seconds(time) if time is not None else None
    if steps is not None and steps > 0:
        return steps, seconds
    return (-1 if epochs == -1 and time is None else None), seconds


def _seconds(time: Any) -> float | None:
    """The seconds of a ``max_time``: a dict of timedelta's arguments, ``DD:HH:MM:SS`` or a timedelta."""
    from datetime import timedelta

    if isinstance(time, str):
        days, hours, minutes, seconds = (int(part) for part in time.split(":"))
        return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds).total_seconds()
    if hasattr(time, "total_seconds"):
        return time.total_seconds()
    values = time.as_dict() if hasattr(time, "as_dict") else dict(time)
    return timedelta(**values).total_seconds()


def _namespace(value: Any) -> Any:
    """An entry as a parser has it: each class with its arguments is a namespace."""
    if not isinstance(value, dict) or "class_path" not in value:
        return value
    arguments = {key: _namespace(one) for key, one in value.get("init_args", {}).items()}
    return Namespace(class_path=value["class_path"], init_args=Namespace(**arguments))
