"""``lightning-eff select``: which samples of a data set to train on, chosen before training and written as their indices."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_eff._cli.errors import Arguments, UsageError, check_configs, told
from lightning_eff.data.selection._offline.files import SUFFIXES, save

_DESCRIPTION = """\
Chooses samples of a data set before training, and writes their indices for SampleSubset to train on.

  lightning-eff select dsir --raw crawl.txt --target books.txt --keep 0.1 --out kept.npz
      lines of a text that are like a target text, by importance resampling over hashed n-grams (DSIR)
  lightning-eff select prune --config recipe.yaml --score prototypes --keep 0.5 --out kept.json
      samples of a config's data that its module finds hard (or easy), by one pass: prototypes, el2n, grand

More: lightning-eff select dsir --help, lightning-eff select prune --help
"""
_DSIR = """\
DSIR (Xie et al. 2023): each line of the raw text is a document, and sample i of the data set is line i of the files in their
order, from 0. Documents are drawn without replacement, with chances that follow from how much likelier their words and pairs
of words are in the target text than in the raw one. Reads the raw text twice, in pieces, on all cores; the same command goes on
where it was interrupted."""
_PRUNE = """\
Scores each sample of a config's training data by the module as the config makes it (or as a checkpoint has it), as DataPruning
does, and keeps the hardest or easiest. Nothing is trained."""


def main(argv: Sequence[str], *, debug: bool = False) -> None:
    """``argv`` after ``select``; with ``debug`` every error is raised as it came.

    Raises:
        SystemExit: with status 2 where the arguments, the config or the texts cannot be used, 130 if it was interrupted.
    """
    try:
        with told("lightning-eff select", debug=debug):
            _run([*argv])
    except KeyboardInterrupt:
        print("\nInterrupted; the same command goes on where it was.", file=sys.stderr)
        raise SystemExit(130) from None


def _run(argv: list[str]) -> None:
    kinds = {"dsir": _dsir, "prune": _prune}
    if not argv or argv[0] in ("-h", "--help"):
        print(_DESCRIPTION, end="")
        return
    if argv[0] not in kinds:
        raise UsageError(f"got {argv[0]!r}; expected dsir or prune. More: lightning-eff select --help")
    kinds[argv[0]](argv[1:])


def parser(kind: str) -> Arguments:
    """What ``lightning-eff select dsir`` or ``prune`` takes."""
    return {"dsir": _dsir_options, "prune": _prune_options}[kind]()


def _options(kind: str, description: str) -> Arguments:
    options = Arguments(
        f"lightning-eff select {kind}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--out", required=True, type=Path, metavar="FILE", help="the indices, .json or .npz")
    options.add_argument("--seed", type=int, default=0, help="of what is drawn (default: 0)")
    options.add_argument("--quiet", action="store_true", help="no progress")
    return options


def _checked_out(out: Path) -> None:
    if out.suffix not in SUFFIXES:
        raise UsageError(f"--out {out}: expected a name that ends in {' or '.join(SUFFIXES)}.")


# -- text


def _dsir_options() -> Arguments:
    options = _options("dsir", _DSIR)
    add = options.add_argument
    several: dict[str, Any] = {"nargs": "+", "required": True, "metavar": "FILE"}
    add("--raw", **several, help="text to choose from, a document in each line; of .jsonl, in each object")
    add("--target", **several, help="text that the choice shall be like")
    add("--keep", required=True, type=float, help="how many documents: a share below 1, or a number")
    add("--field", default="text", help="of the objects in .jsonl files (default: text)")
    add("--buckets", type=int, default=10_000, help="that features are hashed into (default: 10000)")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    add("--jobs", type=int, default=cores, help="processes (default: one on each core)")
    add("--config", action="append", default=[], metavar="CONFIG", help="of the training, whose data set is compared")
    return options


def _dsir(argv: Sequence[str]) -> None:
    """Choose documents."""
    asked = _dsir_options().parse_args(argv)
    _checked_out(asked.out)
    for path in (*asked.raw, *asked.target):
        if not Path(path).is_file():
            raise UsageError(f"{path}: there is no such file; expected a text.")
    for name, least in (("buckets", 2), ("jobs", 1)):
        if getattr(asked, name) < least:
            raise UsageError(f"--{name} {getattr(asked, name)}: expected a number >= {least}.")
    if asked.keep <= 0 or (asked.keep >= 1 and asked.keep != int(asked.keep)):
        raise UsageError(
            f"--keep {asked.keep:g}: expected a share in (0, 1), such as 0.1, or a whole number of documents."
        )
    size, fingerprint = _data_set(asked.config) if asked.config else (None, "")

    import numpy as np

    from lightning_eff.data.selection._offline.dsir import Weighing, gumbel_top_k

    weighing = Weighing(
        asked.raw,
        asked.target,
        asked.out.with_name(f"{asked.out.name}.work"),
        field=asked.field,
        buckets=asked.buckets,
        jobs=asked.jobs,
    )
    with _bar(weighing.bytes, quiet=asked.quiet) as bar:
        weighing.tell = lambda what, done: bar.update(done)
        weights = weighing.run()
    if size is not None and size != len(weights):
        raise UsageError(
            f"the raw text has {len(weights):,} documents, and the data set of {', '.join(asked.config)} has {size:,} samples;"
            " expected sample i to be document i. Give the texts that it is made of, in their order."
        )
    there = int(np.isfinite(weights).sum())
    count = round(asked.keep * len(weights)) if asked.keep < 1 else int(asked.keep)
    if not 1 <= count <= there:
        raise UsageError(
            f"--keep {asked.keep:g}: that is {count:,} documents, and {there:,} of {len(weights):,} have any words; expected"
            f" between 1 and {there:,}."
        )
    kept = gumbel_top_k(weights, count, asked.seed)
    save(asked.out, num_samples=len(weights), fingerprint=fingerprint, indices=kept)
    weighing.clear()
    inside, outside = weights[kept].mean(), weights[np.isfinite(weights)].mean()
    print(
        f"kept {count:,} of {len(weights):,} documents, whose log-weight is {inside:.2f} on average, that of all"
        f" {outside:.2f}: {asked.out}"
    )


def _bar(total: int, *, quiet: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, unit="B", unit_scale=True, disable=quiet, desc="select", file=sys.stderr)


def _data_set(configs: Sequence[str]) -> tuple[int, str]:
    """Length and fingerprint of the data set that the configs train on."""
    from lightning_eff._core import rng
    from lightning_eff.data.selection._offline.files import fingerprint

    trainer, module, data = _built(configs, 0)
    source = data if data is not None else module
    if data is not None:
        data.trainer = trainer
        data.prepare_data()
        data.setup("fit")
    loader = source.train_dataloader()
    if not hasattr(getattr(loader, "dataset", None), "__len__"):
        raise UsageError(
            f"--config {', '.join(configs)}: its training loader is a {type(loader).__name__} without a data set that has a"
            " length; expected one DataLoader over a map-style data set."
        )
    with rng.keyed(0, "select", "fingerprint"):
        return len(loader.dataset), fingerprint(loader.dataset)


# -- a module's scores


def _prune_options() -> Arguments:
    options = _options("prune", _PRUNE)
    add = options.add_argument
    add("--config", action="append", required=True, metavar="CONFIG", help="of LightningCLI; several are merged")
    add("--keep", required=True, type=float, help="the share of the samples that is kept, in (0, 1)")
    add("--score", default="prototypes", choices=("prototypes", "el2n", "grand", "random"))
    add("--easy", action="store_true", help="keep the easiest in place of the hardest")
    add("--balance", type=float, default=0.0, help="how much classes are balanced, in [0, 1] (default: 0)")
    add("--clusters", type=int, default=10, help="of prototypes (default: 10)")
    add("--head", metavar="PATH", help="of the module's last nn.Linear, where it is not found")
    add("--gradients", default="head", choices=("head", "all"), help="of grand (default: head)")
    add("--scores", type=Path, metavar="FILE", help="write each sample's score, too, for DataPruning(score=FILE)")
    add("--ckpt-path", metavar="FILE", help="a checkpoint, whose weights are loaded first")
    return options


def _prune(argv: Sequence[str]) -> None:
    """Choose samples by a module's scores."""
    asked = _prune_options().parse_args(argv)
    _checked_out(asked.out)
    if not 0 < asked.keep < 1:
        raise UsageError(f"--keep {asked.keep:g}: expected a share of the samples in (0, 1), such as 0.5.")
    trainer, module, data = _built(asked.config, asked.seed)

    from lightning_eff._cli.scored_subset import Scored, ScoreOnly
    from lightning_eff._core.technique import Technique

    only = ScoreOnly(
        asked.score,
        asked.keep,
        easy=asked.easy,
        balance=asked.balance,
        clusters=asked.clusters,
        head=asked.head,
        gradients=asked.gradients,
        save_as=None if asked.scores is None else str(asked.scores),
    )
    callbacks: list[Any] = trainer.callbacks
    trainer.callbacks = [only, *(c for c in callbacks if not isinstance(c, Technique))]
    if asked.ckpt_path is not None:
        _load(module, asked.ckpt_path)
    try:
        trainer.fit(module, datamodule=data)
    except Scored as scored:
        found = scored
    else:
        raise RuntimeError("lightning-eff select prune: the fit ended without an epoch; expected one, to see its data.")
    save(asked.out, num_samples=found.num_samples, fingerprint=found.fingerprint, indices=found.kept)
    which = "at random" if asked.score == "random" else f"the {'easiest' if asked.easy else 'hardest'} by {asked.score}"
    print(f"kept {len(found.kept):,} of {found.num_samples:,} samples, {which}: {asked.out}")


