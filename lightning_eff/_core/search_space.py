"""The settings of a technique that a search tries, declared by the technique."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


def frozen(value: Any) -> Any:
    """Return ``value`` with lists converted to tuples, because JSON and YAML have only lists."""
    return tuple(frozen(item) for item in value) if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Choice:
    """One of a few values.

    Attributes:
        values: the values.
        each: whether the values are separate methods. A search that starts with the technique then tries each of them.
    """

    values: tuple[Any, ...]
    each: bool = False

    def corners(self) -> tuple[Any, ...]:
        """Return all values."""
        return self.values

    def holds(self, value: Any) -> bool:
        """Return whether ``value`` is one of the values, as a list or as a tuple."""
        return frozen(value) in map(frozen, self.values)


@dataclass(frozen=True)
class Uniform:
    """A real number in [low, high], uniform in value, or in its logarithm with ``log``."""

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        if not (-math.inf < self.low < self.high < math.inf) or (self.log and self.low <= 0):
            raise ValueError(
                f"Uniform({self.low}, {self.high}, log={self.log}): expected low < high, both finite, and low > 0 with log."
            )

    def corners(self) -> tuple[float, ...]:
        """Return both ends of the range."""
        return (self.low, self.high)

    def holds(self, value: Any) -> bool:
        """Return whether ``value`` is in the range."""
        return isinstance(value, int | float) and self.low <= value <= self.high


@dataclass(frozen=True)
class Integer:
    """An integer in [low, high], uniform in value, or in its logarithm with ``log``."""

    low: int
    high: int
    log: bool = False

    def __post_init__(self) -> None:
        if not self.low < self.high or (self.log and self.low < 1):
            raise ValueError(
                f"Integer({self.low}, {self.high}, log={self.log}): expected low < high, and low >= 1 with log."
            )

    def corners(self) -> tuple[int, ...]:
        """Return both ends of the range."""
        return (self.low, self.high)

    def holds(self, value: Any) -> bool:
        """Return whether ``value`` is in the range."""
        return isinstance(value, int) and self.low <= value <= self.high


Range = Choice | Uniform | Integer


@dataclass(frozen=True)
class RunProfile:
    """Properties of a module, its data and its trainer that decide whether a technique could have an effect.

    Attributes:
        num_blocks: blocks in the longest stack of repeated blocks; 0 if there is none.
        sequence_length: tokens per sample, or None if samples are not sequences.
        image_side: pixels of an image's shorter side, or None if samples are not images.
        grids: whether samples hold numbers in two or more dimensions: images, frames, sequences of vectors.
        batch_size: samples per micro-batch on one rank.
        visible_loss: whether the step's loss is a sum of loss calls that can be split into samples.
        epochs: how often the run sees its data; less than 1 if it does not see all of it.
        decayed_rate: whether the learning rate ends at about zero.
        memory_bound: whether memory limits the batch or the model.
        accelerator: "cpu", "cuda", ...
        float8: whether the accelerator multiplies FP8 matrices.
        int8: whether the device multiplies int8 matrices.
        world_size: the number of processes.
        optimizer_states: whether the optimizer keeps tensors for each parameter.
        masked_labels: whether the labels mark the predicted tokens, and most labels are -100.
        num_matrices: the number of weights of hidden linear layers and convolutions.
        manual_optimization: whether the module itself calls backward and steps its optimizers.
    """

    num_blocks: int = 0
    sequence_length: int | None = None
    image_side: int | None = None
    grids: bool = False
    batch_size: int = 1
    visible_loss: bool = False
    epochs: float = 1.0
    decayed_rate: bool = False
    memory_bound: bool = False
    accelerator: str = "cpu"
    float8: bool = False
    int8: bool = False
    world_size: int = 1
    optimizer_states: bool = False
    masked_labels: bool = False
    num_matrices: int = 0
    manual_optimization: bool = False


def _always(profile: RunProfile) -> None:
    return None


def _any(profile: RunProfile) -> bool:
    return True


def _as_arguments(cls: Callable[..., Any], values: Mapping[str, Any], profile: RunProfile) -> Any:
    return cls(**values)


@dataclass(frozen=True)
class SearchSpace:
    """The settings of a technique that a search tries.

    Attributes:
        settings: ranges by name. Without :attr:`make`, names are arguments of the class.
        pointless: returns the reason why the technique cannot help on such a run, or None.
        make: ``make(cls, values, profile)`` builds an instance if the settings are not its arguments, for example if they are
            fractions of a property of the module.
        measured: the speed of the technique relative to its baseline, where it was measured. A search starts with fast
            techniques and seldom draws slow ones. None uses the committed results (``docs/evidence.md``), which give 1 if
            they show no difference or lack the technique.
        measured_on: returns whether a run resembles those of the measurement. Elsewhere the speed is unknown.
    """

    settings: Mapping[str, Range] = field(default_factory=dict)
    pointless: Callable[[RunProfile], str | None] = _always
    make: Callable[[Callable[..., Any], Mapping[str, Any], RunProfile], Any] = _as_arguments
    measured: float | None = None
    measured_on: Callable[[RunProfile], bool] = _any

    def build(self, cls: Callable[..., Any], values: Mapping[str, Any], profile: RunProfile) -> Any:
        """Return an instance of ``cls`` with these settings.

        Args:
            cls: the technique.
            values: a value for each setting.
            profile: the run.

        Raises:
            ValueError: if a setting is missing, unknown, or out of its range.
        """
        if values.keys() != self.settings.keys():
            raise ValueError(f"Settings of a search: got {sorted(values)}; expected {sorted(self.settings)}.")
        for name, value in values.items():
            if not self.settings[name].holds(value):
                raise ValueError(f"Settings of a search: got {name}={value!r}; expected one of {self.settings[name]}.")
        return self.make(cls, values, profile)

    def corners(self) -> Iterator[dict[str, Any]]:
        """Yield every combination of the settings' outermost values."""
        names = list(self.settings)
        for values in itertools.product(*(self.settings[name].corners() for name in names)):
            yield dict(zip(names, values, strict=True))


