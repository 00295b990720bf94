"""Choose samples of each batch by the loss after the network's first blocks, which costs a part of a forward pass."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from lightning.pytorch import Callback
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Fraction, Layers
from lightning_eff._core._needs.needs import Part, Reasons
from lightning_eff._core._samples.functions import SampleLoss
from lightning_eff._core._samples.scoring import Scores
from lightning_eff._core.blocks import BlockStack
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, needs_blocks, needs_samples
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Step
from lightning_eff._core.technique import Control
from lightning_eff.data.selection._choosing import Choosing, largest, others, random_subset
from lightning_eff.data.selection._counting import Keep


def num_blocks(depth: float, active: int) -> int:
    """Compute the number of blocks that score if ``active`` blocks run: ``max(1, round(depth * active))``."""
    return max(1, round(depth * active))


def _random_subset(technique: "ProxySelection") -> Mapping[str, Callback]:
    return random_subset(technique.keep)


def _pointless(profile: RunProfile) -> str | None:
    return needs_samples(profile) or needs_blocks(profile)


class ProxySelection(Choosing):
    """Train on the samples of each batch with the largest loss after the network's first blocks.

    The proxy is the module itself with the first ``depth`` of its repeated blocks. A forward pass without gradients skips the
    other blocks, and the output of the last scoring block goes to the module's own norm and head. The module's own
    ``training_step`` then runs with all blocks on the ``round(keep * B)`` samples with the largest loss (at least one). Their
    mean loss is not reweighted, so the gradient is biased towards hard samples.

    Use it like :class:`OrderedSGD` where a full scoring pass costs too much: the proxy has no weights of its own, and its pass
    costs about ``depth`` of a forward pass. With ``depth=1`` it is Ordered SGD. A wrong label is a hard sample too, so avoid it
    on noisy labels. A head that never saw the output of the first blocks may rank samples differently from the full network;
    a larger ``depth`` brings the rankings closer. Together with techniques that run only a part of the blocks, ``depth`` is a
    fraction of those that run. Micro-batches of an accumulation window and ranks are handled separately.

    ``training_step`` must return a sum of mean-reduced losses from ``torch.nn.functional`` (or ``torch.nn``), with one row
    or one group of consecutive rows per sample. The first batch is checked. For any other loss, give ``sample_loss``.

    It logs ``active`` (whether the last step chose samples) and ``fraction`` (the fraction of the batch that was used).

    Args:
        keep: the fraction of each batch to train on. 1 is plain training without the extra pass.
        depth: the fraction of the blocks that score, at least one block.
        layers: the blocks, as a dotted path, a pattern or a list of paths. None takes the longest stack.
        sample_loss: a function of (module, batch) that returns one loss per sample, shape (B,). It is used only to choose
            samples.

    Raises:
        ValueError: for a value out of range. At setup, if there is no stack of repeated blocks. At the first step, on all
            ranks, if the loss of a sample cannot be seen or a batch has one sample. At any step, if a loss is NaN or infinite.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[ProxySelection(keep=0.5, depth=0.5)])

    References:
        A method of this package. Coleman et al. 2020, "Selection via Proxy: Efficient Data Selection for Deep Learning",
        arXiv:1906.11829, select with a separate, smaller model before training.
    """

    saves = "backward passes, and most of the scoring pass, which runs only the first blocks"
    paper = "this package's own, after selection via proxy, Coleman et al. 2020, arXiv:1906.11829"
    constraints = (
        "needs a stack of repeated blocks, a mean loss of torch.nn.functional, or sample_loss=, and batches "
        "of several samples"
    )
    search_space = SearchSpace({"keep": Choice((0.25, 0.5, 0.75)), "depth": Choice((0.25, 0.5))}, _pointless)
    control = Control("as many samples drawn at random, without scoring", _random_subset)
    refuses: ClassVar[Reasons] = {Part.PIPELINE: "it scores samples with the first blocks only"}
    conflicts: ClassVar[Mapping[str, str]] = others("ProxySelection")
    neutral_at: ClassVar[Mapping[str, Any]] = {"keep": 1}

    def __init__(
        self,
        keep: Keep = 0.5,
        *,
        depth: Annotated[float, Fraction(above=0)] = 0.5,
        layers: Layers | None = None,
        sample_loss: SampleLoss | None = None,
    ) -> None:
        self.keep, self.depth, self.layers, self.sample_loss = keep, depth, layers, sample_loss

    @override
    def _reset(self) -> None:
        super()._reset()
        self._stack: BlockStack | None = None

    @override
    def on_model(self, session: Session) -> None:
        self._stack = session.stack(self.layers, who="ProxySelection")
        self._stack.watch(scales=False)

    @override
    def detach(self, session: Session) -> None:
        self._stack = None

    @override
    def share(self, step: Step) -> float:
        return self.keep

    @override
    def score(self, step: Step, batch: Any, size: int) -> Scores:
        stack = self._stack
        assert stack is not None
        with stack.shortened(num_blocks(self.depth, stack.active)):
            return super().score(step, batch, size)

    @override
    def train(self, step: Step, batch: Any, proceed: Proceed, scores: Scores, size: int, k: int) -> Any:
        return proceed(step.pick(batch, largest(scores.means, k=k), size))
