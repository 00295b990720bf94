"""What the processes of the communication tests run: ``python -m tests.strategies.communication_jobs DIRECTORY JOB ...``."""

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_eff._core.rng import keyed_generator
from lightning_eff.strategies._communication.codecs import Codec, QuantizedCodec, SignCodec
from lightning_eff.strategies._communication.exchange import Residuals, Traffic, compressed_mean
from lightning_eff.strategies._communication.hooks import PowerSGDHook, run_hook
from lightning_eff.strategies.compressed_ddp import CompressedDDPStrategy
from tests.models import flat, loader, module, trainer
from tests.runs import MODES, checkpoints, differences, final_state, fit
from tests.strategies.communication_launch import alike, counting, gathered, main, neutral

HOOKS: dict[str, dict[str, Any]] = {
    "powersgd": {"rank": 2, "start_step": 3, "min_compression_rate": 1.5},
    "bf16": {"start_step": 1},
    "onebit": {"start_step": 2},
    "qsgd": {"start_step": 1, "bucket_size": 64},
}


# -- the rules, without Lightning


def mean_rule(name: str, root: Path) -> dict[str, Any]:
    """What was returned, plus what all ranks still keep, is the sum of the true means; ranks get the same."""
    codec: Codec = SignCodec() if name == "sign" else QuantizedCodec(4, 64)
    rank, world = dist.get_rank(), dist.get_world_size()
    shapes = {"a": (5, 7), "b": (1, 300), "c": (64, 33), "d": (2, 1)}
    residuals, traffic = Residuals(), Traffic()
    returned = {key: torch.zeros(shape, dtype=torch.float64) for key, shape in shapes.items()}
    true = {key: torch.zeros(shape, dtype=torch.float64) for key, shape in shapes.items()}
    same = True
    for step in range(30):
        own = {k: torch.randn(s, generator=keyed_generator(0, step, k, rank)) for k, s in shapes.items()}
        before = {key: value.clone() for key, value in own.items()}
        found = compressed_mean(
            own,
            codec,
            group=None,
            residuals=residuals,
            seed=lambda key, step=step: keyed_generator(1, step, key, rank).initial_seed(),
            traffic=traffic,
        )
        assert all(torch.equal(own[key], before[key]) for key in own)
        for key, shape in shapes.items():
            same &= alike(found[key])
            returned[key] += found[key].double()
            for r in range(world):
                true[key] += torch.randn(shape, generator=keyed_generator(0, step, key, r)).double() / world
    errors, sent, relative = {}, {}, {}
    every = gathered((residuals.worker, residuals.server))
    for key, shape in shapes.items():
        kept = sum(worker[key].double() for worker, _ in every) / world
        kept = kept + torch.cat([server[key] for _, server in every])[: shape[0]].double()
        errors[key] = float((returned[key] + kept - true[key]).abs().max())
        sent[key] = float((returned[key] - true[key]).abs().max())
        relative[key] = float(kept.norm() / shape[0] ** 0.5 / shape[1] ** 0.5)
    return {"errors": errors, "alike": same, "unsent": sent, "kept": relative, "bytes": traffic.sent}


