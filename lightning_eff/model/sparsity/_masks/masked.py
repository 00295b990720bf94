"""The base of techniques that keep weights at zero by masks, whoever chooses them."""

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_eff._core._architecture.naming import check_names
from lightning_eff._core.search_space import RunProfile
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Technique
from lightning_eff.model.sparsity._masks.allotting import DISTRIBUTIONS, Distribution
from lightning_eff.model.sparsity._masks.finding import Block, Weight, chosen

_ROOM = (
    "BlockSparsity",
    "EarlyBird",
    "GraSP",
    "LotteryTickets",
    "RigL",
    "SET",
    "SNIP",
    "SemiStructuredSparsity",
    "TrainLargeThenCompress",
)
NO_TIME = "masked products take as long as dense ones, so that no second is saved"
_AVERAGES = (
    "ExponentialMovingAverage",
    "LatestWeightAveraging",
    "Lookahead",
    "RegularizedNonlinearAcceleration",
    "ScheduleFree",
    "StochasticWeightAveraging",
    "TrainableWeightAveraging",
)
_GROWTH = ("AutoProg", "CompoundGrowth", "DropIn", "GreedyLayerwise", "ProgressiveStacking", "ShallowToDeep")
_ADAPTERS = ("LoRA", "BitFit", "HoulsbyAdapters", "PromptTuning", "VeRA", "VisualPromptTuning")
_ANYWHERE: Mapping[str, str] = {
    **dict.fromkeys(_AVERAGES, "an average of weights under several masks has the zeros of none"),
    **dict.fromkeys(("LocalSGD", "ResIST"), "each rank would choose masks by weights of its own"),
    **dict.fromkeys(_ADAPTERS, "it freezes the weights that masks are for"),
}
#: What masks that are chosen over the whole network cannot train with, for ``conflicts``.
RIVALS: Mapping[str, str] = {
    **_ANYWHERE,
    **dict.fromkeys(_GROWTH, "masks are chosen over the whole network, of which a part is trained first"),
}
#: What masks that change cannot train with, beside those.
RIVALS_IN_STATE: Mapping[str, str] = {
    "EightBitOptimizer": "states of 8 bits have no zero for one weight alone",
    "OptimizerOffload": "it holds states where those of single weights cannot be set to zero",
}


def rivals(who: str) -> dict[str, str]:
    """``conflicts`` of the class ``who`` with others of its room, and with :data:`RIVALS`."""
    return {**RIVALS, **neighbours(who)}


def neighbours(who: str) -> dict[str, str]:
    """``conflicts`` of the class ``who``, whose masks are those of each weight by itself, with others of its room too."""
    return {**_ANYWHERE, **{name: "both say which weights are zero" for name in _ROOM if name != who}}


def no_time(profile: RunProfile) -> str | None:
    """Why a search for a faster recipe need not try it, in words."""
    return NO_TIME


def check_sparsity(sparsity: float, *, who: str) -> None:
    """Raise ``ValueError`` unless it is a share in [0, 1)."""
    if isinstance(sparsity, bool) or not isinstance(sparsity, int | float) or not 0.0 <= sparsity < 1.0:
        raise ValueError(
            f"{who}({sparsity=}): expected the share of the weights that is zero, in [0, 1); 0 is plain training."
        )


def agreed(session: Session, values: Tensor) -> Tensor:
    """The mean of ``values`` over the ranks, the same number on each."""
    if session.replicas.count == 1:
        return values
    return session.trainer.strategy.reduce(values.detach().clone(), reduce_op="mean")  # pyright: ignore[reportReturnType]


def stepped(session: Session, names: Iterable[str], *, who: str) -> dict[str, nn.Parameter]:
    """The parameters of these names.

    Raises:
        ValueError: if the optimizers step none of them.
    """
    named = dict(session.module.named_parameters())
    found = {name: named[name] for name in names}
    held = {id(p) for o in session.optimizers for group in o.param_groups for p in group["params"]}
    if not any(id(p) in held for p in found.values()):
        raise ValueError(
            f"{who}: the optimizers of {type(session.module).__name__} step none of the weights that it would mask;"
            f" expected some of {', '.join([*found][:4])}. Let an optimizer step them, or take it out."
        )
    return found


