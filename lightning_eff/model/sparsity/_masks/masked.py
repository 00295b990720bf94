"""The base of techniques that keep weights at zero by masks."""

from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_eff._core.search_space import RunProfile
from lightning_eff._core.session import Session
from lightning_eff._core.technique import LOCAL_STEPS, Technique
from lightning_eff.model.sparsity._masks.arguments import Distribution
from lightning_eff.model.sparsity._masks.finding import Block, Weight, chosen
from lightning_eff.model.sparsity._masks.turns import around_steps

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
_ADAPTERS = ("LoRA", "BitFit", "HoulsbyAdapters", "PrefixTuning", "PromptTuning", "VeRA", "VisualPromptTuning")
_ANYWHERE: Mapping[str, str] = {
    **dict.fromkeys(_AVERAGES, "an average of weights with different masks has no zeros"),
    **dict.fromkeys((*LOCAL_STEPS, "ResIST"), "each rank would choose other masks, because its weights differ"),
    **dict.fromkeys(_ADAPTERS, "it freezes the weights to mask"),
}
#: For ``conflicts``: the techniques that masks chosen over the whole network cannot train with.
RIVALS: Mapping[str, str] = {
    **_ANYWHERE,
    **dict.fromkeys(_GROWTH, "masks are chosen over the whole network, and it first trains a part"),
}
#: For ``conflicts``: the techniques that masks which change cannot train with either.
RIVALS_IN_STATE: Mapping[str, str] = {
    "EightBitOptimizer": "its 8-bit states cannot be set to zero for single weights",
    "OptimizerOffload": "its states on the host cannot be set to zero for single weights",
}


def rivals(who: str) -> dict[str, str]:
    """``conflicts`` of the class ``who`` with the other techniques of its folder, and with :data:`RIVALS`."""
    return {**RIVALS, **neighbours(who)}


def neighbours(who: str) -> dict[str, str]:
    """``conflicts`` of the class ``who``, which chooses the masks of each weight separately."""
    return {**_ANYWHERE, **{name: "both choose which weights are zero" for name in _ROOM if name != who}}


def no_time(profile: RunProfile) -> str | None:
    """Why a search for a faster recipe need not try it."""
    return "masked products take as long as dense ones, so it saves no time"


def no_time_on_a_cpu(profile: RunProfile) -> str | None:
    """Why a search for a faster recipe need not try it where torch has no sparse kernels."""
    return None if profile.accelerator == "cuda" else no_time(profile)


def agreed(session: Session, values: Tensor) -> Tensor:
    """The mean of ``values`` over the ranks, the same on each rank."""
    if session.replicas.count == 1:
        return values
    return session.trainer.strategy.reduce(values.detach().clone(), reduce_op="mean")  # pyright: ignore[reportReturnType]


def stepped(session: Session, names: Iterable[str], *, who: str) -> dict[str, nn.Parameter]:
    """The parameters of these names.

    Raises:
        ValueError: if the optimizers have none of them.
    """
    named = dict(session.module.named_parameters())
    found = {name: named[name] for name in names}
    held = {id(p) for o in session.optimizers for group in o.param_groups for p in group["params"]}
    if not any(id(p) in held for p in found.values()):
        raise ValueError(
            f"{who}: the optimizers of {type(session.module).__name__} have none of the weights to mask, such as"
            f" {', '.join([*found][:4])}. Give them to an optimizer, or remove the callback."
        )
    return found


