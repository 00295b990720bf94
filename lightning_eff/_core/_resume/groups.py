"""Parameter groups that hooks add to an optimizer during a run, as Lightning's ``BaseFinetuning`` does."""

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer


class AddedGroups:
    """The groups of optimizers beyond those with which they were created, by the names of their parameters.

    Args:
        module: the module that has the parameters.
        optimizers: its optimizers before training begins.
    """

    def __init__(self, module: LightningModule, optimizers: Sequence[Optimizer]) -> None:
        self._module, self._optimizers = module, list(optimizers)
        self._made = [len(optimizer.param_groups) for optimizer in optimizers]

    def state_dict(self) -> list[list[dict[str, Any]]]:
        """Return the groups added to each optimizer: the names of their parameters, and their settings."""
        added = [o.param_groups[made:] for o, made in zip(self._optimizers, self._made, strict=True)]
        if not any(added):
            return [[] for _ in added]
        names = {id(p): name for name, p in self._module.named_parameters()}
        return [
            [{"names": [names.get(id(p), "") for p in group["params"]], "settings": _plain(group)} for group in groups]
            for groups in added
        ]

    def load_state_dict(self, state: list[list[dict[str, Any]]], trainer: Trainer) -> None:
        """Add the same groups with ``add_param_group``, before the optimizers' state is loaded."""
        parameters = dict(self._module.named_parameters())
        for optimizer, groups in zip(self._optimizers, state, strict=False):
            for group in groups:
                known = [parameters[name] for name in group["names"] if name in parameters]
                if len(known) == len(group["names"]):
                    optimizer.add_param_group({**group["settings"], "params": known})
        for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            if hasattr(callback, "_internal_optimizer_metadata"):
                callback._restarting = False  # it would replace all groups, including those of wrapping optimizers


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    settings = {key: value for key, value in group.items() if key != "params"}
    return {
        key: value.detach().cpu().clone() if isinstance(value, Tensor) else value
        for key, value in settings.items()
        if isinstance(value, bool | int | float | str | tuple | list | Tensor | None)
    }
