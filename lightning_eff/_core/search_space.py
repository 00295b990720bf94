"""What a search over recipes would try of a technique, said by the technique itself; and the surveys' row it answers to."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Survey:
    """The row of the two surveys that a technique answers to.

    Attributes:
        row: what the surveys call it.
        zhuang: the section of Zhuang et al. 2023, "A Survey on Efficient Training of Transformers" (arXiv:2302.01107), or
            None where it is not in it.
        shen: the section of Shen et al. 2024, "On Efficient Training of Large-Scale Deep Learning Models"
            (arXiv:2304.03589), or None.
    """

    row: str
    zhuang: str | None = None
    shen: str | None = None

    def __str__(self) -> str:
        where = [f"{who} {section}" for who, section in (("Zhuang", self.zhuang), ("Shen", self.shen)) if section]
        return f"{self.row} ({'; '.join(where) or 'in neither survey'})"


def frozen(value: Any) -> Any:
    """The same value with tuples in the place of lists, which are all that JSON and YAML know."""
    return tuple(frozen(item) for item in value) if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Choice:
    """One of a few values.

    Attributes:
        values: which.
        each: they are methods of their own: a search that begins with the technique tries it with each of them.
    """

    values: tuple[Any, ...]
    each: bool = False

    def corners(self) -> tuple[Any, ...]:
        """All of them."""
        return self.values

    def holds(self, value: Any) -> bool:
        """Whether ``value`` is one of them, as a list or as a tuple."""
        return frozen(value) in map(frozen, self.values)


@dataclass(frozen=True)
class Uniform:
    """A real number in [low, high], evenly by value, or by ratio where ``log`` is set."""

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        if not (-math.inf < self.low < self.high < math.inf) or (self.log and self.low <= 0):
            raise ValueError(
                f"Uniform({self.low}, {self.high}, log={self.log}): expected low < high, both finite, and low > 0 with log."
            )

    def corners(self) -> tuple[float, ...]:
        """The two ends."""
        return (self.low, self.high)

    def holds(self, value: Any) -> bool:
        """Whether ``value`` lies in the range."""
        return isinstance(value, int | float) and self.low <= value <= self.high


@dataclass(frozen=True)
class Integer:
    """An integer in [low, high], evenly by value, or by ratio where ``log`` is set."""

    low: int
    high: int
    log: bool = False

    def __post_init__(self) -> None:
        if not self.low < self.high or (self.log and self.low < 1):
            raise ValueError(
                f"Integer({self.low}, {self.high}, log={self.log}): expected low < high, and low >= 1 with log."
            )

    def corners(self) -> tuple[int, ...]:
        """The two ends."""
        return (self.low, self.high)

    def holds(self, value: Any) -> bool:
        """Whether ``value`` lies in the range."""
        return isinstance(value, int) and self.low <= value <= self.high


Range = Choice | Uniform | Integer


@dataclass(frozen=True)
class RunProfile:
    """What a look at a module, its data and its trainer found: what decides whether a technique could act, and on what.

    Attributes:
        num_blocks: blocks in the longest stack of repeated ones; 0 where there is none.
        sequence_length: tokens of a sample, or None where samples are no sequences.
        image_side: pixels of an image's shorter side, or None where samples are no images.
        grids: samples hold numbers in two dimensions or more: images, frames, sequences of vectors.
        batch_size: samples of a micro-batch on one rank.
        visible_loss: the step's loss is the sum of loss calls that can be taken apart by sample.
        epochs: how often the run goes over its data; less than 1 where it does not see all.
        decayed_rate: the learning rate ends at (about) zero.
        memory_bound: memory limits the batch or the model.
        accelerator: "cpu", "cuda", ...
        float8: the accelerator multiplies FP8 matrices.
        int8: the device multiplies int8 matrices.
        world_size: processes.
        optimizer_states: the optimizer keeps tensors for each parameter.
        masked_labels: tokens are predicted where their labels are not -100, and most are.
        num_matrices: parameters of hidden linear maps and convolutions.
        manual_optimization: the module itself calls backward and steps its optimizers.
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
    """The settings of a technique that a search would try.

    Attributes:
        settings: ranges by name. Where :attr:`make` is not given, names are arguments of the class.
        pointless: why trying it on such a run is in vain, in words; None where it is not.
        make: ``make(cls, values, profile)`` builds an instance where the settings are not its arguments, such as shares of
            what the module has.
        measured: about how many times as fast as its baseline it was where it was measured, so that a search begins with
            what pays and seldom draws what costs. None: what the committed results say of it (``docs/evidence.md``), which
            is 1 where they show no difference, or do not know it.
        measured_on: whether a run is like those on which that was measured; elsewhere nothing is known.
    """

    settings: Mapping[str, Range] = field(default_factory=dict)
    pointless: Callable[[RunProfile], str | None] = _always
    make: Callable[[Callable[..., Any], Mapping[str, Any], RunProfile], Any] = _as_arguments
    measured: float | None = None
    measured_on: Callable[[RunProfile], bool] = _any

    def build(self, cls: Callable[..., Any], values: Mapping[str, Any], profile: RunProfile) -> Any:
        """An instance of ``cls`` with these settings.

        Args:
            cls: the technique.
            values: a value of each setting.
            profile: the run that it is for.

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
        """Every combination of the settings' outermost values."""
        names = list(self.settings)
        for values in itertools.product(*(self.settings[name].corners() for name in names)):
            yield dict(zip(names, values, strict=True))


def needs_blocks(profile: RunProfile) -> str | None:
    """Why a technique that acts on repeated blocks would be tried in vain."""
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
    """Why a technique that chooses among a batch's samples by their loss would be tried in vain."""
    if not profile.visible_loss:
        return "the loss cannot be taken apart by sample"
    return None if profile.batch_size >= 4 else f"a batch of {profile.batch_size} leaves nothing to choose from"


def needs_memory_bound(profile: RunProfile) -> str | None:
    """Why a technique that trades time for memory would be tried in vain."""
    return None if profile.memory_bound else "memory limits neither batch nor model, and this costs time"


def needs_processes(profile: RunProfile) -> str | None:
    """Why a technique between processes would be tried in vain."""
    return None if profile.world_size > 1 else "there is one process"
