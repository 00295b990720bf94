"""K-FAC: exact on linear regression, its factors those of per-sample gradients, and the traps of hooks, windows and ranks."""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_eff import KFAC
from tests.cases import Case


class Scaled(pl.LightningModule):
    """No map: a scale for each feature."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy((batch[0] * self.scale)[:, :3], batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


CASES = {
    "KFAC": Case(
        active=lambda: KFAC(every=2, inverse_every=4),
        neutral=lambda: KFAC(every=0),
        lost=(Scaled, "classifier", "the optimizers of Scaled step no weight of a linear map or a convolution"),
    )
}