def needs_blocks(profile: RunProfile) -> str | None:
    """Return why a technique that acts on repeated blocks cannot help, or None."""
    return None if profile.num_blocks >= 2 else "no stack of at least two repeated blocks was found"


def needs_images(profile: RunProfile) -> str | None:
    """Why a technique for images would be tried in vain."""
    return None if profile.image_side is not None else "samples are not images"


def needs_sequences(profile: RunProfile) -> str | None:
    """Why a technique for sequences would be tried in vain."""
    return None if profile.sequence_length is not None else "samples are not sequences"


def needs_attention(profile: RunProfile) -> str | None:
    """Why a technique for attention would be tried in vain."""
    return None if profile.image_side is not None else needs_sequences(profile)


def needs_matrices(profile: RunProfile) -> str | None:
    """Why a technique for hidden linear layers would be tried in vain."""
    return None if profile.num_matrices else "the module has no hidden linear layer"


def needs_samples(profile: RunProfile) -> str | None:
    """Return why a technique that chooses samples of a batch by their loss cannot help, or None."""
    if not profile.visible_loss:
        return "the loss cannot be split into samples"
    return None if profile.batch_size >= 4 else f"a batch of {profile.batch_size} leaves nothing to choose from"


def needs_memory_bound(profile: RunProfile) -> str | None:
    """Return why a technique that trades time for memory cannot help, or None."""
    return (
        None if profile.memory_bound else "memory limits neither the batch nor the model, and this technique costs time"
    )


def needs_processes(profile: RunProfile) -> str | None:
    """Return why a technique that acts between processes cannot help, or None."""
    return None if profile.world_size > 1 else "there is one process"
