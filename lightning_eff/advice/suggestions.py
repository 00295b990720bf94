"""Techniques that change training and are worth a comparison on this run, each with its reason."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_eff._core.search_space import RunProfile
from lightning_eff.advice._looking.evidence import evidence
from lightning_eff.advice._looking.model import Model, looked_at
from lightning_eff.tune.inspection.probing import usual
from lightning_eff.tune.inspection.profiling import Found
from lightning_eff.tune.space import Candidate, gather

LONG = 256  # tokens of a sequence that is long
DEEP = 4  # blocks of a stack that can begin with fewer
LARGE = 64  # samples of a large batch
MANY = 10  # passes over the data, after which labels may be learned by heart


@dataclass(frozen=True)
class Suggestion:
    """A technique that may be worth a comparison.

    Attributes:
        name: of its class, exported from ``lightning_eff``.
        code: of a callback, in Python.
        config: the same for ``trainer.callbacks`` in YAML.
        reason: the observation in this run that speaks for it.
        expected: the gain in committed results, with the task's name.
        speed: the time ratio in committed results, above 1 if it is faster; None without any.
    """

    name: str
    code: str
    config: dict[str, Any]
    reason: str
    expected: str
    speed: float | None


@dataclass(frozen=True)
class _Idea:
    """A technique, and when it is worth a comparison.

    Attributes:
        name: of the class that has the evidence.
        why: the observation that speaks for it; None if there is none.
        values: settings of its search space that differ from the middle of their ranges.
        technique: the class in the search space, if it is another one.
        rivals: techniques that do the same; only the one with the best evidence is suggested.
        changes: the model's parameters, so a search tries it only where it is named.
    """

    name: str
    why: Callable[[Found, Model], str | None]
    values: Mapping[str, Any]
    technique: str = ""
    rivals: str = ""
    changes: bool = False


def suggestions(found: Found, module: nn.Module | None = None) -> list[Suggestion]:
    """The techniques worth a comparison on a run, those with the best evidence first.

    Args:
        found: the profile of the run.
        module: the user's, for figures about its parameters. Without it, techniques for pretrained weights are not suggested.
    """
    model = looked_at(module)
    usually = gather(found.run, (), {}, has=found.callbacks)
    named = gather(found.run, (), {}, include=[idea.name for idea in _IDEAS if idea.changes], has=found.callbacks)
    made: list[tuple[str, Suggestion]] = []
    for idea in _IDEAS:
        candidate = (named if idea.changes else usually).techniques.get(idea.technique or idea.name)
        reason = idea.why(found, model) if candidate is not None else None
        if candidate is not None and reason is not None:
            made.append((idea.rivals, _suggestion(idea, candidate, found.run, reason)))
    made.sort(key=lambda pair: -1.0 if pair[1].speed is None else -pair[1].speed)
    taken: set[str] = set()
    best: list[Suggestion] = []
    for rivals, one in made:
        if not rivals or rivals not in taken:
            best.append(one)
        taken.add(rivals)
    return best


def _suggestion(idea: _Idea, candidate: Candidate, run: RunProfile, reason: str) -> Suggestion:
    config = candidate.config({**usual(candidate), **idea.values}, run)
    speed, expected = evidence(idea.name, run)
    return Suggestion(idea.name, _code(config), config, reason, expected, speed)


def _code(config: Mapping[str, Any]) -> str:
    """A callback's config in Python, for names that are imported from ``lightning_eff``."""
    name, arguments = config["class_path"].rpartition(".")[2], dict(config.get("init_args", {}))
    parts: list[str] = []
    other = arguments.pop("optimizer", None) if name == "ReplaceOptimizer" else None
    if other is not None:
        parts.append(other["class_path"].rpartition(".")[2])
        arguments = {**other.get("init_args", {}), **arguments}
    return f"{name}({', '.join([*parts, *(f'{key}={value!r}' for key, value in arguments.items())])})"


# -- what speaks for each of them


