"""Settings that hooks change during a run: trained parameters, modules in eval mode, and the accumulation window."""

from collections.abc import Collection
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import nn

from lightning_eff._core._stack.walking import modules_by_path, parameters_by_name
from lightning_eff._core.blocks import BlockStack


class Flags:
    """The differences of a run from its start, so that a resumed run can restore them.

    Only differences are saved. Changes that the user makes between two runs, such as another frozen layer, are kept.

    Args:
        trainer: its accumulation window may change, as with ``GradientAccumulationScheduler``.
        module: its parameters may be frozen or unfrozen, and its submodules put into eval mode.
        stacks: the blocks that techniques freeze for a while. They freeze them again by themselves, so it is not saved here.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, stacks: Collection[BlockStack] = ()) -> None:
        self._trainer, self._module, self._stacks = trainer, module, stacks
        self._window = trainer.accumulate_grad_batches
        named = modules_by_path(module)
        self._trains = self._own_trains()
        self._modes = _modes(named)
        self._tracks = _tracks(named)

    def state_dict(self, modes: dict[str, bool] | None = None) -> dict[str, Any]:
        """Return the differences.

        Args:
            modes: during validation, the training modes of the submodules outside of it, by path.
        """
        window = self._trainer.accumulate_grad_batches
        named = modules_by_path(self._module)
        return {
            "window": [self._window, window] if window != self._window else None,
            "requires_grad": _changed(self._trains, self._own_trains()),
            "training": _changed(self._modes, _modes(named, modes)),
            "tracks": _changed(self._tracks, _tracks(named)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restore the differences; return whether the set of parameters with gradients changed."""
        if state["window"] is not None and state["window"][0] == self._trainer.accumulate_grad_batches:
            self._trainer.accumulate_grad_batches = state["window"][1]
        parameters, modules = dict(self._module.named_parameters()), dict(self._module.named_modules())
        changed = False
        for name, trains in state["requires_grad"].items():
            p = parameters.get(name)
            held = [stack for stack in self._stacks if p in stack.frozen]
            for stack in held:
                stack.frozen[parameters[name]] = trains
            if p is not None and not held and p.requires_grad != trains:
                p.requires_grad_(trains)
                changed = True
        for attribute, values in (("training", state["training"]), ("track_running_stats", state["tracks"])):
            for name in values.keys() & modules.keys():
                setattr(modules[name], attribute, values[name])
        return changed

    def _own_trains(self) -> dict[str, bool]:
        """Return the parameters' ``requires_grad``, as it is while no technique freezes blocks."""
        own: dict[int, bool] = {}
        for stack in self._stacks:
            for p, trains in stack.frozen.items():
                own[id(p)] = own.get(id(p), False) or trains
        return {name: own.get(id(p), p.requires_grad) for name, p in parameters_by_name(self._module)}


def _modes(named: list[tuple[str, nn.Module]], known: dict[str, bool] | None = None) -> dict[str, bool]:
    known = known or {}
    return {name: known.get(name, m.training) for name, m in named}


def _tracks(named: list[tuple[str, nn.Module]]) -> dict[str, bool]:
    """Return whether BatchNorm layers use their statistics, which Lightning's ``BaseFinetuning`` disables where it freezes."""
    found = {name: getattr(m, "track_running_stats", None) for name, m in named}
    return {name: value for name, value in found.items() if isinstance(value, bool)}


def _changed(before: dict[str, bool], now: dict[str, bool]) -> dict[str, bool]:
    return {name: value for name, value in now.items() if name in before and before[name] != value}
