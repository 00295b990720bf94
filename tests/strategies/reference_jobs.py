"""What the processes of the tests of DiLoCo and DynamicAveraging run: ``python -m ...reference_jobs DIRECTORY JOB ...``."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_eff._core.technique import Technique
from lightning_eff.strategies.di_lo_co import DiLoCo
from lightning_eff.strategies.dynamic_averaging import DynamicAveraging
from lightning_eff.strategies.local_sgd import LocalSGD
from tests.models import flat, loader, module, trainer
from tests.runs import checkpoints, differences, final_state, fit
from tests.strategies.communication_launch import alike, counting, gathered, main

WARMUP, STEPS = 2, 14
Worker = tuple[nn.Module, torch.optim.Optimizer]


class Watch(pl.Callback):
    """Before the technique's own hook at the end of a step: this rank's batches, and its weights. After it: see ``After``."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.local: list[Tensor] = []
        self.after: list[Tensor] = []
        self.bytes: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, net: Any, batch: Any, *args: Any) -> None:
        self.batches.append([x.clone() for x in batch])
        self.scope = counting()
        self.sums = self.scope.__enter__()

    def on_train_batch_end(self, trainer: pl.Trainer, net: pl.LightningModule, *args: Any) -> None:
        self.local.append(flat(net).clone())


class After(pl.Callback):
    """After the technique's own hook at the end of a step: this rank's weights, and the bytes sent."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_train_batch_end(self, trainer: pl.Trainer, net: pl.LightningModule, *args: Any) -> None:
        self.watch.scope.__exit__(None, None, None)
        self.watch.bytes.append(sum(self.watch.sums.values()))
        self.watch.after.append(flat(net).clone())


def build() -> pl.LightningModule:
    """Linear layers without dropout, with biases; the same on all ranks."""
    pl.seed_everything(1, verbose=False)
    net = module("classifier", batch_norm=False, momentum=0.9)
    net.head[0].p = 0.0  # type: ignore[index]
    return net


def run(technique: Technique | None, *extra: pl.Callback, **settings: Any) -> tuple[pl.LightningModule, Watch]:
    """Train ``STEPS`` steps under DDP of two ranks, watched before and after the technique acts."""
    net, watch = build(), Watch()
    callbacks = [watch, *([technique] if technique is not None else []), *extra, After(watch)]
    t = trainer(*callbacks, **{"max_steps": STEPS, "strategy": "ddp", "devices": 2, **settings})
    t.fit(net, loader("classifier", 40))
    return net, watch


def workers(count: int) -> list[Worker]:
    """The ranks of a run in float64, in this process: a module and an SGD of its own for each."""
    nets = [build().double() for _ in range(count)]
    return [(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)) for net in nets]


def inner(ranks: Sequence[Worker], batches: Sequence[Any], *, together: bool) -> None:
    """One step of every rank on its own batch, with the mean of the gradients if ``together``."""
    for (net, optimizer), (x, y) in zip(ranks, batches, strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
    if together:
        for same in zip(*(net.parameters() for net, _ in ranks), strict=True):
            mean = sum(p.grad for p in same) / len(same)  # type: ignore[misc]
            for p in same:
                p.grad = mean.clone()  # type: ignore[union-attr]
    for _, optimizer in ranks:
        optimizer.step()


def tensors(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def put(ranks: Sequence[Worker], weights: Sequence[Tensor]) -> None:
    """Give all ranks these weights."""
    for net, _ in ranks:
        for p, w in zip(net.parameters(), weights, strict=True):
            p.data.copy_(w)


class Rounded:
    """The mean of rounded matrices with error feedback: each rank rounds, then the mean is rounded; vectors are whole."""

    def __init__(self, count: int) -> None:
        self.errors: list[list[Any]] = [[0.0] * 100 for _ in range(count + 1)]

    def _sent(self, who: int, index: int, x: Tensor) -> Tensor:
        x = x.float() + self.errors[who][index]
        sent = x.bfloat16().float()
        self.errors[who][index] = x - sent
        return sent

    def __call__(self, changes: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        found = []
        for index, same in enumerate(zip(*changes, strict=True)):
            if same[0].ndim < 2:
                found.append(torch.stack(same).mean(dim=0))
                continue
            mean = torch.stack([self._sent(who, index, x) for who, x in enumerate(same)]).mean(dim=0)
            found.append(self._sent(len(same), index, mean).double())
        return found


def plain(changes: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [torch.stack(same).mean(dim=0) for same in zip(*changes, strict=True)]


def outer(batches: Sequence[Sequence[Any]], mean: Callable[..., list[Tensor]], interval: int) -> Tensor:
    """DiLoCo (Douillard et al. 2023, algorithm 1) in one process, with torch's SGD as the outer optimizer."""
    ranks = workers(len(batches))
    theta = [nn.Parameter(w) for w in tensors(ranks[0][0])]
    optimizer = torch.optim.SGD(theta, lr=0.7, momentum=0.9, nesterov=True)
    for step, every in enumerate(zip(*batches, strict=True)):
        inner(ranks, every, together=step < WARMUP)
        if step < WARMUP:
            for p, w in zip(theta, tensors(ranks[0][0]), strict=True):
                p.data.copy_(w)
        elif (step + 1 - WARMUP) % interval == 0:
            changes = [[p.detach() - w for p, w in zip(theta, tensors(net), strict=True)] for net, _ in ranks]
            for p, delta in zip(theta, mean(changes), strict=True):
                p.grad = delta
            optimizer.step()
            put(ranks, [p.detach() for p in theta])
    return torch.cat([p.detach().flatten() for p in theta])


