"""``cnn``: train a convolutional network on images."""

from lightning_eff._core.search_space import RunProfile
from lightning_eff.recipes.parts import Choices, Pick, Recipe, Skip
from lightning_eff.recipes.profile import Profile, Rates
from lightning_eff.recipes.shipped.pieces import soap

_SMALLEST = 32  # pixels of an image that still shows something at half the side


def _fits(profile: Profile) -> str | None:
    if profile.convolutions < 2:
        return "it has fewer than two convolutions whose windows overlap"
    if profile.data and profile.run.image_side is None:
        return "its batches hold no images"
    return None


def _choose(profile: Profile, variant: str) -> Choices:
    yield Pick("ChannelsLast", {}, "convolutions read channels-last images; equal up to rounding")
    yield from soap(profile)
    if variant == "fast":
        yield from _sizes(profile)


def _sizes(profile: Profile) -> Choices:
    side = profile.run.image_side
    if side is not None and side < _SMALLEST:
        yield Skip("ProgressiveResizing", f"images of {side} pixels are too small to train on smaller ones")
    else:
        told = "images are small for the first half of the run, and full from 80 % on"
        yield Pick("ProgressiveResizing", {"scale": 0.5, "until": 0.8}, told)


RECIPE = Recipe(
    name="cnn",
    version=1,
    about="Train a convolutional network on images.",
    variants={
        "safe": "Channels-last memory order, and SOAP for the convolutions and hidden matrices.",
        "fast": "In addition, small images early in the run.",
    },
    fits=_fits,
    choose=_choose,
    example=Profile(
        module="a ResNet",
        run=RunProfile(num_blocks=4, num_matrices=52, image_side=224, accelerator="cpu"),
        stack="layer3",
        convolutions=20,
        parameters=25_000_000,
        rates=Rates("SGD", 0.1, scheduled=True),
        data=True,
        steps=100_000,
    ),
    reads_data=frozenset(("safe", "fast")),
)
