"""Compare what ``advise`` recommends with a separate, longer measurement of the same change.

    python -m benchmarks.advised [CASE ...] [--minutes 3] [--long 3]
    python -m benchmarks.advised page

For each case it asks ``advise`` for ``--minutes``. Then it trains the plain run and the recommended one for about ``--long``
minutes in all. Both alternate in stretches of new fits, in the order A B, B A, ..., so whatever slows the machine slows them
alike. A stretch leaves out its first batches. Processor time of the process is counted. Where a loader's workers load the
data, wall-clock time is counted instead, because the plain run sleeps or works while the recipe's main process waits.

Where nothing is recommended, the trial that came closest is measured, so that a missed gain shows.
Cases of published packages need the environment of ``make published``, and are skipped without it. Results go to
``benchmarks/results/advised.json`` after each case, and the table to ``docs/advise.md`` at the end.
"""

import argparse
import importlib
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from typing_extensions import override

from benchmarks.machine import described
from benchmarks.shipped.page import filled
from lightning_eff import advise
from lightning_eff._core._lightning.names import like
from lightning_eff._core._lightning.undisturbed import undisturbed
from lightning_eff.advice._running.subject import Change, made
from lightning_eff.advice.advising import Advice
from lightning_eff.advice.outcomes import GAIN
from lightning_eff.bench.reports.intervals import paired_ratio

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "advised.json", ROOT / "docs" / "advise.md"
WARM_UP = 12  #: batches of a stretch that are not counted
STRETCH = 4.0  #: seconds of a stretch that are counted, about
WITHIN = 0.05  #: how far apart the two figures may be

# -- modules


def _decayed(module: pl.LightningModule, optimizer: torch.optim.Optimizer) -> Any:
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 10_000)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": decay, "interval": "step"}}


class HuggingFace(pl.LightningModule):
    """GPT-2 with random weights."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            n_embd=128, n_layer=4, n_head=4, n_positions=128, vocab_size=8000, bos_token_id=0, eos_token_id=0
        )
        self.model = GPT2LMHeadModel(config)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch[0], labels=batch[0]).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return _decayed(self, torch.optim.AdamW(self.parameters(), 1e-3))


class Images(Dataset[Any]):
    """Images whose loading takes planted time."""

    def __init__(self, seconds: float) -> None:
        self.images, self.seconds = torch.randn(512, 3, 32, 32, generator=torch.Generator().manual_seed(0)), seconds

    def __len__(self) -> int:
        return 16 * len(self.images)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return self.images[index % len(self.images)], index % 10


class Convolutions(pl.LightningModule):
    """A small CNN."""

    def __init__(self) -> None:
        super().__init__()
        layers = [m for i, o in ((3, 32), (32, 64)) for m in (nn.Conv2d(i, o, 3, 2, 1), nn.BatchNorm2d(o), nn.ReLU())]
        self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return _decayed(self, torch.optim.SGD(self.parameters(), 0.05, momentum=0.9))


class Attention(nn.Module):
    """Causal attention as tutorials write it."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class HandWritten(pl.LightningModule):
    """A decoder of two blocks with attention by hand."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(200, dim), nn.Linear(dim, 200)
        self.norms, self.attention = (
            nn.ModuleList(nn.LayerNorm(dim) for _ in range(2)),
            nn.ModuleList(Attention(dim, 4) for _ in range(2)),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embed(batch[0])
        for norm, attention in zip(self.norms, self.attention, strict=True):
            x = x + attention(norm(x))
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return _decayed(self, torch.optim.AdamW(self.parameters(), 1e-3))


class Product(pl.LightningModule):
    """Matrix products and a fused optimizer: there is nothing to gain."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[0])

    def configure_optimizers(self) -> Any:
        return _decayed(self, torch.optim.AdamW(self.parameters(), 1e-3, fused=True))


def _tokens(vocabulary: int, length: int, size: int) -> DataLoader[Any]:
    ids = torch.randint(vocabulary, (512, length), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(ids), size, shuffle=True)


@dataclass(frozen=True)
class Case:
    """A run that is advised.

    Attributes:
        about: what it is.
        planted: the change that must be found; "" where nothing must, "-" where nothing is planted.
        build: makes the module and its training loader.
    """

    about: str
    planted: str
    build: Callable[[], tuple[Any, Any]]