def diloco_reference(name: str, root: Path) -> dict[str, Any]:
    """DiLoCo in float64 against one process, with outer gradients in full and in bfloat16; and what LocalSGD makes of it."""
    found: dict[str, Any] = {}
    averaged, _ = run(LocalSGD(interval=3, warmup_steps=WARMUP), precision="64-true")
    for dtype, mean in (("float32", lambda: plain), ("bfloat16", lambda: Rounded(2))):
        net, watch = run(DiLoCo(interval=3, outer_dtype=dtype, warmup_steps=WARMUP), precision="64-true")  # type: ignore[arg-type]
        expected = outer(gathered(watch.batches), mean(), 3)
        found[dtype] = {
            "error": float((flat(net) - expected).abs().max()),
            "moved": float((flat(net) - flat(averaged)).abs().max()),
            "alike": alike(flat(net)),
        }
    same, _ = run(DiLoCo(interval=3, outer_lr=1.0, outer_momentum=0.0, warmup_steps=WARMUP), precision="64-true")
    found["averaging"] = float((flat(same) - flat(averaged)).abs().max())
    return found


def _conserved(technique: DiLoCo, watch: Watch, names: Sequence[str], shapes: Sequence[Any]) -> dict[str, float]:
    """With an outer learning rate of 1 and no momentum: what was applied, plus the errors that are kept, is what was due."""
    applied, due, off = 0.0, 0.0, 0.0
    for start in range(WARMUP, STEPS, 3):
        before, end = watch.after[start - 1].double(), start + 2
        mean = torch.stack([before - w.double() for w in gathered(watch.local[end])]).mean(dim=0)
        moved = before - watch.after[end].double()
        off = max(off, float((moved - mean).abs().max()))
        applied, due = applied + moved, due + mean
    kept = gathered((technique._residuals.worker, technique._residuals.server))
    rest = []
    for name, shape in zip(names, shapes, strict=True):
        left = torch.zeros(shape)
        if name in kept[0][0]:
            rows = torch.cat([server[name] for _, server in kept])[: shape[0]]
            left = torch.stack([worker[name] for worker, _ in kept]).mean(dim=0) + rows
        rest.append(left.double().flatten())
    return {
        "error": float((applied + torch.cat(rest) - due).abs().max()),
        "off": off,
        "largest": float(due.abs().max()),
        "kept": float(torch.cat(rest).abs().max()),
    }


def diloco_bytes(name: str, root: Path) -> dict[str, Any]:
    """What each dtype sends, in float32; and that rounding errors are kept."""
    found: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16", "int8", "int4"):
        technique = DiLoCo(interval=3, outer_lr=1.0, outer_momentum=0.0, outer_dtype=dtype, warmup_steps=WARMUP)  # type: ignore[arg-type]
        reports: list[float] = []

        class Report(pl.Callback):
            def on_train_batch_end(self, *args: Any) -> None:
                reports.append(float(technique.report()["sent_bytes"]))  # noqa: B023

        net, watch = run(technique, Report())
        names, shapes = zip(*((n, p.shape) for n, p in net.named_parameters()), strict=True)
        found[dtype] = {
            "bytes": watch.bytes,
            "reported": reports[-1],
            "alike": [alike(w) for w in watch.after],
            **_conserved(technique, watch, names, shapes),
        }
    return found


def diloco_overwritten(name: str, root: Path) -> dict[str, Any]:
    """Another technique overwrites weights in the third step of the second period: ranks average, and start again."""
    technique = DiLoCo(interval=3, outer_dtype="int8", warmup_steps=WARMUP)
    momenta: list[int] = []

    class Overwrite(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, net: pl.LightningModule, *args: Any) -> None:
            if trainer.global_step == WARMUP + 5:
                for p in net.parameters():
                    p.data.add_(1.0)
                technique.on_blocks_changed(technique.session)
            momenta.append(len(technique._momentum))

    _, watch = run(technique, Overwrite())
    met = WARMUP + 6 - 1
    mean = torch.stack(gathered(watch.local[met])).mean(dim=0)
    return {"error": float((watch.after[met] - mean).abs().max()), "momenta": momenta}


