"""Zero-initialized projections: residual branches and the head start at zero (Goyal et al. 2017; Zhang et al. 2019)."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Fraction
from lightning_eff._core._branches.ends import biases_beside, tensors_that_end
from lightning_eff._core._branches.finding import branches, heads
from lightning_eff._core._branches.sharded_step import take_apart
from lightning_eff._core.search_space import Choice, SearchSpace, needs_blocks
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.initialization._given.names import Ends, by_hand
from lightning_eff.model.initialization._once import Initialization, Turn, traced

WHO = "ZeroProjections"


def scaled(tensors: Iterable[Tensor], scale: float) -> int:
    """Set ``W <- scale W`` in place for all ``tensors``, and return how many numbers they have."""
    numbers = 0
    for tensor in tensors:
        if scale == 0.0:
            tensor.zero_()  # also where it is not finite
        else:
            tensor *= scale
        numbers += tensor.numel()
    return numbers


class ZeroProjections(Initialization):
    """Start the last layer of each residual branch, and the head, at zero, so every block starts as the identity.

    At the first batch of a fresh fit, one forward pass finds sums ``x + f(x)``. The last layer of each such branch
    becomes zero, with its bias: an attention's output projection, the second layer of an MLP or of each expert, or the
    last convolution. If a norm follows in the branch, the norm's weight becomes zero instead, because the output of a
    norm does not depend on the size of its input. Then a network of any depth first passes on its embedding and
    gradient unchanged, and learns depth. In a post-norm network, a block starts as its norm.

    The head, whose outputs the classification loss is computed from, starts at zero too, unless it shares its weight
    with the embedding. The first loss is then log C for C classes.

    Use it for deep residual networks trained from scratch. It costs one forward pass. Weights stay unchanged when the
    run resumes from a checkpoint, and in a module that was loaded by ``from_pretrained`` or trained before in this
    process. Validation before the first step (Lightning's sanity check) sees the original weights. A log line lists
    what was set.

    Logged: ``numbers``, how many numbers were set.

    Args:
        scale: the factor on the last layers. 0 is the papers', and 1 is plain training.
        head: whether to set the head, too.
        branches: the names or patterns of the weights in which residual branches end (the last layers, or the norms
            behind them), or of their modules, such as ``["blocks.*.proj"]``. None finds them.
        force: whether to also set weights that were loaded or trained before.

    Raises:
        ValueError: for a value out of range. At setup, for a pretrained module without ``force``. At the first batch,
            if no residual branch is found, or one ends in something that cannot be made zero.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[ZeroProjections()])

    References:
        Goyal et al. 2017, "Accurate, Large Minibatch SGD", arXiv:1706.02677 (last BatchNorm of a residual block); Zhang
        et al. 2019, "Fixup Initialization", arXiv:1901.09321 (last layers and the classifier); Jordan et al. 2024,
        modded-nanogpt (output projections and an untied head of GPT-2).
    """

    saves = "steps: deep networks start as identities, with undamped gradients"
    paper = "Goyal et al. 2017, arXiv:1706.02677; Zhang et al. 2019, arXiv:1901.09321"
    constraints = "modules with residual branches"
    search_space = SearchSpace(
        {"scale": Choice((0.0, 0.25)), "head": Choice((True, False))},
        needs_blocks,
    )
    control = Control("the baseline for as many seconds with its learning rate decayed to zero: a step costs the same")

    turn: ClassVar[Turn] = Turn.ENDS
    neutral_at: ClassVar[Mapping[str, Any]] = {"scale": 1.0}

    def __init__(
        self,
        scale: Annotated[float, Fraction()] = 0.0,
        *,
        head: bool = True,
        branches: Ends | None = None,
        force: bool = False,
    ) -> None:
        self.scale, self.head, self.force, self.branches = scale, head, force, branches

    @override
    def initialize(self, session: Session, batch: Any, batch_idx: int) -> int | None:
        graph = traced(session, batch, batch_idx, who=WHO)
        if graph is None:
            return None
        found = branches(graph) if self.branches is None else []
        given = by_hand(session.module, self.branches or (), who=WHO)
        if not found and not given:
            raise ValueError(
                f"{WHO}: found no residual branch x + f(x) in training_step of {type(session.module).__name__} (reentrant"
                f" checkpoints hide theirs). Name the weights in which they end by branches=[...], or remove {WHO}."
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
            f"{WHO}: scaled the last layers of {len(found) + len(given)} residual branches by {self.scale:g}:"
            f" {', '.join(names)}" + (f"; unchanged, because used elsewhere too: {', '.join(tied)}" if tied else "")
        )
        return scaled((parameters[name].detach() for name in names), self.scale)

    @override
    def check_names(self, module: nn.Module) -> None:
        by_hand(module, self.branches or (), who=WHO)

    @override
    def summary(self) -> str:
        return f"scaled {self._numbers:,} numbers by {self.scale:g}"
