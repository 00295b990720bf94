"""What each of the processes that ``tests.ddp.launch`` starts runs: ``python -m tests.ddp_jobs DIRECTORY JOB NAME ...``."""

import hashlib
import itertools
import json
import logging
import os
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, DistributedSampler

from lightning_eff.data.exact_resume import ExactResume
from lightning_eff.optim.averaging.latest_weight_averaging import LatestWeightAveraging
from lightning_eff.optim.sharpness.look_sam import LookSAM
from lightning_eff.optim.sharpness.sharpness_aware_minimization import SharpnessAwareMinimization
from tests.cases import ALL, case_of
from tests.covering import Stack
from tests.models import Samples, flat, loader, module, trainer
from tests.plugins import PLUGINS
from tests.runs import (
    MODES,
    NUM_STEPS,
    SaveBatches,
    checkpoints,
    differences,
    final_state,
    fit,
    largest,
    resume_from_batches,
)
from tests.stacks import cut_down, model_of

DDP: dict[str, Any] = {"strategy": "ddp", "devices": 2, "samples": 40}
MODES_OF_GROUPS = {
    "bf16": MODES["bf16"],
    "accumulate, clip, validate": {**MODES["accumulate_clip"], **MODES["validate"]},
}


def _same_on_all_ranks(vector: torch.Tensor) -> bool:
    others = [torch.empty_like(vector) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(others, vector)
    return all(torch.equal(vector, other) for other in others)


def _agreed(own: Any) -> list[Any]:
    """What each rank gives, on all of them."""
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, own)
    return every


def contract(what: str, root: Path) -> Any:
    """What is said of one technique (``alone:A``), or of several at once (``together:A+B``).

    Of one technique also under a hybrid strategy, of its name in Lightning's registry (``hybrid_tp2:A``).
    """
    job, _, names = what.partition(":")
    if job.startswith("hybrid"):
        return alone(names, root, strategy=job, samples=40 if job == "hybrid" else 20)
    return alone(names, root) if job == "alone" else together(names.split("+"), root)


def alone(name: str, root: Path, **settings: Any) -> dict[str, Any]:
    """Train and resume within the second epoch; what differs, and whether the ranks end alike."""
    case, settings = case_of(name), {**DDP, **settings}
    folder = root / f"alone_{name}_{settings['strategy']}"

    def build() -> list[Any]:
        return [case.active()]

    net, t = fit(case.model, build, callbacks=[SaveBatches(folder, [7])], **settings)
    whole = final_state(net, t)
    found = {"alike": _same_on_all_ranks(flat(net)), "finite": bool(flat(net).isfinite().all()), "steps": t.global_step}
    again = final_state(*fit(case.model, build, resume=folder / "batch=7.ckpt", **settings))
    return {**found, "differences": _agreed(differences(whole, again))}


def together(group: list[str], root: Path) -> str | None:
    """The same and more of techniques at once; what is wrong, of the smallest part of them.

    They train in every mode (of one process's, two that are several at once), and resume from some steps, one of which ends
    an epoch, and within accumulation windows.
    """
    numbers = itertools.count()

    def wrong(names: Stack) -> str | None:
        """By the first check that fails on any rank; every rank is told the same."""
        # of this group and no other, whose parts may be as large; all its names in one would be longer than a path may be
        directory = root / f"together_{hashlib.sha256(' '.join(group).encode()).hexdigest()[:16]}" / str(next(numbers))

        def build() -> list[Any]:
            return [ALL[name].active() for name in names]

        model = model_of(group, ALL)
        told: list[str] = []

        def look(mode: str, net: pl.LightningModule, t: pl.Trainer) -> None:
            vector = flat(net)
            if not _same_on_all_ranks(vector):
                told.append(f"lets ranks end with different weights ({mode})")
            elif not vector.isfinite().all() or t.global_step != NUM_STEPS:
                told.append(f"trains {t.global_step} of {NUM_STEPS} steps, or to weights that are not finite ({mode})")

        for mode, settings in MODES_OF_GROUPS.items():
            look(mode, *fit(model, build, **{**DDP, **settings}))
        steps = {"max_steps": NUM_STEPS, "accumulate_grad_batches": 1, "look": partial(look, "plain")}
        found = resume_from_batches(model, build, directory / "steps", (5, 9), **steps, **DDP)
        found |= resume_from_batches(model, build, directory / "windows", (2,), **DDP)
        ends = (f"ends otherwise where it resumes: {some}" for some in _agreed(found) if some)
        return next((one for some in _agreed(told) for one in some), None) or next(ends, None)

    try:
        cut_down(tuple(group), wrong)
    except AssertionError as error:
        return str(error)
    return None