def _resumed(name: str, make: Callable[[], list[Any]], root: Path) -> dict[str, Any]:
    """Resume from within periods and from where ranks met; checkpoints hold the mean of the ranks' own weights."""
    settings: dict[str, Any] = {"strategy": "ddp", "devices": 2, "samples": 40}
    watch = Watch()

    class Own(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, net: pl.LightningModule, *args: Any) -> None:
            watch.local.append(flat(net).clone())

    directory = root / name
    net, t = fit("tiny_gpt", make, directory=directory, steps=(4, 5), callbacks=[Own()], **settings)
    whole, same = final_state(net, t), alike(flat(net))
    saved = checkpoints(directory)
    dist.barrier()
    found: dict[str, list[str]] = {}
    error, kept = 0.0, []
    for path in saved:
        names = differences(whole, final_state(*fit("tiny_gpt", make, resume=path, **settings)))
        if names:
            found[path.stem] = names
        checkpoint = torch.load(path, weights_only=True)
        again = module("tiny_gpt")
        again.load_state_dict(checkpoint["state_dict"], strict=True)
        mean = torch.stack(gathered(watch.local[checkpoint["global_step"] - 1])).double().mean(dim=0)
        error = max(error, float((flat(again).double() - mean).abs().max()))
        state = next(value for key, value in checkpoint["callbacks"].items() if key.startswith(name))
        kept.append({key: len(state[key]) for key in ("reference", "momentum", "residuals") if key in state})
        kept[-1]["averagings"] = state["averagings"]
    alone, _ = fit("tiny_gpt", make, resume=saved[0])
    return {
        "differences": gathered(found),
        "alike": same,
        "error": error,
        "kept": kept,
        "parameters": len(list(net.parameters())),
        "alone": bool(flat(alone).isfinite().all()),
    }


def diloco_resume(name: str, root: Path) -> dict[str, Any]:
    return _resumed("DiLoCo", lambda: [DiLoCo(interval=3, outer_dtype="int8", warmup_steps=1)], root)


def dynamic_resume(name: str, root: Path) -> dict[str, Any]:
    return _resumed("DynamicAveraging", lambda: [DynamicAveraging(0.6, interval=1, warmup_steps=1)], root)


def averaging(batches: Sequence[Sequence[Any]], threshold: float, interval: int) -> dict[str, Any]:
    """Dynamic averaging in one process: the weights in the end, and the squared distances of all checks."""
    ranks = workers(len(batches))
    reference, distances = tensors(ranks[0][0]), []
    for step, every in enumerate(zip(*batches, strict=True)):
        inner(ranks, every, together=step < WARMUP)
        if step < WARMUP:
            reference = tensors(ranks[0][0])
        elif (step + 1 - WARMUP) % interval == 0:
            squares = [[(w - r) ** 2 for w, r in zip(tensors(n), reference, strict=True)] for n, _ in ranks]
            distances.append(max(float(sum(s.sum() for s in own)) for own in squares))
            if distances[-1] > threshold:
                reference = plain([tensors(net) for net, _ in ranks])
                put(ranks, reference)
    put(ranks, plain([tensors(net) for net, _ in ranks]))  # the end of the fit
    return {"weights": flat(ranks[0][0]), "distances": distances}


def dynamic_reference(name: str, root: Path) -> dict[str, Any]:
    """Dynamic averaging in float64 against one process: weights, distances, what is sent, and how far ranks drift."""
    threshold = 0.3
    technique = DynamicAveraging(threshold, interval=2, warmup_steps=WARMUP)
    reported: list[dict[str, float]] = []

    class Report(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            reported.append({key: float(value) for key, value in technique.report().items()})

    net, watch = run(technique, Report(), precision="64-true")
    expected = averaging(gathered(watch.batches), threshold, 2)
    divergence = []
    for w in watch.after:
        every = torch.stack(gathered(w))
        divergence.append(float(((every - every.mean(dim=0)) ** 2).sum(dim=1).mean()))
    return {
        "error": float((flat(net) - expected["weights"]).abs().max()),
        "expected": expected["distances"],
        "reported": reported,
        "threshold": threshold,
        "bytes": watch.bytes,
        "numel": flat(net).numel(),
        "alike": [alike(w) for w in watch.after],
        "divergence": divergence,
    }


def dynamic_extremes(name: str, root: Path) -> dict[str, Any]:
    """A threshold of 0 against LocalSGD, an infinite one, a weight that is not a number, and overwritten weights."""
    local, _ = run(LocalSGD(interval=2, warmup_steps=WARMUP))
    always, _ = run(DynamicAveraging(0.0, interval=2, warmup_steps=WARMUP))
    never = DynamicAveraging(float("inf"), interval=2)
    run(never)
    broken, told = DynamicAveraging(1e6, interval=2), DynamicAveraging(1e6, interval=2)

    class Break(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, net: pl.LightningModule, *args: Any) -> None:
            if trainer.global_step == 3 and trainer.global_rank == 1:
                next(net.parameters()).data.fill_(float("nan"))

    class Tell(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == 3:
                told.on_blocks_changed(told.session)

    run(broken, Break(), max_steps=4)
    run(told, Tell(), max_steps=8)
    techniques = {"never": never, "broken": broken, "told": told}
    return {
        "equal": torch.equal(flat(local), flat(always)),
        **{key: technique.report()["averagings"] for key, technique in techniques.items()},
    }


if __name__ == "__main__":
    main(
        (
            diloco_reference,
            diloco_bytes,
            diloco_overwritten,
            diloco_resume,
            dynamic_reference,
            dynamic_extremes,
            dynamic_resume,
        )
    )
