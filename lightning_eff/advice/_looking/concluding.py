"""Turn the observations of a run into problems, in words."""

from collections import Counter
from collections.abc import Callable, Iterator

import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from lightning_eff._core._lightning.names import is_a
from lightning_eff.advice._looking.costs import costs
from lightning_eff.advice._looking.modes import contents
from lightning_eff.advice._looking.parameters import listed, optimizers_of, owned
from lightning_eff.advice._looking.problem import Problem
from lightning_eff.advice._looking.rates import FALLS, stands_in
from lightning_eff.advice._looking.watched import Watched

_ADAMS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)
NOT_FINITE = "loss-not-finite"
ABSURD = 0.5  # a learning rate of Adam's


def conclude(seen: Watched) -> list[Problem]:
    """The problems of a run, the worst first: wrong training before lost time, and that by its share."""
    wrong = [problem for look in _WRONG for problem in look(seen)]
    return [*wrong, *sorted(costs(seen), key=lambda problem: -(problem.share or 0.0))]


def _not_finite(seen: Watched) -> Iterator[Problem]:
    found = seen.not_finite
    if found is None:
        return
    what = f"The loss of step {found.step} is {found.value}."
    fix = (
        "Lower the learning rate, clip gradients (gradient_clip_val=1.0), and look for a division, log or sqrt of zero."
    )
    if found.weights:
        what += f" {listed(found.weights, dict(seen.module.named_parameters()))} were not finite before."
    if found.origin is not None and not found.weights:
        place, operation = found.origin
        where = f" at {place} ({place.code})" if place is not None else ""
        what += f" The first value that is not finite comes from torch's {operation}{where}."
        fix = "Keep the argument of this operation away from where it has no finite value, such as log(x.clamp_min(1e-8))."
    yield Problem(NOT_FINITE, what, fix)


def became_not_finite(batch: int) -> Problem:
    """The problem of a run whose loss was a number in its first batches, and was none later.

    Args:
        batch: the number of the batch at which that was seen, from 1.
    """
    return Problem(
        NOT_FINITE,
        f"The loss is not finite any more at training batch {batch}. It was finite in the first batches.",
        "Lower the learning rate, clip gradients (gradient_clip_val=1.0), and train with detect_anomaly=True to find the line.",
    )


def _without_gradient(seen: Watched) -> Iterator[Problem]:
    gradients = seen.gradients
    name, fix = "loss-without-parameters", "Remove detach(), torch.no_grad(), .item() and argmax from the loss's way."
    if seen.no_graph:
        yield Problem(
            name,
            f"The loss of {seen.no_graph} of {seen.steps} steps does not depend on any parameter: it has no gradient.",
            fix,
        )
    elif gradients is not None and gradients.known and _plain(seen) and gradients.trained and not gradients.got:
        what = (
            f"No parameter had a gradient after {gradients.passes} backward passes: the loss depends on none of them."
        )
        yield Problem(name, what, fix)


def _rates(seen: Watched) -> Iterator[Problem]:
    zero = [r.group for r in seen.rates if r.peak == 0]
    if zero and not seen.by_hand:
        yield Problem(
            "learning-rate-zero",
            f"The learning rate of {', '.join(zero[:5])} is zero over the whole planned run: its parameters do not move.",
            "Give the optimizer a learning rate, or freeze these parameters with requires_grad_(False).",
        )
    absurd = [r for r in seen.rates if r.peak > ABSURD and r.optimizer in _ADAMS]
    if absurd and not seen.by_hand:
        yield Problem(
            "learning-rate-too-large",
            f"The learning rate of {absurd[0].group} reaches {absurd[0].peak:g}. Adam moves each weight by about that much"
            " per step.",
            "Try a learning rate of 1e-3 or less.",
        )


def _decay(seen: Watched) -> Iterator[Problem]:
    several = not seen.module.automatic_optimization and len(seen.trainer.optimizers) > 1  # such as a GAN's
    if seen.by_hand or several or not seen.rates or any(stands_in(r.optimizer) for r in seen.rates):
        return
    if all(r.peak > 0 and r.last > FALLS * r.peak for r in seen.rates):
        one = max(seen.rates, key=lambda r: r.peak)
        length = f"all {seen.planned:,} planned steps" if seen.planned is not None else "the whole run"
        if one.schedule:
            how = f"{one.schedule} never lowers the learning rate: it peaks at {one.peak:g} and stays at {one.last:g} or more"
            fix = 'Give the scheduler the run\'s length and set "interval": "step" if it counts steps'
        else:
            how, fix = f"The learning rate stays at {one.peak:g}: there is no scheduler", "Let it decay to zero"
        yield Problem(
            "learning-rate-never-decays",
            f"{how}, over {length}.",
            f'{fix}, or add the callback LearningRateSchedule("cosine", warmup=0.02).',
        )


