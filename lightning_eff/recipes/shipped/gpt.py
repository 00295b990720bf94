"""``gpt``: pretrain a decoder-only language model."""

from lightning_eff._core.search_space import RunProfile
from lightning_eff.recipes.parts import Choices, Recipe
from lightning_eff.recipes.profile import Profile, Rates
from lightning_eff.recipes.shipped.pieces import LARGE_VOCABULARY, compiled, fused_head, growth, muon, of_text


def _fits(profile: Profile) -> str | None:
    if profile.data and profile.run.masked_labels:
        return "most of its labels are -100, so it is a masked language model: use masked-lm"
    return of_text(profile)


def _choose(profile: Profile, variant: str) -> Choices:
    yield from muon(profile, short_lr=0.03, short_momentum=0.9)
    yield from fused_head(profile, LARGE_VOCABULARY, "the logits are never stored")
    if variant == "fast":
        yield from growth(profile)
        yield from compiled(profile)


RECIPE = Recipe(
    name="gpt",
    version=1,
    about="Pretrain a decoder-only language model.",
    variants={
        "safe": "Muon for the hidden matrices, and no stored logits for a large vocabulary.",
        "fast": "In addition, half of the blocks for the first 30 % of the run, and compiled blocks on a GPU.",
    },
    fits=_fits,
    choose=_choose,
    example=Profile(
        module="a GPT",
        run=RunProfile(num_blocks=12, num_matrices=48, accelerator="cuda"),
        stack="blocks",
        vocabulary=50_304,
        parameters=124_000_000,
        rates=Rates("AdamW", 6e-4, scheduled=True),
        steps=100_000,
    ),
    reads_data=frozenset(("safe", "fast")),
)
