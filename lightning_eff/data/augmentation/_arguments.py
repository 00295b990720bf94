"""Arguments that augmentations share, and the runs in which an augmentation cannot help."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from typing_extensions import override

from lightning_eff._core._arguments.batch import BatchKeys, TokenIds
from lightning_eff._core._arguments.kinds import Alias, Count, Fraction, Kind, Number
from lightning_eff._core.search_space import RunProfile


@dataclass(frozen=True, repr=False)
class NetworkOrFunction(Kind):
    """A module or function of one tensor.

    Attributes:
        of: its argument and what it returns: ``images (B, C, H, W) that returns scores (B, classes)``.
        hint: what to use instead, as a sentence, for the message.
        names: strings that are accepted as well.
    """

    of: str
    hint: str = field(default="", repr=False)
    names: tuple[str, ...] = ()

    @property
    @override
    def expected(self) -> str:
        return " or ".join([f"a module or function of {self.of}", *map(repr, self.names)])

    @override
    def __call__(self, value: Any) -> Any:
        if not callable(value) and not (isinstance(value, str) and value in self.names):
            raise ValueError
        return value


Keys = Annotated[Sequence[str | int] | None, BatchKeys()]
Probability = Annotated[float, Fraction()]
ImageProbability = Annotated[float, Fraction(), Alias("p")]
Until = Annotated[float, Fraction()]
TokenId = Annotated[int | None, Count(at_least=0)]
SpecialTokens = Annotated[Sequence[int] | None, TokenIds()]
#: Of a Beta or Dirichlet distribution; 0, where it is accepted, is plain training.
Alpha = Annotated[float, Number(above=0, hint="prob=0 is plain training.")]
AlphaOrZero = Annotated[float, Number(at_least=0, hint="0 is plain training.")]


def too_few_epochs(profile: RunProfile) -> str | None:
    """Say why augmentation is pointless where each sample is seen hardly twice."""
    return None if profile.epochs >= 2 else "each sample is seen less than twice, so there is nothing to memorise"


def no_images(profile: RunProfile) -> str | None:
    """Say why a technique for images is pointless in a run."""
    return "samples are not images" if profile.image_side is None else too_few_epochs(profile)


def no_text(profile: RunProfile) -> str | None:
    """Say why a technique for texts is pointless in a run."""
    return "samples are not sequences" if profile.sequence_length is None else too_few_epochs(profile)


def no_mixing(profile: RunProfile) -> str | None:
    """Say why a technique that mixes images and their labels is pointless in a run."""
    if not profile.visible_loss:
        return "the loss is not visible, so labels cannot be mixed"
    return "a batch of one sample has nothing to mix" if profile.batch_size < 2 else no_images(profile)