def before_clipping(session: Session, fn: Callable[[], None]) -> None:
    """Call ``fn`` before gradients are clipped, once those of all micro-batches and ranks are summed."""
    clip = session.module.configure_gradient_clipping

    @functools.wraps(clip)
    def configure_gradient_clipping(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        fn()
        clip(optimizer, *args, **kwargs)

    session.patches.set(session.module, "configure_gradient_clipping", configure_gradient_clipping)


class Masked(Technique):
    """A technique that holds some weights at exactly zero.

    A subclass says in :meth:`begin` which, as the first batch comes, after all others have set weights. From then on

    * gradients of masked weights are set to zero before they are clipped, once those of all micro-batches and ranks are
      summed, so that norms are those of the sparse network and momenta of masked weights stay zero;
    * the masked weights are zero after each optimizer step, whatever the optimizer;
    * masks are in checkpoints, whose ``state_dict`` is the plain module's, with zeros in it.

    Attributes:
        masks: by parameter name, True where a weight is kept; empty until the first batch.
        weights: what is masked, by name.
        sparsity: the share that is zero in the end.
    """

    needs_optimizer: ClassVar[bool] = True

    masks: dict[str, Tensor]
    weights: dict[str, Weight]
    sparsity: float
    distribution: Distribution
    names: list[str] | None
    dense: list[str]
    block: Block

    def _take(
        self,
        *,
        sparsity: float,
        distribution: Distribution = "uniform",
        names: Sequence[str] | None = None,
        dense: Sequence[str] = (),
        block: Sequence[int] = (1, 1),
    ) -> None:
        """Check and keep the arguments that all have."""
        who = type(self).__name__
        check_sparsity(sparsity, who=who)
        if distribution not in DISTRIBUTIONS:
            raise ValueError(f"{who}({distribution=}): expected one of {', '.join(map(repr, DISTRIBUTIONS))}.")
        whole = len(block) == 2 and all(isinstance(b, int) and not isinstance(b, bool) and b >= 1 for b in block)
        if isinstance(block, str) or not whole:
            raise ValueError(
                f"{who}({block=}): expected rows and columns of a block, two integers >= 1, such as (4, 4); (1, 1) masks"
                " single weights."
            )
        example = "layers.*.mlp.*"
        self.names = check_names(names, who=who, what="weights, or of the modules that hold them", example=example)
        self.dense = check_names(dense, who=who, what="weights that stay dense", example="lm_head") or []
        self.sparsity, self.distribution, self.block = float(sparsity), distribution, (block[0], block[1])
        self._reset()

    def _reset(self) -> None:
        self.masks, self.weights = {}, {}
        self._parameters: dict[str, nn.Parameter] = {}
        self._handles: list[RemovableHandle] = []
        self._dirty = True
        self._kept = self._total = 0

    @property
    @override
    def neutral(self) -> bool:
        return self.sparsity == 0.0 or self.names == []

    # -- what subclasses say

    @abstractmethod
    def begin(self, session: Session, batch: Any, batch_idx: int) -> dict[str, Tensor] | None:
        """The first masks, the same on all ranks; None where this batch cannot tell, and no weight will move by it."""

    def before_step(self, session: Session) -> None:
        """Gradients are whole, and not masked yet."""

    def after_step(self, session: Session) -> None:
        """An optimizer has stepped, and masked weights are zero."""

    def asked(self) -> dict[str, Any]:
        """The settings that masks follow from, which a checkpoint's run must have had too."""
        return {"sparsity": self.sparsity, "distribution": self.distribution, "block": list(self.block)}

    # -- what subclasses use

    def parameter(self, name: str) -> nn.Parameter:
        """The parameter of that name."""
        return self._parameters[name]

    @torch.no_grad()
    def put(self, masks: Mapping[str, Tensor]) -> None:
        """Let these be the masks, and the weights zero where they say so."""
        self.masks = {name: mask.to(self._parameters[name].device) for name, mask in masks.items()}
        self._kept = sum(int(mask.sum()) for mask in self.masks.values())
        self._total = sum(mask.numel() for mask in self.masks.values())
        self.apply()

    @torch.no_grad()
    def apply(self) -> None:
        """Let masked weights be zero."""
        for name, mask in self.masks.items():
            self._parameters[name].mul_(mask)
        self._dirty = False

    def tell_of_empty(self) -> None:
        """Say which weights have nothing left."""
        empty = [name for name, mask in self.masks.items() if not bool(mask.any())]
        if empty:
            rank_zero_info(
                f"{type(self).__name__}: {len(empty)} of {len(self.masks)} weights have no number left that is not masked, such"
                f" as {empty[0]}, so nothing passes through them. Lower the sparsity, or leave them out by dense=."
            )

    @torch.no_grad()
    def clear_state(self, session: Session, where: Mapping[str, Tensor]) -> None:
        """Set momenta, and what else the optimizers keep for each weight alone, to zero where ``where`` says so."""
        for optimizer in session.optimizers:
            for name, places in where.items():
                p = self._parameters[name]
                for value in dict(optimizer.state.get(p) or {}).values():
                    if isinstance(value, Tensor) and value.is_floating_point() and value.shape == p.shape:
                        value.masked_fill_(places.to(value.device), 0.0)

    # -- the run

    @override
    def check_checkpoint(self, session: Session, state: dict[str, Any] | None) -> None:
        if not session.fitting:
            return
        who = type(self).__name__
        if state is None:
            raise ValueError(
                f"{who}: the checkpoint was saved without it, and in mid-run it would set weights to zero that were trained;"
                " expected a checkpoint of a run with it. Begin a new fit from the checkpoint's weights, or take it out."
            )
        if state["asked"] != self.asked():
            raise ValueError(
                f"{who}: the checkpoint's masks were made with {state['asked']}, and this run asks for {self.asked()}; expected"
                " the same settings. Resume with those of the checkpoint."
            )

    @override
    def attach(self, session: Session) -> None:
        self._reset()

    @override
    def on_model(self, session: Session) -> None:
        if not session.fitting:
            return
        self.weights = self.find(session.module)
        # what others begin with, and what they step by, is masked afterwards, in whatever order they are given
        session.rest(self)
        session.working.append(self)

    def find(self, module: nn.Module) -> dict[str, Weight]:
        """What is masked.

        Raises:
            ValueError: if there is nothing, or a name means nothing.
        """
        return chosen(module, self.names, self.dense, self.block, who=type(self).__name__, masked=self.masks)

    @override
    def on_optimizers(self, session: Session) -> None:
        who = type(self).__name__
        named = dict(session.module.named_parameters())
        self._parameters = stepped(session, self.weights, who=who)
        wrong = [n for n, m in self.masks.items() if n not in named or named[n].shape != m.shape]
        if wrong or (self.masks and self.masks.keys() != self.weights.keys()):
            raise ValueError(
                f"{who}: the checkpoint's masks are of other weights than {type(session.module).__name__} has, or of other"
                f" shapes{', such as ' + wrong[0] if wrong else ''}; expected a checkpoint of the same model and names. Resume"
                " with those."
            )
        if self.masks:
            self.put(self.masks)
        before_clipping(session, lambda: self._gradients(session))
        self._handles = [o.register_step_post_hook(lambda *_: self._stepped(session)) for o in session.optimizers]

    @torch.no_grad()
    def _gradients(self, session: Session) -> None:
        self.before_step(session)
        for name, mask in self.masks.items():
            g = self._parameters[name].grad
            if g is not None:
                g.mul_(mask)

    def _stepped(self, session: Session) -> None:
        self.apply()
        self.after_step(session)

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        if not self.masks:
            masks = self.begin(session, batch, batch_idx)
            if masks is None:
                return
            self.put(masks)
            self.tell_of_empty()
        elif self._dirty:
            self.apply()
            self.clear_state(session, {name: ~mask for name, mask in self.masks.items()})

    @override
    def on_blocks_changed(self, session: Session) -> None:
        self._dirty = True

    @override
    def detach(self, session: Session) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._parameters = [], {}

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"sparsity": 1.0 - self._kept / self._total if self._total else 0.0, "kept": self._kept}

    @override
    def summary(self) -> str:
        if not self._total:
            return "no weight masked"
        share = 1.0 - self._kept / self._total
        return f"{share:.1%} of {self._total:,} numbers in {len(self.masks)} weights are zero; that saved no time"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.asked(), "masks": dict(self.masks), "numbers": [self._kept, self._total]}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.masks = dict(state_dict["masks"])
        self._kept, self._total = state_dict["numbers"]