def sign_reference(name: str, root: Path) -> dict[str, Any]:
    """One exchange of signs without a residual, against loops over rows, with rows and columns of zeros."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def of(r: int) -> Tensor:
        x = torch.randn(6, 5, generator=keyed_generator(3, r))
        x[1] = 0.0
        x[:, 2] = 0.0
        x[4, 3] = 0.0  # a zero alone is not special
        return x

    def signs(x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for r in range(x.shape[0]):
            live = [c for c in range(x.shape[1]) if any(x[i, c] != 0 for i in range(x.shape[0]))]
            scale = sum(abs(float(x[r, c])) for c in live) / max(len(live), 1)
            for c in live:
                out[r, c] = scale if x[r, c] >= 0 else -scale
        return out

    share = -(-6 // world)
    expected = []
    for start in range(0, 6, share):
        mean = sum(signs(of(r)[start : start + share]) for r in range(world)) / world
        expected.append(signs(torch.as_tensor(mean)))
    found = compressed_mean(
        {"x": of(rank)}, SignCodec(), group=None, residuals=None, seed=lambda key: 0, traffic=Traffic()
    )["x"]
    reference = torch.cat(expected)
    return {
        "error": float((found - reference).abs().max()),
        "zeros": float(found[1].abs().max() + found[:, 2].abs().max()),
        "size": float(reference.abs().max()),
    }


def unbiased(name: str, root: Path) -> dict[str, Any]:
    """The mean of many exchanges of the same numbers, in standard errors of the mean."""
    rank, world = dist.get_rank(), dist.get_world_size()
    own = [torch.randn(8, 40, generator=keyed_generator(5, r)) for r in range(world)]
    truth = sum(own) / world
    draws = []
    for step in range(500):
        draws.append(
            compressed_mean(
                {"x": own[rank]},
                QuantizedCodec(4, 32),
                group=None,
                residuals=None,
                seed=lambda key, step=step: keyed_generator(step, key, rank).initial_seed(),
                traffic=Traffic(),
            )["x"]
        )
    stacked = torch.stack(draws).double()
    standard_error = stacked.std(dim=0) / len(draws) ** 0.5
    deviation = (stacked.mean(dim=0) - truth).abs() / standard_error.clamp(min=1e-9)
    return {
        "worst": float(deviation.max()),
        "typical": float(deviation.square().mean().sqrt()),
        "noise": float(stacked.std(dim=0).mean()),
        "different": len({bytes(d.numpy().tobytes()) for d in draws}),
    }


def low_rank(name: str, root: Path) -> dict[str, Any]:
    """PowerSGD on gradients whose mean has rank 2: exact with rank 2, not with rank 1."""
    rank = dist.get_rank()
    left = torch.randn(24, 2, generator=keyed_generator(7))
    found = {}
    for r in (1, 2, 3):
        net = nn.Linear(30, 24, bias=False)
        wrapped = DistributedDataParallel(net)
        names: dict[Tensor, str] = {net.weight: "weight"}
        hook = PowerSGDHook(names, rank=r, error_feedback=False, min_compression_rate=1.0, start_step=0, seed=0)
        wrapped.register_comm_hook(hook, run_hook)
        errors = []
        for step in range(3):
            gradients = [left @ torch.randn(2, 30, generator=keyed_generator(7, step, i)) for i in range(2)]
            net.weight.grad = None
            # the gradient of sum(W * G) by W is G: (W x) summed against rows of G
            wrapped(torch.eye(30)).T.mul(gradients[rank]).sum().backward()
            mean = sum(gradients) / 2
            errors.append(float((net.weight.grad - mean).norm() / mean.norm()))
        found[str(r)] = errors
    return found


# -- in a Trainer


def strategy(name: str, **overrides: Any) -> CompressedDDPStrategy:
    return CompressedDDPStrategy(hook=name, **{**HOOKS[name], **overrides})  # type: ignore[arg-type]


PLAIN: dict[str, Tensor] = {}  # the weights after plain DDP, by mode


def modes(name: str, root: Path) -> dict[str, Any]:
    """Train under accumulation, clipping, bf16 and validation."""
    found: dict[str, Any] = {}
    for mode, kwargs in MODES.items():
        net, t = fit("tiny_gpt", neutral, strategy=strategy(name), devices=2, samples=40, **kwargs)
        vector = flat(net)
        if mode not in PLAIN:
            plain, _ = fit("tiny_gpt", neutral, strategy="ddp", devices=2, samples=40, **kwargs)
            PLAIN[mode] = flat(plain)
        found[mode] = {
            "alike": alike(vector),
            "finite": bool(vector.isfinite().all()),
            "steps": t.global_step,
            "acts": not torch.equal(vector, PLAIN[mode]),
        }
    return found


def resume(name: str, root: Path) -> dict[str, Any]:
    """Resume from steps around the start of compression and later, and in plain DDP; what differs from the whole run."""
    settings: dict[str, Any] = {"devices": 2, "samples": 40, "accumulate_grad_batches": 1}
    small_buckets = {"bucket_cap_mb": 0.004}  # several buckets, which DDP regroups after the first step
    directory = root / name
    net, t = fit("tiny_gpt", neutral, directory=directory, strategy=strategy(name, **small_buckets), **settings)
    whole = final_state(net, t)
    dist.barrier()
    saved = checkpoints(directory)
    found: dict[str, list[str]] = {}
    for path in [saved[i] for i in (0, 1, 2, 3, 7, -1)]:
        again = fit("tiny_gpt", neutral, resume=path, strategy=strategy(name, **small_buckets), **settings)
        names = differences(whole, final_state(*again))
        if path is saved[-1]:
            names = [key for key in names if key not in ("rng", "steps")]
        if names:
            found[path.stem] = names
    checkpoint = torch.load(saved[-1], weights_only=True)
    module("tiny_gpt").load_state_dict(checkpoint["state_dict"], strict=True)
    state = checkpoint["CompressedDDPStrategy"]
    _, plain = fit("tiny_gpt", neutral, resume=saved[5], strategy="ddp", **settings)
    kept = [
        float(sum(e.abs().sum() for e in {**r.get("worker", {}), **r.get("errors", {})}.values()))
        for r in state["ranks"]
    ]
    return {
        "differences": gathered(found),
        "checkpoints": len(saved),
        "ranks": len(state["ranks"]),
        "step": state["ranks"][0]["step"],
        "kept": kept,
        "plain": plain.global_step,
    }


def traffic(name: str, root: Path) -> dict[str, Any]:
    """Bytes that the collectives got in one step, against what is logged."""

    class Count(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
            self.scope = counting()
            self.sums = self.scope.__enter__()

        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            self.scope.__exit__(None, None, None)
            self.logged = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("eff/")}

    count = Count()
    net = module("tiny_gpt", dim=64)
    t = trainer(count, max_steps=6, strategy=strategy(name, bucket_cap_mb=0.2), devices=2)
    t.fit(net, loader("tiny_gpt", 80))
    return {
        **count.logged,
        "counted": sum(count.sums.values()),
        "shapes": [list(p.shape) for p in net.parameters()],
    }


def converges(name: str, root: Path) -> dict[str, Any]:
    """The mean training loss of the last 10 of 150 steps: plain, and with each hook."""

    class Losses(pl.Callback):
        def __init__(self) -> None:
            self.losses: list[float] = []

        def on_train_batch_end(self, trainer: pl.Trainer, net: Any, outputs: Any, *args: Any) -> None:
            self.losses.append(float(outputs["loss"]))

    found = {}
    for hook in ("plain", *HOOKS):
        losses = Losses()
        pl.seed_everything(1, verbose=False)
        net = module("tiny_gpt", dropout=0.0, lr=3e-3)
        chosen = "ddp" if hook == "plain" else f"ddp_{hook}"
        trainer(losses, max_steps=150, strategy=chosen, devices=2).fit(net, loader("tiny_gpt", 160))
        found[hook] = sum(losses.losses[-10:]) / 10
        found["first"] = losses.losses[0]
    return found


def alone(name: str, root: Path) -> dict[str, Any]:
    """With one process, whether a hook is plain DDP."""

    def run(chosen: Any) -> Tensor:
        pl.seed_everything(1, verbose=False)
        net = module("tiny_gpt")
        trainer(max_steps=4, strategy=chosen).fit(net, loader("tiny_gpt"))
        return flat(net)

    plain = run("ddp")
    return {hook: torch.equal(run(strategy(hook)), plain) for hook in HOOKS}


def other_world(name: str, root: Path) -> dict[str, Any]:
    """A checkpoint of two processes, resumed by this one alone or by three: how many steps it ends with."""
    path = Path(os.environ["CHECKPOINT"])
    if dist.get_world_size() == 2:
        fit("tiny_gpt", neutral, directory=path, strategy=strategy(name), devices=2, samples=48)
        return {"saved": len(checkpoints(path))}
    net, t = fit("tiny_gpt", neutral, resume=checkpoints(path)[5], strategy=strategy(name), devices=3, samples=48)
    return {"steps": t.global_step, "alike": alike(flat(net)), "finite": bool(flat(net).isfinite().all())}


JOBS = (mean_rule, sign_reference, unbiased, low_rank, modes, resume, traffic, converges, alone, other_world)


if __name__ == "__main__":
    main(JOBS)
