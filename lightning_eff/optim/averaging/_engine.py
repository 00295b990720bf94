"""Other weights than those that are trained: kept beside them, and shown to validation, checkpoints and the fit's end."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._lightning.names import is_a
from lightning_eff._core._needs.needs import Need
from lightning_eff._core._needs.offers import is_plain
from lightning_eff._core.session import Session
from lightning_eff._core.technique import OtherWeights
from lightning_eff.optim.averaging import _buffers
from lightning_eff.optim.averaging._batch_norm import batch_norms, modes, recompute_statistics


def rivals(*names: str) -> dict[str, str]:
    """``conflicts`` with other averages, by their names, and with what gives each rank weights of its own."""
    return {
        **dict.fromkeys(names, "both replace the weights that are validated and kept"),
        "LocalSGD": "the average would be of each rank's own weights, and rank 0's alone would be saved",
    }


def wide(tensor: Tensor) -> torch.dtype:
    """The dtype in which many of ``tensor`` are summed: double precision, or single on MPS, which has no other."""
    return torch.promote_types(tensor.dtype, torch.float32 if tensor.device.type == "mps" else torch.float64)


def is_count(value: object) -> bool:
    """Whether ``value`` is an integer >= 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def pieces(session: Session) -> dict[str, Tensor]:
    """What this process has of the module's parameters and buffers, by their names; to write to it is to write to them.

    That is all of them, but under a strategy that shards: its own part of each DTensor, also where FSDP2 has left
    parameters whole after a forward pass.
    """
    module = session.module
    if not is_plain(session.trainer.strategy):
        from torch.distributed.fsdp import FSDPModule

        for m in (session.trainer.strategy.model or module).modules():
            if isinstance(m, FSDPModule):
                m.reshard()
    held = (t for t in (*module.named_parameters(), *module.named_buffers()))
    return {name: t.detach().to_local() if hasattr(t, "to_local") else t.detach() for name, t in held}  # pyright: ignore[reportAttributeAccessIssue]


def check_bn_batches(who: str, bn_batches: object) -> None:
    """Raise ``ValueError`` unless it is a number of training batches, or None."""
    if bn_batches is not None and not is_count(bn_batches):
        raise ValueError(f"{who}({bn_batches=}): expected a number of training batches >= 1, or None for an epoch's.")


