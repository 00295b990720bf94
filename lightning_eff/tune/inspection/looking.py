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
        lines = ["The module", *(f"  {line}" for line in profiling.told(self.found))]
        lines += ["", "The baseline's own settings"]
        lines += [f"  {one.told()}" for one in space.own]
        lines += [f"  {name}: not searched, since {why}" for name, why in space.own_left_out.items()]
        if not self.recipes.scheduled:
            lines.append(
                "  the module's rate does not decay: in every arm a linear decay to zero stands in its place"
                " (LearningRateSchedule), since a rate that is not decayed is a weak baseline"
            )
        lines += ["", f"Tried, at most {space.most} together ({len(space.techniques)})"]
        lines += [f"  {one.told()}" for one in space.techniques.values()] or ["  none"]
        lines += ["", f"Left out ({len(space.left_out)})"]
        return lines + [f"  {name}: {why}" for name, why in sorted(space.left_out.items())]
