"""``low-memory``: train with less memory."""

from lightning_eff._core.search_space import RunProfile
from lightning_eff.recipes.parts import Choices, Pick, Recipe, Skip
from lightning_eff.recipes.profile import Profile, Rates
from lightning_eff.recipes.shipped.pieces import LARGE_VOCABULARY, fused_head


def _fits(profile: Profile) -> str | None:
    return None if profile.parameters else "it has no parameters"


def _choose(profile: Profile, variant: str) -> Choices:
    if profile.run.num_blocks < 2:
        yield Skip("Rematerialization", "there are no repeated blocks to recompute")
    else:
        yield Pick(
            "Rematerialization", {"policy": "full"}, "blocks are recomputed in the backward pass; gradients are equal"
        )
    yield from fused_head(profile, LARGE_VOCABULARY, "the logits are never stored")
    if variant == "fast":
        yield Pick("EightBitOptimizer", {}, "optimizer states take a quarter of the memory, and are rounded")
        if profile.run.num_blocks < 2:
            yield Pick("ActivationCompression", {"bits": 8}, "stored activations take 8 bits; gradients get some noise")
        else:
            yield Skip("ActivationCompression", "recomputed blocks store next to nothing that it could compress")


RECIPE = Recipe(
    name="low-memory",
    version=1,
    about="Train with less memory.",
    variants={
        "safe": "Blocks are recomputed, and logits are never stored. The gradients stay equal up to rounding.",
        "fast": "In addition, optimizer states are kept in 8 bits, and activations if there are no blocks to recompute.",
    },
    fits=_fits,
    choose=_choose,
    example=Profile(
        module="a GPT",
        run=RunProfile(num_blocks=12, num_matrices=48, accelerator="cpu"),
        stack="blocks",
        vocabulary=50_304,
        parameters=124_000_000,
        rates=Rates("AdamW", 6e-4, scheduled=True),
        steps=100_000,
    ),
)
