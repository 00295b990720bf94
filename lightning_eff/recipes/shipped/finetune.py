"""``finetune``: fine-tune a pretrained model with LoRA on a quantised base."""

from lightning_eff._core.search_space import RunProfile
from lightning_eff.recipes.parts import Choices, Pick, Recipe
from lightning_eff.recipes.profile import Profile, Rates


def _fits(profile: Profile) -> str | None:
    return None if profile.run.num_matrices else "it has no linear layer to adapt"


def _choose(profile: Profile, variant: str) -> Choices:
    bits, kind = (8, "int8") if variant == "safe" else (4, "NF4")
    told = "factors train on frozen layers: use 3 to 10 times the learning rate, and also=['head'] for a new head"
    yield Pick("LoRA", {"rank": 8}, told)
    yield Pick("QuantizedBase", {"bits": bits}, f"the frozen linear layers are kept in {kind}")


RECIPE = Recipe(
    name="finetune",
    version=1,
    about="Fine-tune a pretrained model with LoRA on a quantised base.",
    variants={
        "safe": "LoRA, with the frozen linear layers in 8 bits.",
        "fast": "LoRA, with the frozen linear layers in 4 bits: the least memory, and a larger rounding error.",
    },
    fits=_fits,
    choose=_choose,
    example=Profile(
        module="a pretrained Llama",
        run=RunProfile(num_blocks=16, num_matrices=112, accelerator="cpu"),
        stack="model.layers",
        vocabulary=128_256,
        parameters=1_200_000_000,
        rates=Rates("AdamW", 2e-4, scheduled=True),
        steps=1000,
    ),
)