class Masked(Technique):
    """A technique that keeps some weights at exactly zero.

    A subclass chooses them in :meth:`begin`, on the first batch, after other techniques have set weights. From then on

    * gradients of masked weights are set to zero before clipping, once they are summed over micro-batches and ranks, so that
      norms are those of the sparse network and momenta of masked weights stay zero;
    * masked weights are zero after each optimizer step, for every optimizer. A step changes no weight of another optimizer,
      because a graph that needs it may be waiting for its backward pass;
    * checkpoints hold the masks, and their ``state_dict`` is the plain module's with zeros in it.

    Attributes:
        masks: by parameter name, True where a weight is kept; empty until the first batch.
        weights: the weights to mask, by name.
        sparsity: the fraction that is zero in the end.
    """

    needs_automatic_optimization: ClassVar[bool] = False
    needs_optimizer: ClassVar[bool] = True
    neutral_at: ClassVar[Mapping[str, Any]] = {"sparsity": 0.0, "names": []}
    checkpointed = ("masks",)

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
        """Keep the arguments that all have."""
        self.names, self.dense = None if names is None else list(names), list(dense)
        self.sparsity, self.distribution, self.block = float(sparsity), distribution, (block[0], block[1])

    def _reset(self) -> None:
        self.masks, self.weights = {}, {}
        self._parameters: dict[str, nn.Parameter] = {}
        self._handles: list[RemovableHandle] = []
        self._held: dict[int, list[str]] = {}  # the weights of each optimizer, by its id
        self._dirty = True
        self._kept = self._total = 0

    # -- methods of subclasses

    @abstractmethod
    def begin(self, session: Session, batch: Any, batch_idx: int) -> dict[str, Tensor] | None:
        """The first masks, the same on all ranks; None if this batch cannot show them and its step will be skipped."""

    def before_step(self, session: Session, optimizer: Optimizer) -> None:
        """Called when this optimizer's gradients are complete; those of :meth:`undecided` are not masked yet."""

    def after_step(self, session: Session, optimizer: Optimizer) -> None:
        """Called after a step of this optimizer, when masked weights are zero."""

    def undecided(self, session: Session) -> Collection[str]:
        """Weights whose next step needs the gradients of masked elements. Only asked under manual optimization."""
        return ()

    def asked(self) -> dict[str, Any]:
        """The settings that determine the masks; a resumed run must have the checkpoint's."""
        return {"sparsity": self.sparsity, "distribution": self.distribution, "block": list(self.block)}

    # -- methods for subclasses

    def parameter(self, name: str) -> nn.Parameter:
        """The parameter of that name."""
        return self._parameters[name]

    def names_of(self, optimizer: Optimizer) -> list[str]:
        """The weights that this optimizer trains. Under automatic optimization, all weights are its own."""
        return self._held.get(id(optimizer), [*self.weights])

    def together(self) -> list[list[str]]:
        """The weights in groups that are compared with each other: those of each optimizer, as of a GAN's two networks."""
        groups: dict[int, list[str]] = {}
        for name in self.weights:
            owner = next((i for i, held in enumerate(self._held.values()) if name in held), -1)
            groups.setdefault(owner, []).append(name)
        return [*groups.values()]

    @torch.no_grad()
    def put(self, masks: Mapping[str, Tensor], only: Iterable[str] | None = None) -> None:
        """Take these masks, and set masked weights to zero, those named by ``only`` or all."""
        self.masks = {name: mask.to(self._parameters[name].device) for name, mask in masks.items()}
        self._kept = sum(int(mask.sum()) for mask in self.masks.values())
        self._total = sum(mask.numel() for mask in self.masks.values())
        self.apply(only)

    @torch.no_grad()
    def apply(self, only: Iterable[str] | None = None) -> None:
        """Set masked weights to zero, those named by ``only`` or all."""
        for name in self.masks if only is None else only:
            if name in self.masks:
                self._parameters[name].mul_(self.masks[name])
        if only is None:
            self._dirty = False

    def tell_of_empty(self) -> None:
        """Report weights of which nothing is left."""
        empty = [name for name, mask in self.masks.items() if not bool(mask.any())]
        if empty:
            rank_zero_info(
                f"{type(self).__name__}: {len(empty)} of {len(self.masks)} weights are masked completely, such as {empty[0]}."
                f" Lower the sparsity, or leave them out with dense=[{empty[0]!r}]."
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
                f"{who}: the checkpoint was saved without it, and it would now set trained weights to zero. Start a new fit"
                " from the checkpoint's weights, or remove the callback."
            )
        if state["asked"] != self.asked():
            raise ValueError(
                f"{who}: the checkpoint's masks were made with {state['asked']}, and this run has {self.asked()}. Resume with"
                " the settings of the checkpoint."
            )

    @override
    def on_model(self, session: Session) -> None:
        if not session.fitting:
            return
        self.weights = self.find(session.module)
        # masks apply after other techniques' changes of weights and steps, in any order of the callbacks
        session.rest(self)
        session.working.append(self)

    def find(self, module: nn.Module) -> dict[str, Weight]:
        """The weights to mask.

        Raises:
            ValueError: if there are none, or a name means nothing.
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
                f"{who}: the checkpoint's masks do not fit the weights of {type(session.module).__name__}"
                f"{', such as ' + wrong[0] if wrong else ''}. Resume with the checkpoint's model and names."
            )
        if self.masks:
            self.put(self.masks)
        for o in session.optimizers:
            own = {id(p) for group in o.param_groups for p in group["params"]}
            if not session.module.automatic_optimization:
                self._held[id(o)] = [name for name in self.weights if id(self._parameters[name]) in own]
        self._handles = around_steps(
            session,
            lambda o: self._gradients(session, o),
            lambda o: self._stepped(session, o),
            backward=lambda: self._went_backward(session),
        )

    @torch.no_grad()
    def _gradients(self, session: Session, optimizer: Optimizer) -> None:
        self.before_step(session, optimizer)
        self._mask_gradients(self.names_of(optimizer))

    @torch.no_grad()
    def _mask_gradients(self, names: Iterable[str]) -> None:
        for name in names:
            g = self._parameters[name].grad
            if g is not None and name in self.masks:
                g.mul_(self.masks[name])

    @torch.no_grad()
    def _went_backward(self, session: Session) -> None:
        graphs = {n for n in self.masks if (g := self._parameters[n].grad) is not None and g.requires_grad}
        self._mask_gradients(self.masks.keys() - self.undecided(session) - graphs)

    def _stepped(self, session: Session, optimizer: Optimizer) -> None:
        self.apply(self.names_of(optimizer))
        self.after_step(session, optimizer)

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
        self._handles, self._parameters, self._held = [], {}, {}

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"sparsity": 1.0 - self._kept / self._total if self._total else 0.0, "kept": self._kept}

    @override
    def summary(self) -> str:
        if not self._total:
            return "masked no weight"
        share = 1.0 - self._kept / self._total
        return f"{share:.1%} of {self._total:,} elements in {len(self.masks)} weights are zero; this saved no time"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "asked": self.asked(), "numbers": [self._kept, self._total]}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._kept, self._total = state_dict["numbers"]