def resume(name: str, root: Path) -> dict[str, Any]:
    """Resume from every step under DDP; what differs, and whether the ranks end alike."""
    case = ALL[name]
    directory = root / name

    def build() -> list[Any]:
        return [case.active()]

    net, t = fit(case.model, build, directory=directory, **DDP)
    whole = final_state(net, t)
    alike = _same_on_all_ranks(flat(net))
    torch.distributed.barrier()
    saved = checkpoints(directory)
    found: dict[str, list[str]] = {}
    for path in saved:
        names = differences(whole, final_state(*fit(case.model, build, resume=path, **DDP)))
        if path is saved[-1]:  # nothing is left to do
            names = [key for key in names if key not in ("rng", "steps")]
        if names:
            found[path.stem] = names
    every: list[Any] = [None, None]
    torch.distributed.all_gather_object(every, found)
    return {"differences": every, "alike": alike, "checkpoints": len(saved), "expected": NUM_STEPS}


def windows(name: str, root: Path) -> list[Any]:
    """Resume within accumulation windows under DDP; what differs, by rank."""
    case = ALL[name]
    directory = root / f"windows_{name}"
    found = resume_from_batches(case.model, lambda: [case.active()], directory, (2, 9), **DDP)
    every: list[Any] = [None, None]
    torch.distributed.all_gather_object(every, found)
    return every


def frozen(name: str, root: Path) -> dict[str, Any]:
    """Freeze blocks under DDP and resume within windows; what differs, and what each rank freezes and ends with."""
    from lightning_eff import LISA, LayerFreezing

    class Frozen(pl.Callback):
        def __init__(self) -> None:
            self.seen: list[list[str]] = []

        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
            self.seen.append([name for name, p in pl_module.named_parameters() if not p.requires_grad])

    def build() -> list[Any]:
        return [LISA(1, interval=1) if name == "LISA" else LayerFreezing(start=0.1, end=0.9)]

    found = resume_from_batches("tiny_gpt", build, root / f"frozen_{name}", (4, 9), **DDP)
    noted = Frozen()
    net, _ = fit("tiny_gpt", build, callbacks=[noted], max_steps=5, accumulate_grad_batches=3, **DDP)
    return {"differences": _agreed(found), "frozen": _agreed(noted.seen), "alike": _same_on_all_ranks(flat(net))}


def frozen_apart(name: str, root: Path) -> list[float]:
    """Freeze blocks that ranks trained separately; how far each is from the mean over ranks, and how far ranks were apart."""
    import lightning_eff
    from lightning_eff import LISA

    class Means(pl.Callback):
        before: dict[str, torch.Tensor]
        trained: set[str]
        errors: list[float]

        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
            now = {name: p for name, p in pl_module.named_parameters() if name.startswith("blocks.")}
            if trainer.global_step == 2:
                self.before = {name: p.detach().clone() for name, p in now.items()}
                self.trained = {name for name, p in now.items() if p.requires_grad}
            if trainer.global_step == 3:
                held = sorted(name for name in self.trained if not now[name].requires_grad)
                ranks = _agreed({name: self.before[name] for name in held})
                means = {name: (ranks[0][name] + ranks[1][name]) / 2 for name in held}
                self.errors = [
                    sum(float((now[name] - means[name]).norm()) for name in held),
                    sum(float((ranks[0][name] - means[name]).norm()) for name in held),
                ]

    noted = Means()
    apart = getattr(lightning_eff, name)(interval=100)
    fit("tiny_gpt", lambda: [LISA(1, interval=1), apart], callbacks=[noted], max_steps=4, **DDP)
    return noted.errors


def modes(name: str, root: Path) -> dict[str, Any]:
    """Train under accumulation, clipping, bf16 and validation; whether ranks end alike and the weights moved."""
    case = ALL[name]
    found: dict[str, Any] = {}
    for mode, kwargs in MODES.items():
        net, t = fit(case.model, lambda: [case.active()], **{**DDP, **kwargs})
        vector = flat(net)
        found[mode] = {
            "alike": _same_on_all_ranks(vector),
            "finite": bool(vector.isfinite().all()),
            "steps": t.global_step,
        }
    return found


