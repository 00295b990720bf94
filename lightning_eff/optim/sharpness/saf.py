"""Sharpness-Aware Training for Free (SAF): keep each sample's scores close to earlier ones (Du et al. 2022)."""

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count
from lightning_eff._core._needs.needs import Need, Part, Reasons
from lightning_eff._core._samples.scoring import agree
from lightning_eff._core._targets.calls import TargetCall
from lightning_eff._core.batches import num_samples
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Step
from lightning_eff._core.technique import Control
from lightning_eff.optim.sharpness._scores import ScoreStore, store_bytes
from lightning_eff.optim.sharpness._trajectory import Earlier, Labels, Start, Temperature, Trajectory, Weight

_OR_MESA = "MESA, which compares with a moving average of the weights and stores no scores"


def _pointless(profile: RunProfile) -> str | None:
    if not profile.visible_loss:
        return "the loss of a sample cannot be seen"
    return "each sample is seen too rarely to compare its scores across epochs" if profile.epochs <= 2 else None


class SAF(Trajectory):
    """Keep the network's scores of each sample close to its scores ``lag`` epochs before (SAF).

    The term ``lambda / |B| sum_i KL(softmax(z_i_old / tau) || softmax(z_i / tau))`` is added to each classification loss
    call, where ``z_i`` are the call's scores of sample i, and ``z_i_old`` its scores ``lag`` epochs before. The divergence is
    largest along sharp directions, in which the weights have moved most. It costs no extra pass: a step takes as long as in
    plain training.

    Use it as a cheap SAM for classification over several epochs. It costs memory: the store takes ``(lag + 1) N C`` entries
    of the scores' dtype for N samples and C classes (``N R C`` if a sample has R labels), and is part of every checkpoint.
    The first step reports its size. For language models it is too large; use :class:`MESA` there.

    Scores are stored from the first epoch on as the training pass computes them, with dropout and with the augmentation of
    that epoch. A sample that was not seen exactly ``lag`` epochs before adds zero. Ranks exchange an epoch's scores at its
    end, so each sample finds its scores on any rank. Techniques that choose among a batch's samples are followed. Of two
    passes on one batch, the first is stored. Labels that a later batch has in excess of the first batch are not compared,
    nor are additional loss calls; a warning says so once.

    It logs ``divergence``, the mean over the last batch, and ``known``, the fraction of it with earlier scores.

    Args:
        weight: the factor of the divergence, ``lambda``. 0 is plain training.
        temperature: the divisor of the scores, ``tau``.
        lag: the number of epochs between the two scores. 3 is the paper's.
        start: the fraction of the budget at which the divergence begins to count, at the earliest in epoch ``lag`` (counted
            from 0). The paper's value is 5 of 200 epochs. 1 is plain training.
        labels: names or positions of the labels in the batch, if several of its tensors become targets.
        max_bytes: the largest size of the store, in bytes.
        offload: whether to keep the store in CPU memory.

    Raises:
        ValueError: for a value out of range. At setup, with ``start`` in a run without an end. When training starts, if the
            loader does not give a batch's indices, as with an IterableDataset. At the first step, on all ranks, before
            weights move, if no classification loss can be seen, or if the store would exceed ``max_bytes``.

    Example:
        >>> trainer = L.Trainer(max_epochs=30, callbacks=[SAF(weight=0.3, lag=3)])

    References:
        Du et al. 2022, "Sharpness-Aware Training for Free", arXiv:2205.14083.
    """

    saves: ClassVar[str] = "the second pass of SAM: its generalization at the step cost of plain training"
    paper: ClassVar[str] = "Du et al. 2022, arXiv:2205.14083"
    constraints: ClassVar[str] = (
        "needs automatic optimization, a classification loss of torch.nn.functional, a DataLoader over a map-style data set and"
        " several epochs; keeps (lag + 1) times the scores of all samples"
    )
    needs: ClassVar[Need] = Need.CALLS | Need.STEP
    refuses: ClassVar[Reasons] = {Part.PIPELINE: "the technique keeps what the last stage alone computes"}
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"weight": Uniform(0.05, 1.0, log=True), "temperature": Choice((1.0, 5.0)), "lag": Choice((1, 2, 3))},
        _pointless,
    )
    control: ClassVar[Control] = Control(
        "the baseline for the same time with a learning rate that decays to zero; and SAM"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "ImportanceSampling": "ImportanceSampling weights samples by the gradient of the step's own loss, without the"
        " divergence",
        "MESA": "both keep the scores close to earlier ones",
        "SequenceLengthWarmup": "SequenceLengthWarmup cuts samples into pieces, which differ from the samples of earlier"
        " epochs",
    }

    def __init__(
        self,
        weight: Weight = 0.3,
        *,
        temperature: Temperature = 5.0,
        lag: Annotated[int, Count()] = 3,
        start: Start = 0.025,
        labels: Labels = None,
        max_bytes: Annotated[int, Count()] = 4 * 2**30,
        offload: bool = False,
    ) -> None:
        self.weight = weight
        self.temperature = temperature
        self.start = start
        self.labels = labels
        self.lag = lag
        self.max_bytes = max_bytes
        self.offload = offload

    @override
    def _reset(self) -> None:
        super()._reset()
        self._stores: dict[str, ScoreStore] = {}
        self._epoch = -1  # the epoch that is being stored
        self._known: float | Tensor = 0.0
        self._seen: list[Tensor] = []
        self._learnt: Step | None = None
        self._told: set[str] = set()
        self._dtype = torch.float32
        self._size = 0  # samples of the batch

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
                "SAF: the training loader does not say which samples a batch holds, so their scores cannot be found again. Use"
                f" one DataLoader over a map-style data set with a length, or {_OR_MESA}."
            )
        epochs = _epochs(trainer)
        if epochs <= self.lag:
            rank_zero_warn(
                f"SAF(lag={self.lag}): the run ends after {epochs:g} epochs, and nothing is compared before epoch {self.lag}"
                " (counted from 0), so this is plain training. Use a smaller lag, or train for longer."
            )
        for store in self._stores.values():
            if store.num_samples != samples:
                raise ValueError(
                    f"SAF: the checkpoint's store has {store.num_samples:,} samples and the data set has {samples:,}. Scores"
                    " are found by a sample's index, so resume with the data set that the checkpoint was saved with."
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
            _check_rows(call, self._size)
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
        told = f"the scores of {self.lag} past epochs and the current one, of {samples:,} samples with {what} each"
        if total > self.max_bytes:
            raise ValueError(
                f"SAF(max_bytes={self.max_bytes:,}): {told}, would take {total:,} bytes ({_size(total)}). Use a smaller lag,"
                f" more max_bytes, or {_OR_MESA}."
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
        self._size = len(indices)
        counts = self.session.progress.u >= self.start and self._epoch >= self.lag
        stores = (
            self._stores if counts else {}
        )  # a pass that gradient checkpointing repeats has those of the first pass
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
            f"an F.{call.fn.__name__} on {call.scores.shape[-1]:,} classes, which the first batch did not have"
            if store is None
            else f"{rows:,} labels per sample, more than the first batch's {store.num_rows:,}"
        )
        if what not in self._told:
            self._told.add(what)
            rank_zero_warn(
                f"SAF: a batch has {what}; the excess is not compared. Let the collate_fn pad all batches to one length and the"
                " step compute the same losses for each, or use MESA."
            )

    def _indices(self, step: Step, batch: Any) -> Tensor:
        """The data set indices of the batch's samples, shape (B,).

        Raises:
            ValueError: if the loader gives other indices, or another number of them; at a first step, on all ranks.
        """
        size, indices, problem = num_samples(batch), step.indices, None
        if indices is None:
            problem = ValueError(
                f"SAF: it is not known which samples a batch holds, because {self.session.loaders.why_unknown}. Use a"
                f" DataLoader over a data set with __getitem__ and __len__, or {_OR_MESA}."
            )
        elif len(indices) != size or not all(isinstance(i, int) for i in indices):
            problem = ValueError(
                f"SAF: the loader gave {len(indices)} indices for a batch of {size} samples, and it needs one integer for each."
                f" Use a batch_size and a collate_fn that makes one sample of each index, or {_OR_MESA}."
            )
        if not self._checked:
            agree(self.session, problem)
        if problem is not None:
            raise problem
        return torch.tensor(indices)

    @override
    def detach(self, session: Session) -> None:
        self._learnt = None

    # -- reports and state

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "known": self._known}

    @override
    def summary(self) -> str:
        if not self._stores:
            return "SAF: no step was made"
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
                    f"SAF(lag={self.lag}): the checkpoint holds the scores of {store['shape'][-1]} epochs. Resume with the lag"
                    f" that it was saved with: lag={store['shape'][-1]}."
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
    """The places of the call's elements in the store, in one dimension; -1 for elements without a label."""
    _check_rows(call, len(indices))
    places, rows = call.element_places.flatten(), max(math.prod(call.shape[1:]), 1)
    samples = indices.to(places.device)[call.element_samples.flatten().clamp(min=0)]
    return torch.where(places >= 0, store.places(samples, places % rows), -1)


def _check_rows(call: TargetCall, size: int) -> None:
    """Raise ``ValueError`` unless the labels have one row for each of the batch's ``size`` samples."""
    if call.sample is not None or call.shape[:1] != (size,):
        held = (
            "lie in a list with one item per sample"
            if call.sample is not None
            else f"have the shape {tuple(call.shape)}"
        )
        raise ValueError(
            f"SAF: the labels {call.label} {held}, so their rows are not the {size} samples of the batch, by which scores are"
            f" stored. Let the collate_fn stack the labels of samples into one tensor ({size}, ...), or {_OR_MESA}."
        )


def _epochs(trainer: Trainer) -> float:
    """The largest number of epochs that the run can have."""
    epochs = math.inf if trainer.max_epochs in (None, -1) else float(trainer.max_epochs)
    if trainer.max_steps == -1 or not math.isfinite(trainer.num_training_batches):
        return epochs
    return min(epochs, trainer.max_steps * trainer.accumulate_grad_batches / trainer.num_training_batches)


def _size(num_bytes: int) -> str:
    """A size in the largest unit of which there is at least one."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024  # pyright: ignore[reportAssignmentType]
    return f"{num_bytes:,.3g} TiB"
