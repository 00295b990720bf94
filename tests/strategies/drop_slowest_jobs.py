"""What the processes of the tests of late ranks run: ``python -m tests.strategies.drop_slowest_jobs DIRECTORY JOB ...``."""

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_eff.data.augmentation.label_smoothing import LabelSmoothing
from lightning_eff.data.selection.adaptive.auto_assist import AutoAssist
from lightning_eff.data.selection.selective_backprop import SelectiveBackprop
from lightning_eff.optim.sharpness.sharpness_aware_minimization import SharpnessAwareMinimization
from lightning_eff.strategies.drop_slowest import DropSlowest
from tests.models import TinyClassifier, flat, trainer
from tests.runs import differences, final_state, fit
from tests.strategies.communication_launch import alike, gathered, main

WINDOW, STEPS, RATE = 4, 5, 0.1


class Sleeper(TinyClassifier):
    """Rank 1 takes its time for each micro-batch of some steps; each rank keeps what it was trained on."""

    def __init__(self, slow: tuple[int, ...] = (), **kwargs: Any) -> None:
        super().__init__(batch_norm=False, **kwargs)
        self.head[0] = nn.Identity()  # no dropout
        self.slow = slow
        self.trained: list[tuple[int, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if dist.get_rank() == 1 and self.global_step in self.slow:
            time.sleep(0.25)
        self.trained.append((self.global_step, batch_idx))
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), RATE)


class Own(torch.utils.data.Dataset[Any]):
    """Micro-batches of 4 samples, of this rank's own."""

    def __init__(self, rank: int) -> None:
        g = torch.Generator().manual_seed(rank)
        n = WINDOW * STEPS
        self.x, self.y = torch.randn(n, 4, 8, generator=g), torch.randint(0, 3, (n, 4), generator=g)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i]


def run(*techniques: Any, slow: tuple[int, ...] = (), **kwargs: Any) -> tuple[Sleeper, pl.Trainer, float]:
    pl.seed_everything(1, verbose=False)
    net = Sleeper(slow)
    settings = {"strategy": "ddp", "devices": 2, "accumulate_grad_batches": WINDOW, "use_distributed_sampler": False}
    t = trainer(*techniques, max_steps=STEPS, **{**settings, **kwargs})
    begun = time.perf_counter()
    t.fit(net, DataLoader(Own(dist.get_rank()), batch_size=None))
    return net, t, time.perf_counter() - begun


def by_hand(trained: list[list[tuple[int, int]]]) -> tuple[Tensor, Tensor]:
    """Weights of SGD along the mean gradient of all micro-batches that some rank trained on, and of the mean of all."""
    ends = []
    for everything in (False, True):
        pl.seed_everything(1, verbose=False)
        net = Sleeper()
        data = [Own(0), Own(1)]
        for step in range(STEPS):
            done = [(r, i) for r, own in enumerate(trained) for s, i in own if s == step]
            if everything:
                done = [(r, WINDOW * step + k) for r in range(2) for k in range(WINDOW)]
            losses = [F.cross_entropy(net(data[r][i][0]), data[r][i][1]) for r, i in done]
            gradients = torch.autograd.grad(torch.stack(losses).mean(), [*net.parameters()])
            with torch.no_grad():
                for p, g in zip(net.parameters(), gradients, strict=True):
                    p -= RATE * g
        ends.append(flat(net))
    return ends[0], ends[1]


def survivors(name: str, root: Path) -> dict[str, Any]:
    """Rank 1 is late in two of five steps: what is left out, what the mean is over, and what that takes."""
    technique = DropSlowest(grace=0.5)
    net, _, took = run(technique, slow=(1, 3), gradient_clip_val=100.0)
    trained = gathered(net.trained)
    mean, all_of_them = by_hand(trained)
    _, _, plain_took = run(slow=(1, 3))
    return {
        "error": float((flat(net) - mean).abs().max()),
        "from_all": float((flat(net) - all_of_them).abs().max()),
        "alike": alike(flat(net)),
        "trained": [[sum(s == step for s, _ in own) for step in range(STEPS)] for own in trained],
        "report": {key: float(value) for key, value in technique.report().items()},
        "reports_alike": len({str(one) for one in gathered(technique.report())}) == 1,
        "state": technique.state_dict()["windows"],
        "took": gathered(took),
        "plain_took": plain_took,
    }


def nobody_late(name: str, root: Path) -> dict[str, Any]:
    """Bit for bit DDP, where nobody is late, with BatchNorm and dropout; also without accumulation, and neutral."""
    settings: dict[str, Any] = {"strategy": "ddp", "devices": 2, "samples": 40}
    found = {}
    for window in (1, 3):
        plain = final_state(*fit("classifier", list, accumulate_grad_batches=window, **settings))
        for technique in (lambda: DropSlowest(grace=1e9), lambda: DropSlowest(slowest=0)):
            other = final_state(
                *fit("classifier", lambda t=technique: [t()], accumulate_grad_batches=window, **settings)
            )
            found[f"{window} {technique().neutral}"] = differences(plain, other)
    return found


def beside(name: str, root: Path) -> dict[str, Any]:
    """Late ranks beside techniques that look at losses, choose samples, run twice and exchange what they found."""
    found = {}
    for techniques in (
        (DropSlowest(grace=0.5), LabelSmoothing(), SharpnessAwareMinimization()),
        (SharpnessAwareMinimization(), LabelSmoothing(), DropSlowest(grace=0.5)),
        (AutoAssist(), DropSlowest(grace=0.5)),
        (DropSlowest(grace=0.5), SelectiveBackprop()),
    ):
        net, _, _ = run(*techniques, slow=(1, 3))
        (technique,) = (t for t in techniques if isinstance(t, DropSlowest))
        found[" ".join(type(t).__name__ for t in techniques)] = {
            "alike": alike(flat(net)) and bool(flat(net).isfinite().all()),
            "dropped": int(technique.report()["dropped"]),
        }
    return found


def refused(name: str, root: Path) -> dict[str, Any]:
    """What is refused, on all ranks."""
    found = {}

    class Logs(Sleeper):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("loss", 0.0, sync_dist=True)
            return super().training_step(batch, batch_idx)

    def said(call: Any) -> str:
        try:
            call()
        except ValueError as error:
            return str(error)
        return ""

    settings: dict[str, Any] = {"strategy": "ddp", "devices": 2, "max_steps": 2, "accumulate_grad_batches": 2}

    def data() -> Any:
        return DataLoader(Own(0), batch_size=None)

    found["slowest"] = said(lambda: trainer(DropSlowest(slowest=2), **settings).fit(Sleeper(), data()))
    found["log"] = said(lambda: trainer(DropSlowest(), **settings).fit(Logs(), data()))
    return {key: gathered(value) for key, value in found.items()}


if __name__ == "__main__":
    main((survivors, nobody_late, beside, refused))
