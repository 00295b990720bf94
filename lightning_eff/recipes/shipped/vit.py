"""``vit``: train a vision transformer."""

from lightning_eff._core.search_space import RunProfile
from lightning_eff.recipes.parts import Choices, Pick, Recipe
from lightning_eff.recipes.profile import Profile, Rates
from lightning_eff.recipes.shipped.pieces import soap


def _fits(profile: Profile) -> str | None:
    if profile.vocabulary:
        return "it has an nn.Embedding, so it reads tokens"
    if profile.run.num_blocks < 2:
        return "it has no stack of repeated blocks"
    if profile.convolutions >= profile.run.num_blocks:
        return "it has overlapping convolutions, so it is a convolutional network: use cnn"
    if profile.data and profile.run.image_side is None:
        return "its batches hold no images"
    return None


def _choose(profile: Profile, variant: str) -> Choices:
    yield from soap(profile)
    if variant == "fast":
        yield Pick(
            "PatchDropout", {"ratio": 0.25, "until": 0.9}, "a quarter of the patches is left out until 90 % of the run"
        )


RECIPE = Recipe(
    name="vit",
    version=1,
    about="Train a vision transformer.",
    variants={
        "safe": "SOAP for the hidden matrices.",
        "fast": "In addition, a quarter of the patches is left out until 90 % of the run.",
    },
    fits=_fits,
    choose=_choose,
    example=Profile(
        module="a ViT",
        run=RunProfile(num_blocks=12, num_matrices=48, image_side=224, accelerator="cpu"),
        stack="blocks",
        parameters=86_000_000,
        rates=Rates("AdamW", 1e-3, scheduled=True),
        data=True,
        steps=100_000,
    ),
    reads_data=frozenset(("safe", "fast")),
)
