"""``masked-lm``: pretrain an encoder by masked language modelling."""

from lightning_eff._core.search_space import RunProfile
from lightning_eff.recipes.parts import Choices, Pick, Recipe, Skip
from lightning_eff.recipes.profile import Profile, Rates
from lightning_eff.recipes.shipped.pieces import SKIPPED_VOCABULARY, fused_head, growth, is_short, muon, of_text

_MULTIPLE = 8  # of tokens: lengths at which hardware is fast
_START, _END = 0.3, 0.15  # mask rates of the paper
_SHORT_START = 0.4  # which won on the reference task


def _fits(profile: Profile) -> str | None:
    if (why := of_text(profile)) is not None:
        return why
    if profile.data and not profile.run.masked_labels:
        return "most of its labels are predicted, so it is no masked language model: use gpt"
    return None


def _choose(profile: Profile, variant: str) -> Choices:
    yield from muon(profile, short_lr=0.04, short_momentum=0.8)
    yield from fused_head(profile, SKIPPED_VOCABULARY, "rows of the output layer without a label are skipped")
    if variant == "fast":
        yield from growth(profile)
        yield from _length(profile)
        yield from _masks(profile)


def _length(profile: Profile) -> Choices:
    length = profile.run.sequence_length
    if length is None:
        yield Skip("SequenceLengthWarmup", "no batch was looked at, so the length is not known")
    elif length < 8 * _MULTIPLE:
        yield Skip("SequenceLengthWarmup", f"sequences of {length} tokens are too short to begin with a quarter")
    else:
        start = length // 4 - length // 4 % _MULTIPLE
        told = f"sequences grow from {start} to {length} tokens in the first 30 % of the run"
        yield Pick("SequenceLengthWarmup", {"start": start, "until": 0.3}, told)


def _masks(profile: Profile) -> Choices:
    start = _SHORT_START if is_short(profile) else _START
    if not profile.data:
        yield Skip("MaskRateSchedule", "no batch was looked at, so the mask rate is not known")
    elif profile.masked > start:
        why = f"the loader masks {profile.masked:.0%}, and the schedule begins at {start:.0%}"
        yield Skip("MaskRateSchedule", why)
    else:
        told = f"the mask rate falls from {start:.0%} to {_END:.0%}"
        yield Pick("MaskRateSchedule", {"start": start, "end": _END}, told)


RECIPE = Recipe(
    name="masked-lm",
    version=1,
    about="Pretrain an encoder by masked language modelling.",
    variants={
        "safe": "Muon for the hidden matrices, and output rows without a label are skipped for vocabularies from 1,024 on.",
        "fast": "In addition, fewer blocks and shorter sequences early in the run, and a falling mask rate.",
    },
    fits=_fits,
    choose=_choose,
    example=Profile(
        module="a BERT",
        run=RunProfile(num_blocks=12, num_matrices=72, sequence_length=512, masked_labels=True, accelerator="cpu"),
        stack="encoder.layer",
        vocabulary=30_522,
        parameters=110_000_000,
        rates=Rates("AdamW", 1e-4, scheduled=True),
        data=True,
        masked=0.15,
        steps=100_000,
    ),
    reads_data=frozenset(("safe", "fast")),
)
