"""Choose among a batch's samples by the losses of the network's first blocks alone, which cost a part of a forward pass."""

from collections.abc import Mapping
from typing import Any, ClassVar

from lightning.pytorch import Callback
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Layers
from lightning_eff._core._needs.needs import Part, Reasons
from lightning_eff._core._samples.functions import SampleLoss
from lightning_eff._core._samples.scoring import Scores
from lightning_eff._core.blocks import BlockStack
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, needs_blocks, needs_samples
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Step
from lightning_eff._core.technique import Control
from lightning_eff.data.selection._choosing import (
    Choosing,
    check_keep,
    check_sample_loss,
    largest,
    others,
    random_subset,
)


def num_blocks(depth: float, active: int) -> int:
    """``max(1, round(depth * active))``, the blocks that score where ``active`` of them run."""
    return max(1, round(depth * active))


def _random_subset(technique: "ProxySelection") -> Mapping[str, Callback]:
    return random_subset(technique.keep)


def _pointless(profile: RunProfile) -> str | None:
    return needs_samples(profile) or needs_blocks(profile)


class ProxySelection(Choosing):
    """Train on the ``round(keep * B)`` samples of each batch of ``B`` that have the largest loss after a part of the blocks.

    The proxy is the module itself with the first ``depth`` of its repeated blocks: the others hand their input on in a
    forward-only pass, whose last block's output goes on to the module's own norm and head. It has no weights of its own, and
    its pass costs about ``depth`` of one. On the samples chosen the user's own ``training_step`` runs with all blocks; their
    mean loss is not reweighted, so the gradient is biased towards hard samples, and a wrong label is a hard sample too. With
    ``depth=1`` it is Ordered SGD. A network whose head never saw the first blocks' output may rank samples otherwise than in
    full depth: ``depth`` says how near they are.

    The loss is seen through the loss functions of ``torch.nn.functional`` (and so ``torch.nn``'s modules):
    ``training_step`` must return the sum of their mean-reduced values, whose rows lie sample by sample; the first batch
    is checked for it. Any other loss needs ``sample_loss``. Under accumulation each micro-batch is chosen from by itself,
    under DDP each rank's. Beside techniques that let a part of the blocks run, ``depth`` is of those that run.

    Logged: ``active``, whether the last step chose, and ``fraction``, the share of its batch that it trained on.

    Args:
        keep: the share of each batch that is trained on, in (0, 1]. 1 is plain training and costs no pass.
        depth: the share of the blocks that score, in (0, 1]; at least one does.
        layers: the blocks, as a path, a pattern or a list of paths; None takes the longest stack.
        sample_loss: for a loss that cannot be seen by sample: a function of (module, batch) that returns the losses of
            the batch's samples, shape (B,). It is used to choose alone.

    Raises:
        ValueError: for other values; at setup, if there is no stack of repeated blocks; at the first step, on all ranks, if
            the loss cannot be seen by sample or a batch holds one sample only; at any step, if a loss is nan or infinite.

    Sources:
        This package's own. Coleman et al. 2020, arXiv:1906.11829, select by a separate, smaller model, before training.
    """

    saves: ClassVar[str] = "backward passes, and most of the pass that scores: it runs the first blocks alone"
    paper: ClassVar[str] = "this package's own, after selection via proxy, Coleman et al. 2020, arXiv:1906.11829"
    constraints: ClassVar[str] = (
        "a stack of repeated blocks; a mean loss of torch.nn.functional, or sample_loss=; a batch of several samples"
    )
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"keep": Choice((0.25, 0.5, 0.75)), "depth": Choice((0.25, 0.5))}, _pointless
    )
    control: ClassVar[Control] = Control("a random choice of as many samples, without scoring", _random_subset)
    refuses: ClassVar[Reasons] = {Part.PIPELINE: "the technique scores samples by the first blocks alone"}
    conflicts: ClassVar[Mapping[str, str]] = others("ProxySelection")

    def __init__(
        self,
        keep: float = 0.5,
        *,
        depth: float = 0.5,
        layers: Layers | None = None,
        sample_loss: SampleLoss | None = None,
    ) -> None:
        check_keep("ProxySelection", keep)
        if not 0 < depth <= 1:
            raise ValueError(
                f"ProxySelection({depth=}): expected a number in (0, 1], the share of the blocks that score. 1 scores with all"
                " of them."
            )
        check_sample_loss("ProxySelection", sample_loss)
        self.keep, self.depth, self.layers, self.sample_loss = keep, depth, layers, sample_loss
        self._reset()

    @override
    def _reset(self) -> None:
        super()._reset()
        self._stack: BlockStack | None = None

    @property
    @override
    def neutral(self) -> bool:
        return self.keep == 1

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
