"""Choices that several recipes share."""

from typing import Any

from lightning_eff.recipes.parts import Choices, Pick, Skip
from lightning_eff.recipes.profile import Profile

#: Steps or seconds from which on a run counts as long.
LONG = (10_000, 3600.0)
#: Steps or seconds below which stages and compilation do not pay for themselves.
SHORT = (200, 10.0)
#: Entries of a vocabulary whose logits are a large part of a step's memory.
LARGE_VOCABULARY = 16_384
#: Entries of a vocabulary whose logits at positions without a label are worth skipping.
SKIPPED_VOCABULARY = 1024


def of_text(profile: Profile) -> str | None:
    """Why a module is no language model."""
    if not profile.vocabulary:
        return "it has no nn.Embedding, so it reads no tokens"
    if profile.run.num_blocks < 2:
        return "it has no stack of repeated blocks"
    if profile.data and profile.run.sequence_length is None:
        return "its batches hold no sequences of tokens"
    return None


def is_short(profile: Profile) -> bool:
    """Whether the run is known to be short, as those of the reference tasks are."""
    return profile.is_long(*LONG) is False


def muon(profile: Profile, short_lr: float, short_momentum: float) -> Choices:
    """Muon for the hidden matrices: its authors' settings, or those that won on a reference task if the run is short."""
    if not profile.run.num_matrices:
        yield Skip("ReplaceOptimizer", "the module has no hidden matrix")
        return
    if is_short(profile):
        settings, why = {"lr": short_lr, "momentum": short_momentum, "weight_decay": 0.15}, "settings for a short run"
    else:
        settings, why = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1}, "settings for a long run"
    yield Pick(
        "ReplaceOptimizer",
        {"optimizer": {"class_path": "lightning_eff.Muon", "init_args": {**settings, "cautious": False}}},
        f"Muon trains the {profile.run.num_matrices} hidden matrices, and your optimizer the rest; {why}",
    )


def soap(profile: Profile) -> Choices:
    """SOAP for the hidden matrices, at the module's own learning rate."""
    if not profile.run.num_matrices:
        yield Skip("ReplaceOptimizer", "the module has no hidden matrix")
        return
    rate = profile.adam_rate
    lr = 3e-3 if rate is None else rate
    which = "SOAP's default, because yours is not of Adam's kind" if rate is None else "your own"
    yield Pick(
        "ReplaceOptimizer",
        {"optimizer": {"class_path": "lightning_eff.SOAP", "init_args": {"lr": lr, "weight_decay": 0.1}}},
        f"SOAP trains the {profile.run.num_matrices} hidden matrices, and your optimizer the rest; learning rate: {which}",
    )


def fused_head(profile: Profile, least: int, why: str) -> Choices:
    """The output layer and its loss together, where the vocabulary has at least ``least`` entries."""
    if profile.vocabulary >= least:
        yield Pick("FusedLinearCrossEntropy", {}, f"{why} (vocabulary of {profile.vocabulary:,}); exact up to rounding")
        return
    few = f"a vocabulary of {profile.vocabulary:,}" if profile.vocabulary else "no vocabulary"
    yield Skip("FusedLinearCrossEntropy", f"the module has {few}, and it pays from {least:,} entries on")


def growth(profile: Profile) -> Choices:
    """Half of the blocks for the first 30 % of the run."""
    blocks = profile.run.num_blocks
    if blocks < 4:
        yield Skip("ProgressiveStacking", f"{blocks or 'no'} repeated blocks are too few to begin with half of them")
    elif profile.is_long(*SHORT) is False:
        yield Skip("ProgressiveStacking", f"the run is too short ({_length(profile)}) to train in stages")
    else:
        half = blocks // 2
        stages: list[list[Any]] = [[0.0, half], [0.3, blocks]]
        yield Pick(
            "ProgressiveStacking", {"stages": stages}, f"{half} of {blocks} blocks run for the first 30 % of the run"
        )


def compiled(profile: Profile) -> Choices:
    """Compiled blocks, on a GPU and in a long run."""
    if not profile.cuda:
        yield Skip("RegionalCompilation", "on a CPU, compiling costs more time than runs of minutes save")
    elif profile.run.num_blocks < 2:
        yield Skip("RegionalCompilation", "there are no repeated blocks to compile")
    elif profile.is_long(1000, 600.0) is False:
        yield Skip("RegionalCompilation", f"the run is too short ({_length(profile)}) to pay for compiling")
    else:
        yield Pick("RegionalCompilation", {}, "the blocks run as fused kernels; equal up to rounding")


def _length(profile: Profile) -> str:
    return f"{profile.steps:,} steps" if profile.steps is not None else f"{profile.seconds:g} s"
