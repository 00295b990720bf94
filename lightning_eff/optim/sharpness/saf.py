"""Sharpness-Aware Training for Free (SAF): each sample's scores held to those of some epochs before (Du et al. 2022)."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._needs.needs import Need, Part, Reasons
from lightning_eff._core._samples.scoring import agree
from lightning_eff._core._targets.calls import TargetCall
from lightning_eff._core.batches import num_samples
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Step
from lightning_eff._core.technique import Control
from lightning_eff.optim.sharpness._scores import ScoreStore, store_bytes
from lightning_eff.optim.sharpness._trajectory import Earlier, Trajectory

_OR_MESA = "MESA compares with a moving average of the weights instead: it stores no scores and needs no indices"


def _pointless(profile: RunProfile) -> str | None:
    if not profile.visible_loss:
        return "the loss cannot be taken apart by sample"
    return (
        "samples are seen too seldom to be compared with what they were epochs before" if profile.epochs <= 2 else None
    )


class SAF(Trajectory):
    """Keep what the network says of each sample close to what it said ``lag`` epochs before (SAF).

    To each loss call on classes is added ``lambda / |B| sum_i KL(softmax(z_i_old / tau) || softmax(z_i / tau))``, where
    ``z_i`` are the scores that the call has of sample i, and ``z_i_old`` those that it had of the same sample ``lag`` epochs
    before. That loss falls least along sharp directions, in which the weights have moved most, and costs no pass: a step is
    as long as in plain training.

    Every epoch's scores are stored from the first on, as they are in the training pass: with dropout, and of the sample as it
    was augmented then. A sample that was not seen just ``lag`` epochs before counts zero. Ranks exchange an epoch's scores
    once it is over, so each finds those of its samples, whichever rank had them. Techniques that choose among a batch's
    samples are followed; of two passes on one batch the first is stored.

    The store takes ``(lag + 1) N C`` entries of the scores' dtype, ``N R C`` where a sample has R labels, and is in every
    checkpoint. Its bytes are told at the first step, since only the step itself tells how many labels a sample has, and of
    how many classes. For a language model they are more than there is. Labels that a later batch has beyond those of the first
    one's samples are not compared, nor are loss calls that it has beside the first one's; either is told of once.

    Logged: ``divergence``, the mean of the last batch; ``known``, for which share of it there were earlier scores.

    Args:
        weight: ``lambda`` >= 0; 0 is plain training.
        temperature: ``tau`` > 0.
        lag: epochs >= 1 between the two scores.
        start: the share of the budget in [0, 1] from which on the divergence counts: the paper's 5 of 200 epochs. It does
            so from the epoch ``lag`` (counted from 0) on at the earliest. 1 is plain training.
        labels: names or positions of the labels in the batch, where several tensors of it become targets.
        max_bytes: what the store may take at most.
        offload: keep it in CPU memory.

    Raises:
        ValueError: for other values; at setup, with a ``start`` in a run without an end; as training starts, where the loader
            does not tell a batch's indices, as for an IterableDataset; at the first step, on all ranks, before weights
            move, if no loss on classes can be seen, or the store would take more than ``max_bytes``.

    Sources:
        Du et al. 2022, arXiv:2205.14083.
    """

    saves: ClassVar[str] = "the second pass of SAM: its generalisation at the cost of plain training"
    paper: ClassVar[str] = "Du et al. 2022, arXiv:2205.14083"
    constraints: ClassVar[str] = (
        "automatic optimization; a loss on classes by torch.nn.functional; a DataLoader over a map-style data set;"
        " several epochs; memory for (lag + 1) times the scores of all samples"
    )
    needs: ClassVar[Need] = Need.CALLS | Need.STEP
    refuses: ClassVar[Reasons] = {Part.PIPELINE: "the technique keeps what the last stage alone computes"}
    survey: ClassVar[Survey | None] = Survey("sharpness-aware training for free (SAF)", zhuang="2.1", shen="5.3")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"weight": Uniform(0.05, 1.0, log=True), "temperature": Choice((1.0, 5.0)), "lag": Choice((1, 2, 3))},
        _pointless,
    )
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds with its learning rate decayed to zero; and SAM"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "ImportanceSampling": "it weighs samples by the gradient of the step's own loss alone",
        "MESA": "both hold the scores to earlier ones",
        "SequenceLengthWarmup": "it cuts samples into several, of which none is the sample of some epochs before",
    }

    def __init__(
        self,
        weight: float = 0.3,
        *,
        temperature: float = 5.0,
        lag: int = 3,
        start: float = 0.025,
        labels: Sequence[str | int] | None = None,
        max_bytes: int = 4 * 2**30,
        offload: bool = False,
    ) -> None:
        self.set_divergence(weight, temperature, start, labels)
        for name, value in (("lag", lag), ("max_bytes", max_bytes)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                what = "epochs between the two scores; 3 is the paper's" if name == "lag" else "bytes"
                raise ValueError(f"SAF({name}={value!r}): expected an integer >= 1, a number of {what}.")
        self.lag = lag
        self.max_bytes = max_bytes
        self.offload = offload
        self._reset()

    @override
    def _reset(self) -> None:
        super()._reset()
        self._stores: dict[str, ScoreStore] = {}
        self._epoch = -1  # the one that is stored at the moment
        self._known: float | Tensor = 0.0
        self._seen: list[Tensor] = []
        self._learnt: Step | None = None
        self._told: set[str] = set()
        self._dtype = torch.float32

    # -- the run

    @override
    def attach(self, session: Session) -> None:
        super().attach(session)
        session.loaders.told_to = "SAF"

    @override
    def on_optimizers(self, session: Session) -> None:
        if not self.offload:
            for store in self._stores.values():
                store.to(session.trainer.strategy.root_device)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self.neutral:
            return
        samples = self.session.loaders.num_samples
        if samples is None:
            raise ValueError(
                "SAF: the training loader does not tell which samples a batch has; expected one DataLoader over a map-style"
                " data set, both with a length, because a sample's scores must be found again epochs later. Give the data"
                f" set's samples by index, or use MESA: {_OR_MESA}."
            )
        epochs = _epochs(trainer)
        if epochs <= self.lag:
            rank_zero_warn(
                f"SAF(lag={self.lag}): the run ends after {epochs:g} epochs and nothing is compared before epoch {self.lag}"
                " (counted from 0), so this is plain training. Give a smaller lag, or train for longer."
            )
        for store in self._stores.values():
            if store.num_samples != samples:
                raise ValueError(
                    f"SAF: the checkpoint's store is of {store.num_samples:,} samples and the data set has {samples:,};"
                    " expected the same, because scores are found by a sample's index. Resume on the data that it was"
                    " saved on."
                )

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        epoch = session.trainer.current_epoch
        if epoch != self._epoch:
            for store in self._stores.values():
                store.close(self._epoch, session.gather)
            self._epoch = epoch

    # -- the first step

    @override
    def describe(self, session: Session, calls: list[tuple[str, TargetCall]]) -> Any:
        for _, call in calls:
            self._dtype = (
                call.scores.dtype if call is calls[0][1] else torch.promote_types(self._dtype, call.scores.dtype)
            )
        return {name: [max(math.prod(call.shape[1:]), 1), call.scores.shape[-1]] for name, call in calls}

    @override
    def begin(self, session: Session, described: list[Any]) -> None:
        samples = session.loaders.num_samples
        assert samples is not None
        dtype = self._dtype
        shapes: dict[str, tuple[int, int]] = {}
        for one in described:
            for name, (rows, classes) in one.items():
                shapes[name] = max(rows, shapes.get(name, (1, 0))[0]), classes
        total = sum(store_bytes(samples, *shape, self.lag, dtype.itemsize) for shape in shapes.values())
        what = ", ".join(f"{rows:,} x {classes:,}" for rows, classes in shapes.values())
        told = f"{self.lag} epochs' scores and the running one's, of {samples:,} samples with {what} each"
        if total > self.max_bytes:
            raise ValueError(
                f"SAF: {told}, would take {total:,} bytes ({_size(total)}); expected at most"
                f" max_bytes={self.max_bytes:,}. {_OR_MESA}. Use it, or a smaller lag or more max_bytes where there is"
                " memory for it."
            )
        device = torch.device("cpu") if self.offload else session.trainer.strategy.root_device
        rank_zero_info(f"SAF: {told}, take {total:,} bytes ({_size(total)}) on {device.type}")
        self._stores = {
            name: ScoreStore(samples, rows, classes, lag=self.lag, dtype=dtype, device=device)
            for name, (rows, classes) in sorted(shapes.items())
        }

    # -- every step

    @override
    def earlier(self, step: Step, batch: Any) -> Callable[[str, TargetCall], Earlier | None]:
        indices = self._indices(step, batch)
        counts = self.session.progress.u >= self.start and self._epoch >= self.lag
        stores = self._stores if counts else {}  # what gradient checkpointing runs again has those of the first time
        if self._learnt is not step:
            self._seen = []

        def find(name: str, call: TargetCall) -> Earlier | None:
            store = stores.get(name)
            if store is None:
                return None
            z = call.scores
            scores, known = store.read(_places(store, call, indices), self._epoch)
            known = known.to(z.device).reshape(z.shape[:-1])
            if self._learnt is not step:
                self._seen.append(known.float().mean())
            return scores.to(z.device, z.dtype).reshape(z.shape), known

        return find

    @override
    def learn(self, step: Step, calls: list[tuple[str, TargetCall]]) -> None:
        if self._learnt is step:  # another pass on the same batch
            return
        self._learnt = step
        indices = torch.as_tensor(step.indices)
        for name, call in calls:
            store = self._stores.get(name)
            self._tell_what_is_left_out(store, call)
            if store is not None:
                scores = call.scores.detach().flatten(0, -2) if call.scores.ndim > 1 else call.scores.detach()[None]
                store.put_by(_places(store, call, indices), scores)
        self._known = torch.stack(self._seen).mean() if self._seen else 0.0

    def _tell_what_is_left_out(self, store: ScoreStore | None, call: TargetCall) -> None:
        rows = math.prod(call.shape[1:])
        if store is not None and rows <= store.num_rows:
            return
        what = (
            f"an F.{call.fn.__name__} on {call.scores.shape[-1]:,} classes that the first batch had not"
            if store is None
            else f"{rows:,} labels of a sample, and the first batch had {store.num_rows:,}, for which there is room"
        )
        if what not in self._told:
            self._told.add(what)
            rank_zero_warn(
                f"SAF: a batch has {what}; what is more is not compared. Let the collate_fn pad all batches to one length, and"
                " the step compute the same losses of each, or use MESA."
            )

    def _indices(self, step: Step, batch: Any) -> Tensor:
        """The data set indices of the batch's samples, shape (B,).

        Raises:
            ValueError: where the loader gave others, or another number of them; at a first step, on all ranks.
        """
        size, indices, problem = num_samples(batch), step.indices, None
        if indices is None:
            problem = ValueError(
                f"SAF: it is not known which samples a batch holds, because {self.session.loaders.why_unknown}. Pass a"
                f" torch.utils.data.DataLoader over a dataset with __getitem__ and __len__, or use MESA: {_OR_MESA}."
            )
        elif len(indices) != size or not all(isinstance(i, int) for i in indices):
            problem = ValueError(
                f"SAF: the loader gave {len(indices)} indices for a batch of {size} samples; expected one integer for each,"
                " because a sample's scores are looked up again later. Give the loader a batch_size and a collate_fn that"
                f" makes one sample of each index, or use MESA: {_OR_MESA}."
            )
        if not self._checked:
            agree(self.session, problem)
        if problem is not None:
            raise problem
        return torch.tensor(indices)

    @override
    def detach(self, session: Session) -> None:
        self._learnt = None

    # -- what it tells and keeps

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "known": self._known}

    @override
    def summary(self) -> str:
        if not self._stores:
            return "SAF: no step made"
        return f"SAF, lambda {self.weight:g}: the last batch diverged by {float(self._last):.3g} over {self.lag} epochs"

    @override
    def state_dict(self) -> dict[str, Any]:
        session = self._session or self._past
        gather = (lambda value: [value]) if session is None else session.gather
        return {
            **super().state_dict(),
            "stores": {name: store.state_dict(gather) for name, store in self._stores.items()},
            "epoch": self._epoch,
            "known": float(self._known),
        }

    @override
    def check_checkpoint(self, session: Session, state: dict[str, Any] | None) -> None:
        for store in (state or {}).get("stores", {}).values():
            if session.fitting and store["shape"][-1] != self.lag:
                raise ValueError(
                    f"SAF(lag={self.lag}): the checkpoint holds scores of the last {store['shape'][-1]} epochs; expected the"
                    " same lag. Resume with the lag that it was saved with."
                )

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        session = self._session
        if session is None or not session.fitting:
            return
        self._stores = {
            name: ScoreStore.load(store, rank=session.rank, world_size=session.replicas.count)
            for name, store in state_dict["stores"].items()
        }
        self._epoch = state_dict["epoch"]
        self._known = state_dict["known"]


def _places(store: ScoreStore, call: TargetCall, indices: Tensor) -> Tensor:
    """Where the store has the call's elements, in one dimension; -1 for those that stand for no label."""
    places, rows = call.element_places.flatten(), max(math.prod(call.shape[1:]), 1)
    samples = indices.to(places.device)[call.element_samples.flatten().clamp(min=0)]
    return torch.where(places >= 0, store.places(samples, places % rows), -1)


def _epochs(trainer: Trainer) -> float:
    """How many the run has at most."""
    epochs = math.inf if trainer.max_epochs in (None, -1) else float(trainer.max_epochs)
    if trainer.max_steps == -1 or not math.isfinite(trainer.num_training_batches):
        return epochs
    return min(epochs, trainer.max_steps * trainer.accumulate_grad_batches / trainer.num_training_batches)


def _size(num_bytes: int) -> str:
    """In the largest unit of which there is one."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024  # pyright: ignore[reportAssignmentType]
    return f"{num_bytes:,.3g} TiB"
