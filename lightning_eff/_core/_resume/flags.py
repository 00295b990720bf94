"""Settings that hooks change during a run: trained parameters, modules in eval mode, and the accumulation window."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import nn


class Flags:
    """The differences of a run from its start, so that a resumed run can restore them.

    Only differences are saved. Changes that the user makes between two runs, such as another frozen layer, are kept.

    Args:
        trainer: its accumulation window may change, as with ``GradientAccumulationScheduler``.
        module: its parameters may be frozen or unfrozen, and its submodules put into eval mode.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer, self._module = trainer, module
        self._window = trainer.accumulate_grad_batches
        self._trains = _trains(module)
        self._modes = _modes(module)
        self._tracks = _tracks(module)

    def state_dict(self, modes: dict[str, bool] | None = None) -> dict[str, Any]:
        """Return the differences.

        Args:
            modes: during validation, the training modes of the submodules outside of it, by path.
        """
        window = self._trainer.accumulate_grad_batches
        return {
            "window": [self._window, window] if window != self._window else None,
            "requires_grad": _changed(self._trains, _trains(self._module)),
            "training": _changed(self._modes, _modes(self._module, modes)),
            "tracks": _changed(self._tracks, _tracks(self._module)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restore the differences; return whether the set of parameters with gradients changed."""
        if state["window"] is not None and state["window"][0] == self._trainer.accumulate_grad_batches:
            self._trainer.accumulate_grad_batches = state["window"][1]
        parameters, modules = dict(self._module.named_parameters()), dict(self._module.named_modules())
        changed = False
        for name, trains in state["requires_grad"].items():
            if name in parameters and parameters[name].requires_grad != trains:
                parameters[name].requires_grad_(trains)
                changed = True
        for attribute, values in (("training", state["training"]), ("track_running_stats", state["tracks"])):
            for name in values.keys() & modules.keys():
                setattr(modules[name], attribute, values[name])
        return changed


def _trains(module: nn.Module) -> dict[str, bool]:
    return {name: p.requires_grad for name, p in module.named_parameters()}


def _modes(module: nn.Module, known: dict[str, bool] | None = None) -> dict[str, bool]:
    known = known or {}
    return {name: known.get(name, m.training) for name, m in module.named_modules()}


def _tracks(module: nn.Module) -> dict[str, bool]:
    """Return whether BatchNorm layers use their statistics, which Lightning's ``BaseFinetuning`` disables where it freezes."""
    found = {name: getattr(m, "track_running_stats", None) for name, m in module.named_modules()}
    return {name: value for name, value in found.items() if isinstance(value, bool)}


def _changed(before: dict[str, bool], now: dict[str, bool]) -> dict[str, bool]:
    return {name: value for name, value in now.items() if name in before and before[name] != value}
