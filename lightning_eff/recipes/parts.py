"""The parts of a recipe: its name, its version, its variants, and a function from a profile to techniques."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_eff.recipes.profile import Profile


@dataclass(frozen=True)
class Pick:
    """A technique that a recipe takes.

    Attributes:
        technique: the name of a callback of this package.
        settings: its arguments, as a config has them under ``init_args``.
        why: the reason, in a clause.
    """

    technique: str
    settings: Mapping[str, Any]
    why: str


@dataclass(frozen=True)
class Skip:
    """A technique that a recipe leaves out on this module.

    Attributes:
        technique: its name.
        why: the reason, in a clause.
    """

    technique: str
    why: str


Choices = Iterator[Pick | Skip]


@dataclass(frozen=True)
class Recipe:
    """A set of techniques for a kind of training.

    Attributes:
        name: as the command line has it.
        version: increases whenever the recipe would choose something else for the same module.
        about: one sentence.
        variants: a sentence on each, by name; the first one is the default.
        fits: says why a module does not suit the recipe, or None.
        choose: ``choose(profile, variant)`` yields the techniques that it takes and leaves out.
        example: a typical module, which ``lightning-eff recipe show`` prints the recipe for.
        reads_data: the variants that look at a batch.
    """

    name: str
    version: int
    about: str
    variants: Mapping[str, str]
    fits: Callable[[Profile], str | None]
    choose: Callable[[Profile, str], Choices]
    example: Profile
    reads_data: frozenset[str] = field(default_factory=frozenset)

    def label(self, variant: str) -> str:
        """Such as ``gpt:fast (version 1)``."""
        return f"{self.name}:{variant} (version {self.version})"