def _published(name: str) -> Case:
    """A module of a published package, as ``tests/published`` builds it."""

    def build() -> tuple[Any, Any]:
        return importlib.import_module("tests.published.outcomes").package(name).build()

    return Case(f"the module of {name.replace('_', '-')}", "-", build)


CASES: dict[str, Case] = {
    "gpt2": Case("GPT-2 of Hugging Face, 4 blocks of width 128", "-", lambda: (HuggingFace(), _tokens(8000, 128, 8))),
    "slow_loader": Case(
        "a CNN whose loader takes 2 ms per sample",
        "loader",
        lambda: (Convolutions(), DataLoader(Images(2e-3), 16, shuffle=True)),
    ),
    "by_hand": Case("attention by hand, 256 tokens", "FusedAttention", lambda: (HandWritten(), _tokens(200, 256, 8))),
    "nothing": Case(
        "matrix products with a fused optimizer",
        "",
        lambda: (Product(), DataLoader(TensorDataset(torch.randn(1024, 32, 512)), 32)),
    ),
    **{name: _published(name) for name in ("litgpt", "chemprop", "darts", "neuralforecast", "scvi_tools")},
}

# -- the long measurement


class Stretch(pl.Callback):
    """Times a fit from one batch to another."""

    def __init__(self, batches: int, clock: Callable[[], float]) -> None:
        self.batches, self.clock, self.seen = batches, clock, 0
        self.began = self.seconds = 0.0

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.seen += 1
        if self.seen == WARM_UP:
            self.began = self.clock()
        elif self.seen == WARM_UP + self.batches:
            self.seconds = self.clock() - self.began
            trainer.should_stop = True


def _trainer(module: Any, *callbacks: Any, **settings: Any) -> Any:
    cls = like(module, pl.Trainer)
    kind: Any = type("Stretch", (Stretch, like(module, pl.Callback)), {}) if cls is not pl.Trainer else None
    every = [kind(one.batches, one.clock) if kind and isinstance(one, Stretch) else one for one in callbacks]
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    validation = {"limit_val_batches": 0, "num_sanity_val_steps": 0}
    return cls(accelerator="cpu", devices=1, max_epochs=-1, callbacks=every, **quiet, **validation, **settings)


def stretch(case: Case, change: Change, batches: int, clock: Callable[[], float]) -> float:
    """Seconds of so many batches of a new fit."""
    pl.seed_everything(0, verbose=False)
    with redirect_stdout(StringIO()), undisturbed():
        module, data = case.build()
        plugins = {"plugins": [made(one) for one in change.plugins]} if change.plugins else {}
        own = [made(one) for one in change.callbacks]
        trainer = _trainer(module, *own, Stretch(batches, clock), **change.trainer, **plugins)
        trainer.fit(module, data)
        return trainer.callbacks[-1].seconds


def measured(case: Case, change: Change, step_seconds: float, seconds: float) -> list[tuple[float, float]]:
    """Seconds of stretches with and without a change, in pairs, for about so many seconds in all."""
    workers = any("Loader" in str(one["class_path"]) for one in change.callbacks)
    clock = time.perf_counter if workers else time.process_time
    batches, pairs, until = (
        max(round(STRETCH / step_seconds), 10),
        list[tuple[float, float]](),
        time.monotonic() + seconds,
    )
    while len(pairs) < 4 or time.monotonic() < until:
        order = (change, Change()) if len(pairs) % 2 else (Change(), change)
        found = {one is change: stretch(case, one, batches, clock) for one in order}
        pairs.append((found[True], found[False]))
    return pairs


# -- a case


def _closest(advice: Advice) -> tuple[Change, str, Any] | None:
    """The change that is measured again: the recommended stack, or else the exact trial that came closest to a gain."""
    if advice.stack.gains:
        return advice.stack.change, " + ".join(one.name for one in advice.stack.trials), advice.stack.speed
    able = [one for one in advice.trials if one.speed is not None and one.kind == "exact" and one.trial.recipe]
    best = max(able, key=lambda one: one.speed.estimate if one.speed else 0.0, default=None)
    return None if best is None else (best.trial.change, best.trial.name, best.speed)


