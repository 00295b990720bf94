"""What the processes of the tests of SLAMB run: ``python -m tests.strategies.slamb_jobs DIRECTORY JOB ...``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_eff.strategies._communication.sparse_lamb import SparseLamb
from lightning_eff.strategies.slamb import SLAMB
from tests.models import flat, loader, module, trainer
from tests.runs import checkpoints, differences, final_state, fit
from tests.strategies.communication_launch import alike, gathered, main
from tests.strategies.reference_jobs import After, Watch, build, plain, put, tensors

WARMUP, STEPS, INTERVAL, DECAY, RANGE = 2, 12, 4, 0.7, (0.05, 0.9)
LR, BETAS, EPS, DECAYED = 0.05, (0.8, 0.95), 1e-6, 0.1


def by_adam() -> Any:
    """The module of the other references, trained by AdamW with a schedule."""
    net: Any = build()

    def configure_optimizers() -> Any:
        optimizer = torch.optim.AdamW(net.parameters(), LR, BETAS, EPS, DECAYED)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.95), "interval": "step"}]

    net.configure_optimizers = configure_optimizers
    return net


class Recorded:
    """Notes the masks of each step while it is entered; None for a tensor that is averaged whole."""

    def __enter__(self) -> list[list[Tensor | None]]:
        self.own, self.steps = SparseLamb._mask, list[list[Tensor | None]]()
        steps = self.steps

        def mask(lamb: SparseLamb, index: int, p: Tensor) -> Tensor | None:
            if index == 0:
                steps.append([])
            steps[-1].append(self.own(lamb, index, p))
            return steps[-1][-1]

        SparseLamb._mask = mask  # type: ignore[method-assign]
        return steps

    def __exit__(self, *args: Any) -> None:
        SparseLamb._mask = self.own  # type: ignore[method-assign]


class Rank:
    """A rank of a run in float64, with moments of its own."""

    def __init__(self) -> None:
        self.net = build().double()
        self.m, self.v = ([torch.zeros_like(p) for p in self.net.parameters()] for _ in range(2))
        self.r = [torch.ones_like(p) for p in self.net.parameters()]

    def gradients(self, batch: Any) -> list[Tensor]:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        return list(torch.autograd.grad(loss, list(self.net.parameters())))


def phi(w: Tensor, u: Tensor, empty: float) -> float:
    return float(w.norm() / u.norm()) if w.norm() > 0 and u.norm() > 0 else empty


def slamb(batches: Sequence[Sequence[Any]], masks: Sequence[Sequence[Tensor | None]]) -> tuple[Tensor, list[Tensor]]:
    """SLAMB in one process, element by element: the mean of the weights in the end, and rank 0's after each step."""
    ranks, after, n = [Rank() for _ in batches], list[Tensor](), len(batches)
    for t, (every, drawn) in enumerate(zip(zip(*batches, strict=True), masks, strict=True), 1):
        grads, lr = [rank.gradients(batch) for rank, batch in zip(ranks, every, strict=True)], LR * 0.95 ** (t - 1)
        if t <= WARMUP:
            grads = [plain(grads)] * n
        for rank, own in zip(ranks, grads, strict=True):
            for i, g in enumerate(own):
                rank.m[i] = BETAS[0] * rank.m[i] + (1 - BETAS[0]) * g
                rank.v[i] = BETAS[1] * rank.v[i] + (1 - BETAS[1]) * g * g
        for i, mask in enumerate(drawn):
            mean = torch.stack([rank.m[i] for rank in ranks]).mean(0)
            chosen = torch.ones_like(mean, dtype=torch.bool) if mask is None else mask
            for rank in ranks:
                rank.m[i] = torch.where(chosen, mean, rank.m[i])
                rank.r[i] = torch.where(chosen, 1.0, rank.r[i] * DECAY)
                w = list(rank.net.parameters())[i].data
                u = rank.m[i] / (1 - BETAS[0] ** t) / ((rank.v[i] / (1 - BETAS[1] ** t)).sqrt() + EPS) + DECAYED * w
                fresh = min(max(phi(w[chosen], u[chosen], 1.0), RANGE[0]), RANGE[1])
                stale = min(phi(w[~chosen], u[~chosen], 0.0), RANGE[1])
                w -= lr * (rank.r[i] * fresh + (1 - rank.r[i]) * stale / n**0.5) * u
        if t > WARMUP and (t - WARMUP) % INTERVAL == 0:
            for rank, w in zip(ranks, [plain([tensors(rank.net) for rank in ranks])] * n, strict=True):
                put([(rank.net, None)], w)  # type: ignore[list-item]
        after.append(flat(ranks[dist.get_rank()].net).clone())
    return torch.stack([flat(rank.net) for rank in ranks]).mean(0), after