class AveragedWeights(OtherWeights):
    """A technique that makes other weights of those that are trained, and shows them in their place.

    A subclass says in :meth:`average` what the other weights are, holds what they are made of, and calls :meth:`outdate`
    when they change. Buffers that a parametrisation computes from weights, as spectral normalisation its vectors, are computed
    at the other weights too. While the trainer validates, and from the end of fit on, the module holds them; every checkpoint's
    ``state_dict`` is them too, once there are any, and the trained weights are in the callback's state. BatchNorm
    statistics are recomputed for them where ``bn_batches`` says so.

    Attributes:
        bn_batches: how many training batches, on each rank, BatchNorm statistics are recomputed from; None is an epoch.
        recomputes: whether they are.
    """

    bn_setting: ClassVar[str] = ""  # the argument that makes it recompute statistics, where one does
    needs: ClassVar[Need] = Need.PIECES
    needs_automatic_optimization: ClassVar[bool] = False
    needs_optimizer: ClassVar[bool] = True
    bn_batches: int | None = 100
    recomputes: bool = True

    def _reset(self) -> None:
        self._taken = 0  # how often trained weights were taken up
        self._held: dict[str, Tensor] = {}  # the average, where one copy is all there is of it
        self._raw: dict[str, Tensor] | None = None  # set while the module holds the other weights
        self._statistics: dict[str, Tensor] | None = None  # BatchNorm's, at the other weights; None until needed
        self._modes: dict[str, bool] = {}
        self._computed: dict[str, tuple[str, ...]] = {}  # buffers that follow from weights, by who computes them
        self._step = 0
        self._finished = False

    # -- what subclasses say

    @abstractmethod
    def average(self, session: Session) -> Iterator[tuple[str, Tensor]]:
        """The other weights, one by one, by the dotted names of parameters and buffers; called before any is replaced."""

    @property
    def names(self) -> Iterable[str]:
        """The names that :meth:`average` gives; none where there is nothing yet to be shown."""
        return self._held

    def forget(self) -> None:
        """Drop what is held: another technique changed which blocks the network has, or overwrote weights."""
        self._held = {}

    def to_devices(self, devices: Mapping[str, torch.device]) -> None:
        """Bring what is held, which a checkpoint gave, to where the module is."""
        self._held = {name: value.to(devices[name]) for name, value in self._held.items()}

    def saved(self) -> dict[str, Any]:
        """What is held, for a checkpoint."""
        return {"held": dict(self._held)}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`saved` gave."""
        self._held = dict(state["held"])

    def saved_weights(self, state: dict[str, Any]) -> Mapping[str, Tensor]:
        """The weights in what :meth:`saved` gave, by name."""
        return state["held"]

    # -- the run

    @override
    def check(self, session: Session) -> None:
        who = type(self).__name__
        for other in session.trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            averages = isinstance(other, AveragedWeights) and other is not self and not other.neutral
            if averages or is_a(other, WeightAveraging, StochasticWeightAveraging):
                raise ValueError(
                    f"{who} and {type(other).__name__} cannot train together: both replace the weights"
                    " that are validated and kept. Take one of them out of the trainer's callbacks."
                )

    def check_budget(self, session: Session, setting: str, otherwise: str) -> None:
        """Raise ``ValueError`` if the run has no end that ``setting`` could be a share of."""
        if not session.progress.limits():
            raise ValueError(
                f"{type(self).__name__}({setting}): the Trainer has no end (max_steps=-1, max_epochs=-1, max_time=None)"
                f" that it could be a fraction of. Set one of them, or {otherwise}."
            )

    @override
    def check_checkpoint(self, session: Session, state: dict[str, Any] | None) -> None:
        if not session.fitting or not state:
            return
        here = session.trainer.world_size if _divided(session) else 1
        there = len(state.get("ranks", [state]))
        if here != there or _divided(session) != ("ranks" in state):
            was, is_here = (f"the pieces of {n} processes" if n > 1 else "whole tensors" for n in (there, here))
            raise ValueError(
                f"{type(self).__name__}: the checkpoint's averages are {was}, and this run's are {is_here}; expected the same"
                " strategy and as many processes. Resume with those, or begin a new fit from the checkpoint's weights, which"
                " are the average."
            )
        held, saved = pieces(session), self.saved_weights(_own(session, state))
        wrong = [name for name, w in saved.items() if name not in held or held[name].shape != w.shape]
        if wrong:
            raise ValueError(
                f"{type(self).__name__}: the checkpoint's averages are of {len(wrong)} parameters that"
                f" {type(session.module).__name__} has not, or has in another shape, such as {wrong[0]!r}; expected a"
                " checkpoint of the same model. Resume with the model it was saved from."
            )

    @override
    def attach(self, session: Session) -> None:
        self._reset()
        strategy = session.trainer.strategy
        original = strategy.lightning_module_state_dict

        def averaged_state_dict() -> dict[str, Any]:
            if self._raw is not None or not self.names:
                return original()
            with self.shown(session):
                return deepcopy(original())  # tied weights stay one tensor

        session.patches.set(strategy, "lightning_module_state_dict", averaged_state_dict)
        if not is_plain(strategy):
            save = strategy.save_checkpoint

            def save_averaged(
                *args: Any, **kwargs: Any
            ) -> None:  # where each rank writes its pieces, it reads them here
                if self._raw is not None or not self.names:
                    return save(*args, **kwargs)
                with self.shown(session):
                    return save(*args, **kwargs)

            session.patches.set(strategy, "save_checkpoint", save_averaged)

    @override
    def on_model(self, session: Session) -> None:
        if not session.fitting:
            return
        if self.recomputes and batch_norms(session.module) and not session.module.automatic_optimization:
            raise ValueError(
                f"{type(self).__name__}: {type(session.module).__name__} has BatchNorm layers and"
                " automatic_optimization=False; expected automatic optimization, because their statistics are"
                " recomputed by running training_step without training, which is impossible where it steps by itself."
                " Use automatic optimization, or layers without running statistics."
            )
        if self.recomputes and batch_norms(session.module) and not is_plain(session.trainer.strategy):
            settings = f"({self.bn_setting})" if self.bn_setting else ""
            other = "batch_norm='average'" if self.bn_setting else "layers without running statistics"
            raise ValueError(
                f"{type(self).__name__}{settings}: {type(session.trainer.strategy).__name__} divides the module, and BatchNorm"
                " statistics of averaged weights are recomputed by training_step on a whole one. Use strategy='ddp' or"
                f" {other}."
            )
        self._modes = modes(session.module)
        self._computed = _buffers.computed(session.module) if is_plain(session.trainer.strategy) else {}
        self.take_out(session)

    @override
    def on_optimizers(self, session: Session) -> None:
        self.to_devices({name: t.device for name, t in pieces(session).items()})

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        self._step = session.trainer.global_step

    def stepped(self, session: Session) -> bool:
        """In :meth:`on_batch_end`: whether an optimizer made a step since the batch began."""
        return session.trainer.global_step > self._step

    @override
    def on_blocks_changed(self, session: Session) -> None:
        self.forget()
        self._statistics = None

    def outdate(self, session: Session) -> None:
        """The other weights have changed: trained weights were taken up."""
        self._taken += 1
        self._statistics = None
        self._modes = modes(session.module)

    # -- shown and put away

    @override
    def put_in(self, session: Session) -> None:
        """Put the other weights into the module, if there are any and they are not there."""
        if self._raw is not None or not self.names:
            return
        held = pieces(session)
        with torch.inference_mode(False), torch.no_grad():
            raw: dict[str, Tensor] = {}
            for name, value in self.average(session):
                raw[name] = held[name].clone()
                held[name].copy_(value)
            self._raw = raw
            if self._computed:
                trained = _buffers.values_of(session.module, self._computed)
                for name, value in trained.items():
                    raw.setdefault(name, value)
                _buffers.compute(session.module, self._computed)
            if self._statistics is None and self.recomputes:
                self._statistics = recompute_statistics(session, self._modes, self.bn_batches, epoch=self._taken)
            for name, value in (self._statistics or {}).items():
                raw.setdefault(name, held[name].clone())  # an average of statistics may be there already
                held[name].copy_(value)

    @override
    @torch.no_grad()
    def take_out(self, session: Session) -> None:
        """Put the trained weights back, if the others are in the module."""
        held = pieces(session) if self._raw is not None else {}
        for name, value in (self._raw or {}).items():
            held[name].copy_(value)
        self._raw = None

    # -- Lightning's hooks

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if not self.neutral:
            # strategies that shard restore as late as this; and a tuner's trial run may have loaded its checkpoint
            self.to_devices({name: t.device for name, t in pieces(self.session).items()})
            self.take_out(self.session)

    @override
    def state_dict(self) -> dict[str, Any]:
        raw, names = self._raw, [*self.names]
        if raw is None and names and self._session is not None:
            held = pieces(self._session)
            computed = [name for found in self._computed.values() for name in found]
            raw = {name: held[name] for name in (*names, *(self._statistics or ()), *computed)}
        state = {"taken": self._taken, **self.saved(), "raw": raw, "statistics": self._statistics}
        session = self._session or self._past
        if session is None or not _divided(session):
            return state
        return {"ranks": session.replicas.everyone(apply_to_collection(state, Tensor, lambda t: t.detach().cpu()))}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.neutral or (self._session is not None and not self._session.fitting):
            return  # the weights that the checkpoint holds are the ones to be validated or tested
        own = state_dict if self._session is None else _own(self._session, state_dict)
        self._taken = own["taken"]
        self._raw = own["raw"]
        self._statistics = own["statistics"]
        self.restore(own)


def _divided(session: Session) -> bool:
    """Whether each rank has other parts of the weights than the others."""
    return not is_plain(session.trainer.strategy) and session.trainer.world_size > 1


def _own(session: Session, state: dict[str, Any]) -> dict[str, Any]:
    """This rank's part of what :meth:`AveragedWeights.state_dict` gave."""
    return state["ranks"][session.replicas.process] if "ranks" in state else state
