"""The findings before a search: the profile, the techniques that may be tried, and why others are left out."""

from dataclasses import dataclass

from lightning_eff.tune.config import Recipes
from lightning_eff.tune.inspection import profiling
from lightning_eff.tune.space import Space


@dataclass(frozen=True)
class Look:
    """The findings before the search.

    Attributes:
        found: the profile of the baseline.
        space: the techniques that may be tried, those that may not, and why.
        recipes: writes choices from the space as configs.
    """

    found: profiling.Found
    space: Space
    recipes: Recipes

    def lines(self) -> list[str]:
        """Describe the findings for people."""
        space = self.space
        lines = ["The module", *(f"  {line}" for line in profiling.describe(self.found))]
        lines += ["", "The baseline's own settings"]
        lines += [f"  {one.describe()}" for one in space.own]
        lines += [f"  {name}: not searched, because {why}" for name, why in space.own_left_out.items()]
        if not self.recipes.scheduled:
            lines.append(
                "  the module's learning rate does not decay, which makes a weak baseline; every arm uses LearningRateSchedule"
                " with a linear decay to zero instead"
            )
        lines += ["", f"Techniques to try, at most {space.most} together ({len(space.techniques)})"]
        lines += [f"  {one.describe()}" for one in space.techniques.values()] or ["  none"]
        lines += ["", f"Techniques left out ({len(space.left_out)})"]
        return lines + [f"  {name}: {why}" for name, why in sorted(space.left_out.items())]