def _plain(seen: Watched) -> bool:
    """Whether parameters and their gradients are whole tensors of the module."""
    return is_a(seen.trainer.strategy, SingleDeviceStrategy, DDPStrategy)


def _parameters(seen: Watched) -> Iterator[Problem]:
    gradients, module = seen.gradients, seen.module
    if gradients is None or not _plain(seen):
        return
    sizes = dict(module.named_parameters())
    where = owned(gradients, module, optimizers_of(module, seen.trainer.optimizers))
    if gradients.known and gradients.got:
        in_optimizer = {id(p) for o in seen.trainer.optimizers for group in o.param_groups for p in group["params"]}
        never = [n for n in gradients.never(module) if id(sizes.get(n)) in in_optimizer]
        if never and seen.steps >= 2:
            yield Problem(
                "unused-parameters",
                f"In {seen.steps} steps no gradient reached {listed(never, sizes)}. They require one and are in an optimizer.",
                "Use them in the loss, or remove them or freeze them with requires_grad_(False).",
            )
        if where.nowhere:
            yield Problem(
                "parameters-in-no-optimizer",
                f"Gradients are computed for {listed(where.nowhere, sizes)}, but no optimizer has them.",
                "Give them to the optimizer in configure_optimizers, or freeze them with requires_grad_(False).",
            )
        dead = gradients.quiet(gradients.zeros(), module) if seen.updates >= 4 else []
        dead = [name for name in dead if name not in where.nowhere]
        if dead and len(dead) < len(gradients.trained):
            yield Problem(
                "zero-gradients",
                f"In {seen.steps} steps every gradient was zero for {listed(dead, sizes)}.",
                "Look for dead activations, a factor of zero, or an output that the loss ignores.",
            )
    if where.twice:
        yield Problem(
            "parameters-in-two-groups",
            f"The optimizers have {listed(where.twice, sizes)} more than once, so each step moves them more than once.",
            "Give each parameter to one group of one optimizer.",
        )
    if where.frozen:
        yield Problem(
            "frozen-parameters-with-state",
            f"The optimizers keep {where.frozen_bytes / 2**20:.3g} MiB of state for {listed(where.frozen, sizes)}, which are"
            " frozen.",
            "Give the optimizer only parameters with requires_grad: [p for p in self.parameters() if p.requires_grad].",
        )


def _modes(seen: Watched) -> Iterator[Problem]:
    gradients = seen.gradients
    got = gradients.got if gradients is not None else set[str]()
    held = {id(p) for o in seen.trainer.optimizers for group in getattr(o, "param_groups", ()) for p in group["params"]}
    trained = {name for name, p in seen.module.named_parameters() if name in got and id(p) in held}
    asleep = [
        one
        for one in _always(seen.asleep, len(seen.close))
        if any(not one[0] or name.startswith(f"{one[0]}.") for name in trained)
    ]
    if asleep:
        yield Problem(
            "eval-mode-in-training",
            f"training_step runs with {_places(asleep)} in eval mode, although it is being trained.",
            "Call .train() on it in on_train_start. Lightning keeps the mode that a module has before fit.",
        )
    awake = _always(seen.awake, seen.validated)
    if awake:
        yield Problem(
            "train-mode-in-validation",
            f"validation_step runs with {_places(awake)} in train mode. BatchNorm then learns from validation data, and"
            " dropout adds noise to metrics.",
            "Remove the calls of .train() in validation, and let Lightning set the mode.",
        )


def _always(counts: Counter[tuple[str, int, int]], times: int) -> list[tuple[str, int, int]]:
    return [one for one, n in counts.items() if n == times]


def _places(found: list[tuple[str, int, int]]) -> str:
    shown = [f"{path or 'the whole module'} ({contents(d, n)})" for path, d, n in found[:5]]
    return ", ".join(shown) + (f" and {len(found) - 5} more" if len(found) > 5 else "")


_WRONG: tuple[Callable[[Watched], Iterator[Problem]], ...] = (
    _not_finite,
    _without_gradient,
    _rates,
    _parameters,
    _modes,
    _decay,
)
