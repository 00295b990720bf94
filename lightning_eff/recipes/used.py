"""A callback that records which recipe a run was made with: in its checkpoints and in its log."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_eff._core._lightning.names import of_both


@of_both
class UsedRecipe(Callback):
    """Records the recipe's name, version and variant in every checkpoint, and logs them when training begins.

    It changes nothing else. A run that resumes from a checkpoint of another recipe, version or variant gets a warning.

    Args:
        name: the recipe.
        version: its version.
        variant: its variant.
    """

    def __init__(self, name: str, version: int, variant: str) -> None:
        self.name, self.version, self.variant = name, version, variant

    def __repr__(self) -> str:
        return f"UsedRecipe({self.name!r}, version={self.version}, variant={self.variant!r})"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"name": self.name, "version": self.version, "variant": self.variant}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        before, now = state_dict, self.state_dict()
        if before != now:
            rank_zero_warn(
                f"recipe: the checkpoint was made with {_told(before)}, and this run uses {_told(now)}. To continue with the"
                " same techniques, resume with the config.yaml that was saved beside the checkpoint's log."
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        rank_zero_info(f"recipe: this run uses {_told(self.state_dict())}.")
        if trainer.logger is not None:
            trainer.logger.log_hyperparams({"lightning_eff_recipe": f"{self.name}:{self.variant}@{self.version}"})


def _told(state: dict[str, Any]) -> str:
    return f"{state['name']}:{state['variant']} (version {state['version']})"