def run(technique: SLAMB, *extra: pl.Callback, **settings: Any) -> tuple[Any, Watch]:
    net, watch = by_adam(), Watch()
    settings = {"max_steps": STEPS, "strategy": "ddp", "devices": 2, **settings}
    trainer(watch, technique, *extra, After(watch), **settings).fit(net, loader("classifier", 40))
    return net, watch


def slamb_reference(name: str, root: Path) -> dict[str, Any]:
    """SLAMB in float64 against one process; its masks, and the bytes that it sends and reports."""
    technique = SLAMB(0.4, interval=INTERVAL, decay=DECAY, warmup_steps=WARMUP, min_size=30, trust_range=RANGE)
    reported: list[float] = []

    class Report(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            reported.append(float(technique.report()["sent_bytes"]))

    with Recorded() as masks:
        net, watch = run(technique, Report(), precision="64-true")
    expected, after = slamb(gathered(watch.batches), masks)
    drawn = [[mask for mask in step if mask is not None] for step in masks]
    chosen = torch.stack([step[0] for step in drawn[WARMUP:]]).double()
    return {
        "error": float((flat(net) - expected).abs().max()),
        "errors": [float((a - b).abs().max()) for a, b in zip(watch.after, after, strict=True)],
        "alike": [alike(w) for w in watch.after],
        "masks alike": all(alike(mask.double().flatten()) for step in drawn for mask in step),
        "drawn": [len(step) for step in drawn],
        "fraction": float(chosen.mean()),
        "changes": float((chosen[1:] != chosen[:-1]).double().mean()),
        "bytes": watch.bytes,
        "reported": reported,
        "sent": [
            sum(p.numel() if mask is None else int(mask.sum()) for p, mask in zip(net.parameters(), step, strict=True))
            for step in masks
        ],
        "numel": flat(net).numel(),
        "moved": float((flat(net) - flat(build().double())).abs().max()),
    }


def slamb_resume(name: str, root: Path) -> dict[str, Any]:
    """Resume from within the warm-up, within an interval, and from where ranks met; checkpoints hold the mean."""
    settings: dict[str, Any] = {"strategy": "ddp", "devices": 2, "samples": 40}
    own: list[Tensor] = []

    class Own(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, net: pl.LightningModule, *args: Any) -> None:
            own.append(flat(net).clone())

    def make() -> list[Any]:
        return [SLAMB(0.2, interval=3, warmup_steps=2, min_size=64)]

    net, t = fit("tiny_gpt", make, directory=root / "slamb", steps=(1, 4, 5, 7), callbacks=[Own()], **settings)
    whole, same = final_state(net, t), alike(flat(net))
    saved = checkpoints(root / "slamb")
    dist.barrier()
    found, error = dict[str, list[str]](), 0.0
    for path in saved:
        names = differences(whole, final_state(*fit("tiny_gpt", make, resume=path, **settings)))
        if names:
            found[path.stem] = names
        checkpoint = torch.load(path, weights_only=True)
        again = module("tiny_gpt")
        again.load_state_dict(checkpoint["state_dict"], strict=True)
        mean = torch.stack(gathered(own[checkpoint["global_step"] - 1])).double().mean(dim=0)
        error = max(error, float((flat(again).double() - mean).abs().max()))
    alone, _ = fit("tiny_gpt", make, resume=saved[1])
    return {
        "saved": len(saved),
        "differences": gathered(found),
        "alike": same,
        "error": error,
        "alone": bool(flat(alone).isfinite().all()),
    }


if __name__ == "__main__":
    main((slamb_reference, slamb_resume))
