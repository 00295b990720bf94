"""``exact``: save time and change no number."""

from lightning_eff._core.search_space import RunProfile
from lightning_eff.recipes.parts import Choices, Pick, Recipe, Skip
from lightning_eff.recipes.profile import Profile, Rates
from lightning_eff.recipes.shipped.pieces import LARGE_VOCABULARY, SKIPPED_VOCABULARY, compiled, fused_head


def _fits(profile: Profile) -> str | None:
    return None


def _choose(profile: Profile, variant: str) -> Choices:
    yield Pick("LoaderTuning", {}, "finds loader settings that keep the device busy; batches stay the same bit for bit")
    if variant != "fast":
        return
    if profile.convolutions:
        yield Pick("ChannelsLast", {}, "convolutions read channels-last images; equal up to rounding")
    else:
        yield Skip("ChannelsLast", "the module has no convolution whose windows overlap")
    masked = profile.run.masked_labels
    least, why = (
        (SKIPPED_VOCABULARY, "rows of the output layer without a label are skipped")
        if masked
        else (LARGE_VOCABULARY, "the logits are never stored")
    )
    yield from fused_head(profile, least, why)
    if profile.cuda and profile.run.num_blocks:
        yield Pick("FusedNorms", {}, "norms run as one kernel each; equal up to rounding")
    else:
        yield Skip("FusedNorms", "its kernels run only on CUDA, in repeated blocks")
    yield from compiled(profile)


RECIPE = Recipe(
    name="exact",
    version=1,
    about="Save time and change no number.",
    variants={
        "safe": "Loader settings only. Losses and weights stay the same bit for bit.",
        "fast": "In addition, faster kernels and memory orders. Losses and weights are equal up to rounding.",
    },
    fits=_fits,
    choose=_choose,
    example=Profile(
        module="a masked language model",
        run=RunProfile(num_blocks=12, num_matrices=72, sequence_length=512, masked_labels=True, accelerator="cuda"),
        stack="encoder.layer",
        vocabulary=30_522,
        parameters=110_000_000,
        rates=Rates("AdamW", 1e-4, scheduled=True),
        data=True,
        masked=0.15,
        steps=100_000,
    ),
    reads_data=frozenset(("fast",)),
)
