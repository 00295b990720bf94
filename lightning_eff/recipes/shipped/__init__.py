"""The recipes that come with the package, one file for each."""

from collections.abc import Mapping

from lightning_eff.recipes.parts import Recipe
from lightning_eff.recipes.shipped import cnn, exact, finetune, gpt, low_memory, masked_lm, vit

#: By name.
RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        gpt.RECIPE,
        masked_lm.RECIPE,
        vit.RECIPE,
        cnn.RECIPE,
        finetune.RECIPE,
        low_memory.RECIPE,
        exact.RECIPE,
    )
}