def batch_norm(name: str, root: Path) -> dict[str, Any]:
    """LAWA's BatchNorm statistics under DDP against torch's ``update_bn`` over the batches of both ranks."""
    from torch.optim.swa_utils import update_bn

    raw: dict[str, Any] = {}

    class Last(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
            raw["var"] = pl_module.get_buffer("norm.running_var").clone()

    net, samples = module("classifier"), Samples("classifier", 40)
    data = DataLoader(samples, 4, sampler=DistributedSampler(samples, 2, int(os.environ["RANK"]), shuffle=False))
    technique = LatestWeightAveraging(window=3, interval=2, bn_batches=None)
    settings: dict[str, Any] = {"strategy": "ddp", "devices": 2, "limit_val_batches": 1, "val_check_interval": 2}
    settings["use_distributed_sampler"] = False
    trainer(technique, Last(), max_steps=12, **settings).fit(net, data, loader("classifier", 40, shuffle=False))
    got = {key: value.double() for key, value in net.norm.named_buffers()}  # pyright: ignore[reportAttributeAccessIssue]
    alike = all(_same_on_all_ranks(value) for value in got.values())
    x = [samples[i][0] for i in range(40)]
    update_bn([torch.stack(x[r::2][i : i + 4]) for i in range(0, 20, 4) for r in (0, 1)], net)
    expected = dict(net.norm.named_buffers())  # pyright: ignore[reportAttributeAccessIssue]
    return {
        "alike": alike,
        "batches": int(got["num_batches_tracked"]),
        "error": largest(float((value - expected[key]).abs().max()) for key, value in got.items()),
        "moved": float((got["running_var"] - raw["var"]).abs().max()),
    }


def sharpness(what: str, root: Path) -> dict[str, Any]:
    """SAM over 8 batches, each rank with a random stream of its own: what both ranks end with.

    Args:
        what: the micro-batches of a step; or "look", for LookSAM and SGD.
        root: is not used.
    """

    class SeedOnce(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == 0 and args[-1] == 0:
                torch.manual_seed(100 + trainer.global_rank)

    look = what == "look"
    pl.seed_everything(3, verbose=False)
    net = module("classifier")
    if look:  # Adam would make much of a rounded gradient
        net.configure_optimizers = lambda: torch.optim.SGD(net.parameters(), lr=0.5)
    data = Samples("classifier", 32)
    sampler = DistributedSampler(data, 2, int(os.environ["RANK"]), shuffle=False)  # Lightning's own would shuffle
    settings: dict[str, Any] = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
    t = trainer(
        SeedOnce(),
        LookSAM(rho=0.1, interval=2, alpha=0.7) if look else SharpnessAwareMinimization(rho=0.1),
        max_epochs=1,
        accumulate_grad_batches=1 if look else int(what),
        gradient_clip_val=0.05,
        **settings,
    )
    t.fit(net, DataLoader(data, 4, sampler=sampler))
    ranks: list[Any] = [None, None]
    torch.distributed.all_gather_object(ranks, {key: value.tolist() for key, value in net.state_dict().items()})
    return {"ranks": ranks}


def painter(name: str, root: Path) -> dict[str, Any]:
    """Of a decoder of the technique's own: whether ranks have the same, it has moved, and each rank painted what is its own."""
    technique: Any = case_of(name).active()
    fit("vit", lambda: [technique], max_steps=1, **DDP)
    first = parameters_to_vector(technique._painter.decoder.parameters()).detach()
    technique = case_of(name).active()
    fit("vit", lambda: [technique], max_steps=4, accumulate_grad_batches=2, **DDP)
    last = parameters_to_vector(technique._painter.decoder.parameters()).detach()
    own = _agreed(float(technique._last))
    return {"alike": _same_on_all_ranks(last), "moved": not torch.equal(first, last), "own": own[0] != own[1]}


def trajectory(name: str, root: Path) -> dict[str, Any]:
    """SAF on ranks whose samples change from epoch to epoch: what both end with, and how many samples came from the other."""
    from lightning_eff import SAF
    from tests.optim.sharpness.test_saf import Plain, Turns

    class Mine(Turns):
        """Of each 8 of the order, 4 for each rank."""

        def order(self, epoch: int) -> list[int]:
            return torch.tensor(super().order(epoch)).view(-1, 2, 4)[:, int(os.environ["RANK"])].flatten().tolist()

        def __len__(self) -> int:
            return self.size // 2

    pl.seed_everything(3, verbose=False)
    net, technique, sampler = Plain(), SAF(weight=3.0, lag=1, start=0.0), Mine(32)
    settings: dict[str, Any] = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
    trainer(technique, max_epochs=4, **settings).fit(net, DataLoader(Samples("classifier", 32), 4, sampler=sampler))
    return {
        "weights": _agreed(flat(net).tolist()),
        "known": _agreed(float(technique.report()["known"])),
        "moved": len(set(sampler.order(3)) - set(sampler.order(2))),
    }


def plugins(name: str, root: Path) -> dict[str, Any]:
    """Train and resume with a precision plugin; whether ranks end alike, and otherwise than without it."""
    case = PLUGINS[name]
    precision = case.precisions[0]
    directory = root / name

    def build() -> list[Any]:
        return [ExactResume()]

    def run(**kwargs: Any) -> Any:
        return fit("tiny_gpt", build, plugins=[case.build(precision)], **DDP, **kwargs)

    net, t = run(directory=directory)
    whole = final_state(net, t)
    torch.distributed.barrier()
    again = final_state(*run(resume=checkpoints(directory)[6]))
    found: list[Any] = [None, None]
    torch.distributed.all_gather_object(found, differences(whole, again))
    plain, _ = fit("tiny_gpt", build, precision=precision, **DDP)  # pyright: ignore[reportArgumentType]
    return {
        "alike": _same_on_all_ranks(flat(net).float()),
        "finite": bool(flat(net).isfinite().all()),
        "differences": found,
        "acts": not torch.equal(flat(net), flat(plain)),
    }


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    directory, job, *names = sys.argv[1:]
    root = Path(directory)
    result = {name: globals()[job](name, root) for name in names}
    if torch.distributed.get_rank() == 0:
        (root / "result.json").write_text(json.dumps(result))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
