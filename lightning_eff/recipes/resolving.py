"""Choose the callbacks of a recipe for a module, with the reason for each technique that is taken or left out."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities import rank_zero_info

from lightning_eff._cli.errors import UsageError, did_you_mean
from lightning_eff._core._run.checks import check_pairs, check_run
from lightning_eff._core.technique import Technique
from lightning_eff._exports import public
from lightning_eff.recipes.parts import Pick, Recipe, Skip
from lightning_eff.recipes.printing import call
from lightning_eff.recipes.profile import Profile, of_module, with_batch
from lightning_eff.recipes.shipped import RECIPES
from lightning_eff.recipes.trial import Trial, Untried, first_batch, is_module, is_source
from lightning_eff.recipes.used import UsedRecipe

#: The class path of the callback that records the recipe.
USED = f"{UsedRecipe.__module__}.{UsedRecipe.__name__}"


@dataclass
class Resolved:
    """A recipe on a module.

    Attributes:
        recipe: which.
        variant: of it.
        profile: of the module.
        picks: techniques that it takes, each with its callback.
        skips: techniques that it leaves out.
    """

    recipe: Recipe
    variant: str
    profile: Profile
    picks: list[tuple[Pick, Callback]] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)

    def callbacks(self) -> list[Callback]:
        """The techniques, and one callback that records the recipe."""
        used = UsedRecipe(self.recipe.name, self.recipe.version, self.variant)
        return [*(callback for _, callback in self.picks), used]

    def config(self) -> list[dict[str, Any]]:
        """The same as entries of ``trainer.callbacks``."""
        entries = [entry(pick) for pick, _ in self.picks]
        used = {"name": self.recipe.name, "version": self.recipe.version, "variant": self.variant}
        return [*entries, {"class_path": USED, "init_args": used}]

    def told(self) -> str:
        """The choice, in lines for people."""
        lines = [f"recipe {self.recipe.label(self.variant)} for {self.profile.module}: {self.profile.told()}"]
        lines += [f"  takes {call(pick)}: {pick.why}" for pick, _ in self.picks]
        lines += [f"  leaves out {skip.technique}: {skip.why}" for skip in self.skips]
        lines += [f"  did not check: {what}" for what in self.profile.unknown]
        return "\n".join(lines)


def entry(pick: Pick) -> dict[str, Any]:
    """A pick as an entry of ``trainer.callbacks``."""
    arguments = {"init_args": dict(pick.settings)} if pick.settings else {}
    return {"class_path": f"lightning_eff.{pick.technique}", **arguments}


def recipe(
    name: str,
    module: LightningModule,
    variant: str | None = None,
    *,
    data: Any = None,
    max_steps: int | None = None,
    max_time: float | timedelta | None = None,
    own: Sequence[Callback] = (),
) -> list[Callback]:
    """Choose callbacks for a module: a named set of techniques that is adapted to it.

    The recipe looks at the module on a copy: its blocks, its vocabulary and its optimizer. It then runs the setup of a fit
    with the techniques on that copy, without a training step, and leaves out each one that is refused. It logs its choice
    with the reasons. The module itself and all random numbers stay as they are.

    The last callback records the recipe's name, version and variant in every checkpoint. ``lightning-eff recipe list`` lists
    the recipes, and ``lightning-eff fit --config mine.yaml --recipe gpt`` does the same for a config. Techniques that look
    at a batch first can still refuse the module there, before any weight changes.

    Args:
        name: a recipe, such as ``"gpt"``. ``"gpt:fast"`` names a variant too, and ``"gpt@1"`` requires its version 1.
        module: the module that will be trained.
        variant: "safe" or "fast". None is what ``name`` says, or else "safe".
        data: a data module, a loader or a batch of the training data. Some choices need it, and are left out without. None
            uses the module's own ``train_dataloader``, if it has one. A data module is prepared and set up on a copy, in
            each process. Give a batch if several processes start at once.
        max_steps: the optimizer steps of the run, if known. Some techniques pay only in long runs.
        max_time: the length of the run in seconds, if known.
        own: your own callbacks. The recipe leaves out techniques that are among them or conflict with them.

    Returns:
        The callbacks, for ``Trainer(callbacks=[*own, *recipe(...)])``.

    Raises:
        TypeError: if ``module`` is not a LightningModule.
        ValueError: for an unknown recipe, variant or version, a module that does not suit the recipe, or one on which all of
            its techniques are left out.

    Example:
        >>> trainer = L.Trainer(max_steps=1000, callbacks=lightning_eff.recipe("gpt", module))
    """
    seconds = max_time.total_seconds() if isinstance(max_time, timedelta) else max_time
    if not is_module(module):
        kind = f"the class {module.__name__}" if isinstance(module, type) else type(module).__name__
        raise TypeError(
            f"recipe(module=...): got {kind}; expected a LightningModule. Pass the module that you will train."
        )
    resolved = resolve(name, module, variant, data=data, steps=max_steps, seconds=seconds, own=own)
    rank_zero_info(resolved.told())
    return resolved.callbacks()


def named(name: str, variant: str | None = None) -> tuple[Recipe, str]:
    """The recipe and the variant that a name such as ``gpt``, ``gpt:fast`` or ``gpt@1:fast`` stands for.

    Raises:
        UsageError: for a name, variant or version that is not there, with the nearest one.
    """
    whole = name
    name, _, own_variant = name.partition(":")
    name, at, version = name.partition("@")
    if name not in RECIPES:
        hint = did_you_mean(name, RECIPES)
        raise UsageError(f"recipe(name={whole!r}): there is no such recipe.{hint} Use one of {', '.join(RECIPES)}.")
    found = RECIPES[name]
    if at and version != str(found.version):
        raise UsageError(
            f"recipe(name={whole!r}): this release has version {found.version} of {name}. To repeat an earlier run, use the"
            f" config.yaml that was saved with it, which lists its callbacks; else write {name}."
        )
    if own_variant and variant and own_variant != variant:
        raise UsageError(f"recipe(name={whole!r}, variant={variant!r}): these are two variants. Name one of them.")
    chosen = variant or own_variant or next(iter(found.variants))
    if chosen not in found.variants:
        hint = did_you_mean(chosen, found.variants)
        raise UsageError(
            f"recipe(name={name!r}, variant={chosen!r}): there is no such variant.{hint} Use one of"
            f" {', '.join(found.variants)}."
        )
    return found, chosen


def resolve(
    name: str,
    module: LightningModule,
    variant: str | None = None,
    *,
    data: Any = None,
    steps: int | None = None,
    seconds: float | None = None,
    own: Sequence[Callback] = (),
    trainer: Any = None,
) -> Resolved:
    """Choose as :func:`recipe` does; with ``trainer``, leave out techniques that its strategy or precision refuses too.

    Args:
        name: see :func:`recipe`.
        module: likewise.
        variant: likewise.
        data: likewise.
        steps: of the run; -1 for a run without an end, None if not known.
        seconds: of the run; None if not known.
        own: the user's callbacks.
        trainer: of the run, if there is one already.

    Raises:
        UsageError: see :func:`recipe`.
    """
    found, variant = named(name, variant)
    trial, profile = _looked_at(found, variant, module, data, steps, trainer)
    known = None if steps is None or steps < 0 else steps
    accelerator = profile.run.accelerator if trainer is None else trainer.strategy.root_device.type
    run = replace(profile.run, accelerator=accelerator)
    profile = replace(profile, module=type(module).__name__, run=run, steps=known, seconds=seconds)
    if (why := found.fits(profile)) is not None:
        raise UsageError(
            f"recipe(name={found.name!r}): {profile.module} does not suit it, because {why}. Use a recipe that fits:"
            f" {', '.join(_fitting(profile, own, module, trainer, trial))}."
        )
    resolved = _chosen(found, variant, profile, own, module, trainer, trial)
    if not resolved.picks:
        reasons = "; ".join(f"{skip.technique} ({skip.why})" for skip in resolved.skips)
        other = [f"{found.name}:{one}" for one in found.variants if one != variant]
        raise UsageError(
            f"recipe(name={found.name!r}, variant={variant!r}): nothing of it is left for {profile.module}: {reasons}. Try"
            f" {' or '.join(other)}, or train without a recipe."
        )
    return resolved


def _fitting(
    profile: Profile, own: Sequence[Callback], module: LightningModule, trainer: Any, trial: Trial | None
) -> list[str]:
    """The recipes that leave something on the module."""
    suited = [one for one in RECIPES.values() if one.fits(profile) is None]
    variants = {one.name: next(iter(one.variants)) for one in suited}
    return [one.name for one in suited if _chosen(one, variants[one.name], profile, own, module, trainer, trial).picks]


def _chosen(
    found: Recipe,
    variant: str,
    profile: Profile,
    own: Sequence[Callback],
    module: LightningModule,
    trainer: Any,
    trial: Trial | None,
) -> Resolved:
    """The recipe's choice on this profile."""
    resolved = Resolved(found, variant, profile)
    for choice in found.choose(profile, variant):
        if isinstance(choice, Skip):
            resolved.skips.append(choice)
            continue
        callback, why = _made(choice, profile, own, module, trainer)
        if callback is None:
            resolved.skips.append(Skip(choice.technique, why))
        else:
            resolved.picks.append((choice, callback))
    if trial is not None:
        _tried(resolved, trial)
    return resolved


