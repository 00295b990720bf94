"""Residual branches and the head begin at zero: the network begins as its skips (Goyal et al. 2017; Zhang et al. 2019)."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._branches.ends import biases_beside, tensors_that_end
from lightning_eff._core._branches.finding import branches, heads
from lightning_eff._core._branches.pieces import take_apart
from lightning_eff._core.search_space import Choice, SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.initialization._given.names import by_hand, check_branches
from lightning_eff.model.initialization._once import Initialization, Turn, traced

WHO = "ZeroProjections"


def scaled(tensors: Iterable[Tensor], scale: float) -> int:
    """W <- scale W, in place, b <- scale b, for all ``tensors``; returns how many numbers those are."""
    numbers = 0
    for tensor in tensors:
        if scale == 0.0:
            tensor.zero_()  # also where it is not finite
        else:
            tensor *= scale
        numbers += tensor.numel()
    return numbers


class ZeroProjections(Initialization):
    """Let each residual branch add nothing at first, and the head tell all classes as likely: their last maps begin at zero.

    At the first batch of a fresh fit, one forward pass is looked through for sums of the form ``x + f(x)``, whatever modules
    are called. The last map of each such branch (an attention's output map, the second of an MLP, each expert's second, the
    last convolution) becomes zero, with its bias; where a norm stands behind it in the branch, that norm's weight does in its
    place, since what comes out of a norm does not depend on how large its input is. Every block then begins as its skip, a
    network of any depth passes on its embedding and its gradient as they are, and depth is learnt. The head (the map whose
    outputs the loss of classes is taken of) begins at zero, too, unless its weight is also the embedding's: the first loss
    is then log C for C classes. In a post-norm network, a block begins as its norm.

    What was found is said at the start. Weights of a checkpoint that is gone on from, of Hugging Face's ``from_pretrained``,
    and of a module that this process trained before are left alone. Under PyTorch's initialisation, validation before the
    first step (Lightning's sanity check) sees the weights as the module made them.

    Logged: ``numbers``, how many were set.

    Args:
        scale: what the last maps are multiplied by, in [0, 1]. 0 is the sources'; 1 is plain training.
        head: whether the head is set, too.
        branches: names of the weights in which residual branches end (their last maps, or the norms behind these), or of their
            modules, or patterns of them, e.g. ``["blocks.*.proj"]``; None looks for them.
        force: also set weights that were loaded or trained before.

    Raises:
        ValueError: for a ``scale`` outside of [0, 1]; at setup, for a pretrained module without ``force``; at the first batch,
            where no residual branch is found, or where a branch ends in something that cannot be made zero.

    Sources:
        Goyal et al. 2017, arXiv:1706.02677 (the last BatchNorm of a residual block begins at zero); Zhang et al. 2019,
        arXiv:1901.09321 (Fixup: last maps and the classifier begin at zero); Jordan et al. 2024, modded-nanogpt (output
        projections and an untied head, in speed runs of GPT-2).
    """

    saves: ClassVar[str] = "steps: deep networks begin as shallow ones, with their gradients whole"
    paper: ClassVar[str] = "Goyal et al. 2017, arXiv:1706.02677; Zhang et al. 2019, arXiv:1901.09321"
    constraints: ClassVar[str] = "modules with residual branches"
    survey: ClassVar[Survey | None] = Survey("initialisation: zero-initialised residual branches (Fixup)", shen="4.3")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"scale": Choice((0.0, 0.25)), "head": Choice((True, False))},
        pointless=lambda profile: None if profile.num_blocks else "there is no stack of blocks with residual branches",
    )
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds with its learning rate decayed to zero: a step costs the same"
    )

    turn: ClassVar[Turn] = Turn.ENDS

    def __init__(
        self, scale: float = 0.0, *, head: bool = True, branches: Sequence[str] | None = None, force: bool = False
    ) -> None:
        if not 0.0 <= scale <= 1.0:
            raise ValueError(
                f"ZeroProjections(scale={scale}): expected a number in [0, 1], by which the last maps of residual branches are"
                " multiplied. 0 is the sources'; 1 is plain training."
            )
        self.scale, self.head, self.force = scale, head, force
        self.branches = check_branches(branches, who=WHO)

    @property
    @override
    def neutral(self) -> bool:
        return self.scale == 1.0

    @override
    def initialize(self, session: Session, batch: Any, batch_idx: int) -> int | None:
        graph = traced(session, batch, batch_idx, who=WHO)
        if graph is None:
            return None
        found = branches(graph) if self.branches is None else []
        given = by_hand(session.module, self.branches or (), who=WHO)
        if not found and not given:
            raise ValueError(
                f"{WHO}: training_step of {type(session.module).__name__} adds nothing to what it is made of by a map; expected"
                " residual branches, x + f(x), seen in autograd's graph (reentrant checkpoints hide theirs). Name those in"
                " which they end, branches=[...], or take the technique out."
            )
        names = {
            name: None for branch in found for name in tensors_that_end(session.module, graph, branch, found, who=WHO)
        } | dict.fromkeys(name for tensors in given for name in tensors)
        tied: list[str] = []
        for weight in heads(graph) if self.head else ():
            if len(graph.uses(weight)) > 1:
                tied.append(weight)
            else:
                names |= dict.fromkeys((weight, *biases_beside(session.module, weight)))
        take_apart(session)
        parameters = dict(session.module.named_parameters())
        rank_zero_info(
            f"{WHO}: {len(found) + len(given)} residual branches begin at {self.scale:g} of their last maps: {', '.join(names)}"
            + (f"; left alone, since it is used elsewhere too: {', '.join(tied)}" if tied else "")
        )
        return scaled((parameters[name].detach() for name in names), self.scale)

    @override
    def check_names(self, module: nn.Module) -> None:
        by_hand(module, self.branches or (), who=WHO)

    @override
    def summary(self) -> str:
        return f"{self._numbers} numbers began at {self.scale:g} of what the module had made them"
