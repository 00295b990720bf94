"""``lightning-eff select``: choose the samples of a data set before training, and write their indices."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_eff._cli.errors import Arguments, UsageError, check_configs, told
from lightning_eff.data.selection._offline.files import SUFFIXES, save

_DESCRIPTION = """\
Choose samples of a data set before training, and write their indices for SampleSubset.

  lightning-eff select dsir --raw crawl.txt --target books.txt --keep 0.1 --out kept.npz
      choose lines similar to a target text, by importance resampling over hashed n-grams (DSIR)
  lightning-eff select prune --config recipe.yaml --score prototypes --keep 0.5 --out kept.json
      choose samples that are hard (or easy) for a config's module, with one pass over the data: prototypes, el2n, grand

More: lightning-eff select dsir --help, lightning-eff select prune --help
"""
_DSIR = """\
DSIR (Xie et al. 2023). Each line of the raw text is a document. Sample i of the data set is line i of the files in the given
order, starting at 0. The command draws documents without replacement. A document is more likely to be drawn if its words and
word pairs are more frequent in the target text than in the raw text. The raw text is read twice, on all cores. After an
interruption, the same command continues."""
_PRUNE = """\
Score each sample of a config's training data as DataPruning does, and keep the hardest or the easiest. The module has its
initial weights or those of a checkpoint. Nothing is trained."""


def main(argv: Sequence[str], *, debug: bool = False) -> None:
    """Run the command on ``argv``, the arguments after ``select``; ``debug`` lets every error through with its traceback.

    Raises:
        SystemExit: with status 2 if the arguments, the config or the texts are wrong, 130 if interrupted.
    """
    with told("lightning-eff select", debug=debug, interrupted="Interrupted. Run the same command to continue."):
        _run([*argv])


def _run(argv: list[str]) -> None:
    kinds = {"dsir": _dsir, "prune": _prune}
    if not argv or argv[0] in ("-h", "--help"):
        print(_DESCRIPTION, end="")
        return
    if argv[0] not in kinds:
        raise UsageError(f"got {argv[0]!r}; expected dsir or prune. More: lightning-eff select --help")
    kinds[argv[0]](argv[1:])


def parser(kind: str) -> Arguments:
    """Build the parser of ``lightning-eff select dsir`` or ``prune``."""
    return {"dsir": _dsir_options, "prune": _prune_options}[kind]()


def _options(kind: str, description: str) -> Arguments:
    options = Arguments(
        f"lightning-eff select {kind}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--out", required=True, type=Path, metavar="FILE", help="file for the indices, .json or .npz")
    options.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    options.add_argument("--quiet", action="store_true", help="show no progress")
    return options


def _checked_out(out: Path) -> None:
    if out.suffix not in SUFFIXES:
        raise UsageError(f"--out {out}: expected a name that ends in {' or '.join(SUFFIXES)}.")


# -- text


def _dsir_options() -> Arguments:
    options = _options("dsir", _DSIR)
    add = options.add_argument
    several: dict[str, Any] = {"nargs": "+", "required": True, "metavar": "FILE"}
    add("--raw", **several, help="text to choose from, one document per line, or per object in .jsonl files")
    add("--target", **several, help="text that the chosen documents should resemble")
    add("--keep", required=True, type=float, help="documents to keep: a fraction below 1, or a number")
    add("--field", default="text", help="field of the objects in .jsonl files (default: text)")
    add("--buckets", type=int, default=10_000, help="number of hash buckets for features (default: 10000)")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    add("--jobs", type=int, default=cores, help="processes (default: one per core)")
    add(
        "--config",
        action="append",
        default=[],
        metavar="CONFIG",
        help="training config; its data set must match the text",
    )
    return options


def _dsir(argv: Sequence[str]) -> None:
    """Choose documents."""
    asked = _dsir_options().parse_args(argv)
    _checked_out(asked.out)
    for path in (*asked.raw, *asked.target):
        if not Path(path).is_file():
            raise UsageError(f"{path}: no such file. Pass the path of a text file.")
    for name, least in (("buckets", 2), ("jobs", 1)):
        if getattr(asked, name) < least:
            raise UsageError(f"--{name} {getattr(asked, name)}: expected a number >= {least}.")
    if asked.keep <= 0 or (asked.keep >= 1 and asked.keep != int(asked.keep)):
        raise UsageError(
            f"--keep {asked.keep:g}: expected a fraction in (0, 1), such as 0.1, or a whole number of documents."
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
            f"--raw has {len(weights):,} documents, but the data set of {', '.join(asked.config)} has {size:,} samples. Pass"
            " the texts of the data set in order, so that sample i is document i."
        )
    there = int(np.isfinite(weights).sum())
    count = round(asked.keep * len(weights)) if asked.keep < 1 else int(asked.keep)
    if not 1 <= count <= there:
        raise UsageError(
            f"--keep {asked.keep:g}: this is {count:,} documents, but only {there:,} of {len(weights):,} have words. Keep"
            f" between 1 and {there:,}."
        )
    kept = gumbel_top_k(weights, count, asked.seed)
    save(asked.out, num_samples=len(weights), fingerprint=fingerprint, indices=kept)
    weighing.clear()
    inside, outside = weights[kept].mean(), weights[np.isfinite(weights)].mean()
    print(
        f"kept {count:,} of {len(weights):,} documents in {asked.out} (mean log-weight {inside:.2f}, of all documents"
        f" {outside:.2f})"
    )


def _bar(total: int, *, quiet: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, unit="B", unit_scale=True, disable=quiet, desc="select", file=sys.stderr)


def _data_set(configs: Sequence[str]) -> tuple[int, str]:
    """Return the length and fingerprint of the configs' training data set."""
    from lightning_eff._core import rng
    from lightning_eff.data.selection._offline.files import fingerprint

    trainer, module, data = built(configs, 0)
    source = data if data is not None else module
    if data is not None:
        data.trainer = trainer
        data.prepare_data()
        data.setup("fit")
    loader = source.train_dataloader()
    if not hasattr(getattr(loader, "dataset", None), "__len__"):
        raise UsageError(
            f"--config {', '.join(configs)}: the data set of its training loader ({type(loader).__name__}) has no length. Use"
            " one DataLoader with a map-style data set."
        )
    with rng.keyed(0, "select", "fingerprint"):
        return len(loader.dataset), fingerprint(loader.dataset)