def _load(module: Any, path: str) -> None:
    import torch

    if not Path(path).is_file():
        raise UsageError(f"--ckpt-path {path}: there is no such file.")
    module.load_state_dict(torch.load(path, map_location="cpu", weights_only=True)["state_dict"])


def _built(configs: Sequence[str], seed: int) -> tuple[Any, Any, Any]:
    """Trainer, module and data that ``lightning-eff fit`` would have, without logs and checkpoints."""
    arguments = [argument for path in configs for argument in ("--config", path)]
    check_configs(arguments)
    try:
        from lightning_eff._cli.config import ConfigCLI
    except ModuleNotFoundError as error:
        raise UsageError(
            f'{error.name} is not installed; LightningCLI needs it. Run: pip install "jsonargparse[signatures]"'
        ) from error

    class Unrun(ConfigCLI):
        def _run_subcommand(self, subcommand: str) -> None:
            pass

    quiet = [
        f"--trainer.{name}=false"
        for name in ("logger", "enable_checkpointing", "enable_model_summary", "enable_progress_bar")
    ]
    settings = [*quiet, "--trainer.devices=1", "--trainer.num_sanity_val_steps=0", f"--seed_everything={seed}"]
    cli = Unrun(["fit", *arguments, *settings], save_config_callback=None)
    return cli.trainer, cli.model, cli.datamodule