def compared(name: str, minutes: float, long: float) -> dict[str, Any]:
    """The record of a case."""
    case = CASES[name]
    module, data = case.build()
    since = time.monotonic()
    advice = advise(module, data, trainer=_trainer(module), minutes=minutes, progress=False)
    found: dict[str, Any] = {
        "about": case.about,
        "planted": case.planted,
        "minutes": minutes,
        "long_minutes": long,
        "seconds": time.monotonic() - since,
        "first_ratio_seconds": advice.found.first,
        "headline": advice.headline,
        "gains": advice.stack.gains,
        "problems": [one.name for one in advice.problems],
        "load": os.getloadavg()[0],
    }
    if (closest := _closest(advice)) is None:
        return found
    change, found["change"], speed = closest
    pairs = measured(case, change, advice.found.view.step_seconds, 60 * long)
    ratio = paired_ratio(pairs)
    assert ratio is not None and speed is not None
    return {
        **found,
        "advised": asdict(speed),
        "long": asdict(ratio),
        "apart": speed.estimate / ratio.estimate - 1,
        "pairs": pairs,
    }


# -- the page


def table(results: dict[str, Any]) -> str:
    """The table of the page."""
    machine = results["machine"]
    given = [one["minutes"] for one in results["cases"].values() if "long" in one]
    minutes = " to ".join(f"{one:g}" for one in sorted({min(given), max(given)}))
    lines = [
        f"`advise` had {minutes} min for each run, on {machine['threads']} thread of {machine['cpus']} cores"
        f" (torch {machine['torch']}). The long measurement alternates new fits of the plain and the recommended run. It counts"
        " processor time, or wall-clock time if workers load the data.",
        "",
        "| run | first ratio after | advice | advised | long measurement | apart |",
        "|---|---|---|---|---|---|",
    ]
    for one in results["cases"].values():
        if "long" not in one:
            continue
        advised, ratio = (
            f"{r['estimate']:.2f} [{r['low']:.2f}, {r['high']:.2f}]" for r in (one["advised"], one["long"])
        )
        told = f"`{one['change']}`" if one["gains"] else f"nothing; closest: `{one['change']}`"
        first = f"{one['first_ratio_seconds']:.0f} s" if one["first_ratio_seconds"] is not None else "–"
        lines.append(f"| {one['about']} | {first} | {told} | {advised} | {ratio} | {100 * one['apart']:+.0f} % |")
    apart = [abs(one["apart"]) for one in results["cases"].values() if "apart" in one]
    busy = max((one["load"] for one in results["cases"].values()), default=0.0)
    near = sum(each <= WITHIN for each in apart)
    lines += ["", f"{near} of {len(apart)} figures agree within {100 * WITHIN:.0f} %."]
    if busy > machine["cpus"] + 1:
        lines[-1] += f" Other programs kept the machine busy meanwhile (a load of up to {busy:.0f})."
    lines[-1] += " `python -m benchmarks.advised` repeats this."
    return "\n".join(lines)


def write_page() -> None:
    """Write the table from the committed results."""
    PAGE.write_text(page())


def page() -> str:
    """The page with the table of the committed results."""
    return filled(PAGE.read_text(), "advised", table(json.loads(RESULTS.read_text())))


def missed(results: dict[str, Any]) -> list[str]:
    """The cases in which a planted gain was not found, or one was found where none is."""
    found = []
    for name, one in results["cases"].items():
        advised = one.get("change", "") if one["gains"] else ""
        fits = {"-": True, "": not one["gains"], "loader": "Loader" in advised or "num_workers" in advised}
        overlooked = not one["gains"] and one.get("long", {}).get("low", 1.0) > GAIN
        if overlooked or not fits.get(one["planted"], one["planted"] in advised):
            found.append(name)
    return found


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; all by default; page writes only the table")
    parser.add_argument("--minutes", type=float, default=3.0, help="for each advice")
    parser.add_argument("--long", type=float, default=3.0, help="minutes of each long measurement")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args(argv)
    if asked.cases == ["page"]:
        return write_page()
    if unknown := set(asked.cases) - {*CASES}:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    before = json.loads(asked.out.read_text())["cases"] if asked.out.is_file() and asked.cases else {}
    results = {
        "schema": 1,
        "machine": described(),
        "cases": before,
    }
    for name in asked.cases or CASES:
        try:
            results["cases"][name] = one = compared(name, asked.minutes, asked.long)
        except ModuleNotFoundError as error:
            print(f"{name}: skipped, because {error.name} is not installed.")
            continue
        print(f"{name}: {one['headline']} Long measurement: {one.get('long')}", flush=True)
        asked.out.write_text(json.dumps(results, indent=1) + "\n")
    for name in missed(results):
        print(f"MISSED: {name}")
    if asked.out == RESULTS:
        write_page()


if __name__ == "__main__":
    main(sys.argv[1:])