def _matrices(found: Found, model: Model) -> str | None:
    if not model.hidden:
        return f"{found.run.num_matrices} trained matrices are hidden ({found.why.get('num_matrices', '')})."
    return (
        f"{model.hidden} of {model.matrices} trained matrices are hidden. They hold {model.share:.0%} of the"
        f" {model.parameters:,} trained parameters."
    )


def _blocks(found: Found, model: Model) -> str | None:
    run = found.run
    return (
        f"There are {run.num_blocks} equal blocks ({found.why.get('num_blocks', '')})."
        if run.num_blocks >= DEEP
        else None
    )


def _length(found: Found, model: Model) -> str | None:
    return f"Sequences have {found.run.sequence_length} tokens from the first step on."


def _masked(found: Found, model: Model) -> str | None:
    return f"Labels are masked at a fixed rate: {found.why.get('masked_labels', 'most are -100')}."


def _average(found: Found, model: Model) -> str | None:
    undecayed = _undecayed(found, model)
    return f"{undecayed} The last weights are noisy then, and an average is less so." if undecayed else None


def _undecayed(found: Found, model: Model) -> str | None:
    if found.run.decayed_rate or not found.rate:
        return None
    peak, last = found.rate["peak"], found.rate["last"]
    if found.schedule != "own":
        return "The learning rate follows a metric (ReduceLROnPlateau), so it need not end near zero."
    return f"The learning rate goes from {peak:.3g} to {last:.3g} and does not end near zero."


def _labels(found: Found, model: Model) -> str | None:
    run = found.run
    if run.image_side is None or run.epochs < MANY:
        return None
    return f"Images are classified, and the run sees each of them about {run.epochs:.0f} times."


def _large(found: Found, model: Model) -> str | None:
    if found.run.batch_size < LARGE:
        return None
    return f"Every step has {found.samples:g} samples, also at the start, where small batches learn as much per step."


def _long(found: Found, model: Model) -> str | None:
    length = found.run.sequence_length or 0
    if length < LONG:
        return None
    return f"Sequences have {length} tokens, and {found.run.num_blocks} equal blocks compute all of them."


def _pretrained(found: Found, model: Model) -> str | None:
    if not model.pretrained:
        return None
    return f"The weights come from {model.pretrained!r}, and all {model.parameters:,} of them are trained."


_IDEAS = (
    _Idea(
        "Muon", _matrices, {"optimizer": "Muon", "lr": 0.02, "momentum": 0.95, "weight_decay": 0.05}, "ReplaceOptimizer"
    ),
    _Idea(
        "SOAP",
        _matrices,
        {"optimizer": "SOAP", "lr": 0.006, "momentum": 0.95, "weight_decay": 0.05},
        "ReplaceOptimizer",
    ),
    _Idea("ProgressiveStacking", _blocks, {"first": 0.5, "until": 0.3}, rivals="growth"),
    _Idea("CompoundGrowth", _blocks, {"first": 0.5, "width": 1.0, "length": 0.5, "until": 0.3}, rivals="growth"),
    _Idea("ShallowToDeep", _blocks, {"first": 0.5, "until": 0.3, "rate": None}, rivals="growth"),
    _Idea("SequenceLengthWarmup", _length, {"start": 0.25, "until": 0.3}),
    _Idea("MaskRateSchedule", _masked, {"start": 0.3, "until": 1.0}),
    _Idea("ExponentialMovingAverage", _average, {}, rivals="average"),
    _Idea("LatestWeightAveraging", _average, {}, rivals="average"),
    _Idea("LearningRateSchedule", _undecayed, {"shape": "linear", "warmup": 0.02, "final": 0.0}),
    _Idea("ScheduleFree", _undecayed, {"lr_factor": 3.0, "momentum": 0.95, "warmup_steps": 20}),
    _Idea("LabelSmoothing", _labels, {"epsilon": 0.05}),
    _Idea("BatchSizeWarmup", _large, {"full": 4, "until": 0.5, "power": 0.5}),
    _Idea("TokenDropping", _long, {"keep": 0.5}, rivals="tokens"),
    _Idea("RandomLTD", _long, {"start": 0.5, "until": 0.67}, rivals="tokens"),
    _Idea("LoRA", _pretrained, {"rank": 8}, changes=True),
)
