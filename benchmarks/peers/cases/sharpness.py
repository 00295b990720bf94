"""Sharpness-aware minimization and its relatives, each in a fit: ours as a callback, the peer by manual optimization."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import lightning_eff as eff
from benchmarks.peers.case import Arm, Case
from benchmarks.peers.fits import fit_arm
from benchmarks.peers.modules import Perceptron

WIDTH, BATCH, CYCLE = 256, 128, 5
PACKAGE = "pytorch_optimizer"


class Manual(Perceptron):
    """Stepped by a peer's optimizer with a closure.

    Args:
        optimizer: of the parameters.
        cycle: only one step in so many takes a second pass. The others use the peer's ``second_step``, because its
            ``step(closure)`` would run two passes in all of them.
    """

    def __init__(self, optimizer: Callable[[Any], Any], cycle: int) -> None:
        super().__init__(WIDTH)
        self.automatic_optimization = False
        self.make, self.cycle = optimizer, cycle

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()

        def closure() -> Tensor:
            loss = F.cross_entropy(self(batch[0]), batch[1])
            self.manual_backward(loss)
            return loss

        closure()
        if batch_idx % self.cycle:
            optimizer.optimizer.second_step()
        else:
            optimizer.step(closure)
        optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


def _fits(technique: Callable[[], Any], peer: str, cycle: int = 1, **options: Any) -> Callable[[], tuple[Arm, Arm]]:
    def build() -> tuple[Arm, Arm]:
        import pytorch_optimizer

        def made(params: Any) -> Any:
            kind = getattr(pytorch_optimizer, peer)
            return kind(params, torch.optim.SGD, lr=1e-3, momentum=0.9, **options)

        batch = torch.randn(BATCH, WIDTH), torch.randint(WIDTH, (BATCH,))
        ours = fit_arm(Perceptron(WIDTH), batch, [technique()], batches=cycle)
        return ours, fit_arm(Manual(made, cycle), batch, batches=cycle)

    return build


def cases() -> list[Case]:
    return [
        Case(
            "SAM",
            "SharpnessAwareMinimization",
            "pytorch_optimizer.SAM",
            PACKAGE,
            _fits(lambda: eff.SharpnessAwareMinimization(rho=0.05), "SAM", rho=0.05),
        ),
        Case(
            "SAM, adaptive",
            "SharpnessAwareMinimization",
            "pytorch_optimizer.SAM(adaptive=True)",
            PACKAGE,
            _fits(lambda: eff.SharpnessAwareMinimization(rho=0.5, adaptive=True), "SAM", rho=0.5, adaptive=True),
        ),
        Case(
            "LookSAM",
            "LookSAM",
            "pytorch_optimizer.LookSAM",
            PACKAGE,
            _fits(lambda: eff.LookSAM(rho=0.05, interval=CYCLE), "LookSAM", CYCLE, rho=0.05, k=CYCLE),
            unit="five steps",
        ),
    ]