def _looked_at(
    found: Recipe, variant: str, module: LightningModule, data: Any, steps: int | None, trainer: Any
) -> tuple[Trial | None, Profile]:
    """A trial of the module, if it can be set up on a copy, and its profile."""
    unknown: list[str] = []
    try:
        trial = Trial(module, data, steps)
        profile = replace(of_module(trial.module), rates=trial.rates)
    except Untried as error:
        trial, profile = None, of_module(module)
        unknown.append(f"the module's optimizer, and whether a technique is refused, because {error}")
    if (
        variant in found.reads_data
        and trainer is not None
        and trainer.world_size > 1
        and (data is None or is_source(data))
    ):
        unknown.append("the training data, because all processes would prepare them at once")
    elif variant in found.reads_data:
        try:
            profile = with_batch(profile, first_batch(module, data))
        except Untried as error:
            unknown.append(f"the training data, because {error}. Pass data= to recipe()")
    return trial, replace(profile, unknown=tuple(unknown))


def _made(
    pick: Pick, profile: Profile, own: Sequence[Callback], module: LightningModule, trainer: Any
) -> tuple[Callback | None, str]:
    """The callback of a pick, or None and why it is left out."""
    cls = public.found(pick.technique)
    if any(isinstance(callback, cls) for callback in own):
        return None, "you have one of your own, which stays as it is"
    space = getattr(cls, "search_space", None)
    if profile.data and space is not None and (why := space.pointless(profile.run)) is not None:
        return None, why
    theirs = [callback for callback in own if isinstance(callback, Technique) and not callback.neutral]
    try:
        made = cls(**pick.settings)
        check_pairs([*theirs, made])
        if trainer is not None:
            check_run(trainer, module, [made], has_end=ends(trainer))
    except (ValueError, TypeError, ImportError) as error:
        return None, _without_name(pick.technique, str(error))
    return made, ""


def _tried(resolved: Resolved, trial: Trial) -> None:
    """Leave out techniques that the setup of a run refuses. All are tried at once, and one by one only if that fails."""
    if trial.refusal([callback for _, callback in resolved.picks]) is None:
        return
    kept: list[tuple[Pick, Callback]] = []
    for pick, callback in resolved.picks:
        why = trial.refusal([*(one for _, one in kept), callback])
        if why is None:
            kept.append((pick, callback))
        else:
            resolved.skips.append(Skip(pick.technique, _without_name(pick.technique, why)))
    resolved.picks = kept


def ends(trainer: Any) -> bool:
    """Whether a trainer's run has an end."""
    limits = (trainer.max_steps, trainer.max_epochs)
    timed = any(type(callback).__name__ == "Timer" for callback in trainer.callbacks)
    return timed or any(limit not in (None, -1) for limit in limits)


def _without_name(technique: str, words: str) -> str:
    """A refusal as a clause: without the technique's name before it and the full stop behind it."""
    words = " ".join(words.split()).removeprefix(f"{technique}: ").rstrip(".")
    return words
