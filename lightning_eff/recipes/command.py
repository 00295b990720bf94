"""``lightning-eff recipe``: which recipes there are, and what one chooses."""

import argparse
from collections.abc import Sequence

from lightning_eff._cli.errors import Arguments, UsageError, did_you_mean
from lightning_eff.recipes.parts import Pick, Skip
from lightning_eff.recipes.printing import as_python, as_yaml
from lightning_eff.recipes.resolving import entry, named
from lightning_eff.recipes.shipped import RECIPES

_DESCRIPTION = """\
Named sets of techniques for a kind of training. They adapt to the module, and print what they chose.

  lightning-eff recipe list
  lightning-eff recipe show gpt:fast
  lightning-eff fit --config mine.yaml --recipe gpt

In Python: Trainer(callbacks=lightning_eff.recipe("gpt", module))
"""


def parser() -> argparse.ArgumentParser:
    """The options of ``lightning-eff recipe``."""
    options = Arguments(
        "lightning-eff recipe", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("what", choices=("list", "show"), metavar="{list,show}")
    options.add_argument("name", nargs="?", help="of the recipe to show, such as gpt or gpt:fast")
    return options


def main(argv: Sequence[str]) -> None:
    """``argv`` after ``recipe``.

    Raises:
        UsageError: for a word or a recipe that is not known.
    """
    if not argv or argv[0] in ("-h", "--help"):
        parser().print_help()
        return
    asked = parser().parse_args(argv)
    if asked.what == "list" and asked.name is None:
        print(listed())
    elif asked.what == "show" and asked.name is not None:
        print(shown(asked.name))
    else:
        hint = did_you_mean(str(asked.name), RECIPES)
        right = "list takes no name" if asked.name else f"show needs a name, such as {next(iter(RECIPES))}"
        raise UsageError(f"got {' '.join(argv)}; {right}.{hint if asked.what == 'show' else ''}")


def listed() -> str:
    """All recipes with their variants."""
    lines: list[str] = []
    for one in RECIPES.values():
        lines.append(f"{one.name:<12} version {one.version}  {one.about}")
        lines += [f"{'':<14}{variant:<6} {about}" for variant, about in one.variants.items()]
    lines += [
        "",
        "Show one: lightning-eff recipe show gpt:fast. Use one: lightning-eff fit --config mine.yaml --recipe gpt",
    ]
    return "\n".join(lines)


def shown(name: str) -> str:
    """A recipe on its example module, in Python and YAML that can be pasted."""
    found, variant = named(name)
    example = found.example
    choices = [*found.choose(example, variant)]
    picks = [choice for choice in choices if isinstance(choice, Pick)]
    skips = [choice for choice in choices if isinstance(choice, Skip)]
    steps = example.steps or 1000
    lines = [f"{found.label(variant)}: {found.about} {found.variants[variant]}", ""]
    lines += [f"On {example.module} ({example.told()}) it takes:", ""]
    lines += [f"  {pick.technique}: {pick.why}" for pick in picks]
    lines += [f"  not {skip.technique}: {skip.why}" for skip in skips]
    lines += ["", "# Python", as_python(picks, steps), ""]
    lines += ["# YAML", as_yaml([entry(pick) for pick in picks], steps), ""]
    word = name if ":" in name else found.name
    lines += [
        f'On your module the settings may differ. Let the recipe choose: lightning_eff.recipe("{word}", module), or',
        f"lightning-eff fit --config mine.yaml --recipe {word}",
    ]
    return "\n".join(lines)