# -- a module's scores


def _prune_options() -> Arguments:
    options = _options("prune", _PRUNE)
    add = options.add_argument
    add(
        "--config",
        action="append",
        required=True,
        metavar="CONFIG",
        help="LightningCLI config; repeat the option to merge",
    )
    add("--keep", required=True, type=float, help="fraction of the samples to keep, in (0, 1)")
    add("--score", default="prototypes", choices=("prototypes", "el2n", "grand", "random"))
    add("--easy", action="store_true", help="keep the easiest samples instead of the hardest")
    add("--balance", type=float, default=0.0, help="balance between classes, from 0 (none) to 1 (full) (default: 0)")
    add("--clusters", type=int, default=10, help="number of clusters of prototypes (default: 10)")
    add("--head", metavar="PATH", help="path of the module's last nn.Linear, if it is not found")
    add(
        "--gradients",
        default="head",
        choices=("head", "all"),
        help="parameters for the gradients of grand (default: head)",
    )
    add("--scores", type=Path, metavar="FILE", help="also write each sample's score, for DataPruning(score=FILE)")
    add("--ckpt-path", metavar="FILE", help="checkpoint with the weights to load first")
    return options


def _prune(argv: Sequence[str]) -> None:
    """Choose samples by a module's scores."""
    asked = _prune_options().parse_args(argv)
    _checked_out(asked.out)
    if not 0 < asked.keep < 1:
        raise UsageError(f"--keep {asked.keep:g}: expected a fraction of the samples in (0, 1), such as 0.5.")
    trainer, module, data = built(asked.config, asked.seed)

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
        raise RuntimeError(
            "the fit ended before an epoch, so no data was seen. Allow at least one epoch in the config."
        )
    save(asked.out, num_samples=found.num_samples, fingerprint=found.fingerprint, indices=found.kept)
    which = "at random" if asked.score == "random" else f"the {'easiest' if asked.easy else 'hardest'} by {asked.score}"
    print(f"kept {len(found.kept):,} of {found.num_samples:,} samples, {which}, in {asked.out}")


def _load(module: Any, path: str) -> None:
    import torch

    if not Path(path).is_file():
        raise UsageError(f"--ckpt-path {path}: no such file. Pass the path of a checkpoint.")
    module.load_state_dict(torch.load(path, map_location="cpu", weights_only=True)["state_dict"])


def built(configs: Sequence[str], seed: int) -> tuple[Any, Any, Any]:
    """Build the trainer, module and data of ``lightning-eff fit``, without logs and checkpoints."""
    arguments = [argument for path in configs for argument in ("--config", path)]
    check_configs(arguments)
    try:
        from lightning_eff._cli.config import ConfigCLI
    except ModuleNotFoundError as error:
        raise UsageError(
            f'{error.name} is not installed, and LightningCLI needs it. Run: pip install "jsonargparse[signatures]"'
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
