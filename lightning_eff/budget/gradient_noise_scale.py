"""Measure the gradient noise scale: the batch size beyond which larger ones gain little (arXiv:1812.06162)."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Number
from lightning_eff._core._needs.needs import Need, Part, Reasons
from lightning_eff._core._needs.offers import is_plain
from lightning_eff._core._optim.gradient_norms import gradient_square, square, total
from lightning_eff._core.batches import num_samples
from lightning_eff._core.search_space import RunProfile, SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control, Technique

WHO = "GradientNoiseScale"


def signal_and_noise(small: float, large: float, b: float, B: float) -> tuple[float, float]:
    """Return unbiased estimates of the true gradient's ``|G|^2`` and of ``S``, the trace of one sample's covariance.

    ``|G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b)`` and ``S = (|G_b|^2 - |G_B|^2) / (1/b - 1/B)``. Either may be negative in one
    step. Their ratio is meaningful only for means over many steps.

    Args:
        small: ``|G_b|^2``, the mean squared norm of gradients over ``b`` samples.
        large: ``|G_B|^2``, the squared norm of the gradient over ``B`` samples.
        b: the samples of the small gradients, >= 1.
        B: the samples of the large gradient, > b.
    """
    return (B * large - b * small) / (B - b), (small - large) / (1 / b - 1 / B)


def _gains_nothing(profile: RunProfile) -> str | None:
    return "it only measures, and training stays the same"


class GradientNoiseScale(Technique):
    """Measure the critical batch size, beyond which a larger batch saves few steps.

    At the critical batch size, a run needs twice the minimum number of steps; a much larger batch gains little more. The
    estimate is the gradient noise scale ``tr(Sigma) / |G|^2``, with ``Sigma`` the covariance of one sample's gradient and
    ``G`` the true gradient. Both come from the norms of gradients that the step computes anyway: those of each micro-batch on
    each rank, and of their mean. With a batch of ``B`` and a noise scale of ``N``, a step makes ``1 / (1 + N / B)`` of the
    progress of the true gradient. The two quantities are averaged over time before they are divided, because a mean of
    quotients would be biased.

    Use it to choose a batch size. It adds no passes and does not change training: the weights stay bit-identical. The noise
    scale grows during training, and :class:`BatchSizeWarmup` can follow it.

    It compares the gradients of accumulated micro-batches (``accumulate_grad_batches``), of DDP ranks, or both. Where there is
    neither, and under FSDP2, tensor and pipeline parallelism, it compares the gradients of two consecutive steps. This is
    approximate, because the weights move between them, and it keeps a copy of one gradient. Checkpoints hold that copy, unless
    it is sharded over processes: then a pair of steps with a checkpoint in between is skipped. The summary names the
    gradients that were compared. Windows that an epoch's end cuts short, that have micro-batches of different sizes, or in
    which ``training_step`` returned None are skipped.

    It logs ``critical_batch`` in samples (NaN while unknown, for example while the mean of ``|G|^2`` is not above zero),
    ``signal`` (``|G|^2``), ``noise`` (``S``), the measured ``steps``, and ``batch``, the samples per step.

    Args:
        half_life: the number of measured steps after which a measurement has half its weight in the means.
        every: the number of steps from one measurement to the next. 0 measures nothing.

    Raises:
        ValueError: for a value out of range. At setup, with manual optimization, and under strategies that do not average
            exact gradients in every step, such as ``LocalSGD`` and ``CompressedDDPStrategy``.

    Example:
        >>> noise = GradientNoiseScale(half_life=50)
        >>> trainer = L.Trainer(max_epochs=10, accumulate_grad_batches=4, callbacks=[noise])

    References:
        McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", arXiv:1812.06162, appendix A.
    """

    saves = "nothing by itself: it shows which batch size pays off"
    paper = "McCandlish et al. 2018, arXiv:1812.06162"
    needs: ClassVar[Need] = Need.PIECES
    refuses: ClassVar[Reasons] = {Part.COMPRESSED: "it compares gradients with their exact mean over processes"}
    survey = Survey("large batches", shen="5.2")
    search_space = SearchSpace(pointless=_gains_nothing)
    control = Control("the baseline, which trains identically")
    neutral_at: ClassVar[Mapping[str, Any]] = {"every": 0}

    def __init__(
        self, half_life: Annotated[float, Number(above=0)] = 50.0, *, every: Annotated[int, Count(at_least=0)] = 1
    ) -> None:
        self.half_life, self.every = half_life, every

    def _reset(self) -> None:
        self._signal = self._noise = self._weight = 0.0
        self._steps = 0
        self._batch = 0
        self._source = ""
        self._pieces = False  # whether gradients are sharded over processes
        self._hooks: dict[int, RemovableHandle] = {}
        self._armed = self._measuring = False
        self._norms: list[Tensor] = []  # squared norms of this pass's gradients
        self._parts: list[tuple[int, Tensor]] = []  # samples and squared gradient norm of each pass of the window
        self._passes = 0  # backward passes of the window
        self._size = 0
        self._before: tuple[int, int, Tensor, list[Tensor | None]] | None = None

    # -- the run

    @override
    def attach(self, session: Session) -> None:
        self._pieces = not is_plain(session.trainer.strategy)
        session.chain.add(Stage.SAVE, self._link)
        backward = session.trainer.strategy.backward

        def measured(*args: Any, **kwargs: Any) -> Any:
            self._begin(session)
            try:
                return backward(*args, **kwargs)
            finally:
                self._armed = False

        session.patches.set(session.trainer.strategy, "backward", measured)

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        self._size = num_samples(batch)
        return proceed(batch)

    def _begin(self, session: Session) -> None:
        """Watch the gradients of a backward pass before they are accumulated or reduced over ranks."""
        self._passes += 1
        step = session.trainer.global_step
        pairs = self._pieces or (session.replicas.count == 1 and session.trainer.accumulate_grad_batches == 1)
        self._measuring = (step // 2 if pairs else step) % self.every == 0
        self._norms = []
        if not self._measuring or self._pieces:
            return
        for p in session.module.parameters():
            if p.requires_grad and id(p) not in self._hooks:
                self._hooks[id(p)] = p.register_hook(self._see)
        self._armed = True

    def _see(self, gradient: Tensor) -> None:
        if self._armed:
            self._norms.append(square(gradient))

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_after_backward(trainer, pl_module)
        if self._session is None or self.neutral or not self._measuring or not (self._norms or self._pieces):
            return
        self._parts.append((self._size, total(self._norms or [torch.zeros((), device=pl_module.device)])))
        window = trainer.accumulate_grad_batches
        over = (trainer.fit_loop.epoch_loop.batch_idx + 1) % window == 0
        if over and self._passes == window:  # none of its batches was skipped
            self._measure(trainer, pl_module)

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        loop = session.trainer.fit_loop.epoch_loop
        if (batch_idx + 1) % session.trainer.accumulate_grad_batches == 0 or loop._num_ready_batches_reached():
            self._parts, self._passes = [], 0

    def _measure(self, trainer: Trainer, module: LightningModule) -> None:
        """Measure a complete window, whose mean gradient every rank has."""
        sizes, squares = zip(*self._parts, strict=True)
        alike = len(set(sizes)) == 1
        small = torch.stack(squares).double().mean() * len(squares) ** 2  # the loss was divided by the window
        world = self.session.replicas.count
        if world > 1:
            told = torch.stack([small, small.new_tensor(float(sizes[0])), small.new_tensor(float(sizes[0] ** 2))])
            told = trainer.strategy.reduce(told, reduce_op="mean")
            assert isinstance(told, Tensor)
            small, mean, mean_square = told
            alike = alike and float(mean_square) == float(mean) ** 2
            if not alike:
                return
        b, count = sizes[0], len(sizes) * world
        large = gradient_square(trainer.strategy, [(p, p.grad) for p in module.parameters()])
        if self._pieces:
            if alike:
                self._pair(trainer, module, b * count, large)
            return
        if count > 1:
            self._source = "micro-batches" if world == 1 else "ranks" if len(sizes) == 1 else "micro-batches and ranks"
            if alike:
                self._take(float(small), float(large), b, b * count, trainer)
            return
        self._pair(trainer, module, b, small)

    def _pair(self, trainer: Trainer, module: LightningModule, b: int, of_now: Tensor) -> None:
        """Compare this step's gradient and the last one's with their mean."""
        step, before = trainer.global_step, self._before
        if step % 2 == 0:
            self._before = (
                step,
                b,
                of_now,
                [None if p.grad is None else p.grad.detach().clone() for p in module.parameters()],
            )
            return
        self._before = None
        if before is None or before[0] != step - 1:
            return
        pairs = [(p, p.grad, g) for p, g in zip(module.parameters(), before[3], strict=True)]
        if not self._pieces and all(now is None or then is None for _, now, then in pairs):
            return  # other parameters are trained now
        # a parameter without a gradient in a step, such as an expert without tokens, counts as zero
        self._source, b_before = "consecutive steps", before[1]
        now, then = 2 * b / (b + b_before), 2 * b_before / (b + b_before)  # 1 where the two have as many samples
        weighed = [(p, [w * g for w, g in ((now, new), (then, old)) if g is not None]) for p, new, old in pairs]
        both = [(p, sum(found[1:], found[0]) if found else None) for p, found in weighed]
        small, large = float((of_now + before[2]) / 2), float(gradient_square(trainer.strategy, both)) / 4
        # the noise of a mean over b is tr / b, so two such squares have that of the harmonic mean of their sizes
        self._take(small, large, b if b == b_before else 2 / (1 / b + 1 / b_before), b + b_before, trainer)

    def _take(self, small: float, large: float, b: float, B: int, trainer: Trainer) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else float(scaler.get_scale()) ** 2
        signal, noise = signal_and_noise(small / scale, large / scale, b, B)
        if not (abs(signal) < float("inf") and abs(noise) < float("inf")):
            return  # a step whose gradients overflowed
        keep = 0.5 ** (1 / self.half_life)
        self._signal = keep * self._signal + (1 - keep) * signal
        self._noise = keep * self._noise + (1 - keep) * noise
        self._weight = keep * self._weight + (1 - keep)
        self._steps += 1
        self._batch = B if self._source != "consecutive steps" else round(b)

    @property
    def critical_batch(self) -> float | None:
        """The noise scale in samples, or None while it is unknown."""
        return self._noise / self._signal if self._signal > 0 and self._noise > 0 else None

    # -- what is kept and told

    @override
    def detach(self, session: Session) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks, self._before, self._norms, self._parts = {}, None, [], []

    @override
    def state_dict(self) -> dict[str, Any]:
        names = ("_signal", "_noise", "_weight", "_steps", "_batch", "_source")
        kept = {name[1:]: getattr(self, name) for name in names}
        parts = [] if self._session is None or not self._parts else self._session.gather(self._saved_parts())
        return {**kept, "parts": parts, "passes": self._passes, "before": self._saved_before()}

    def _saved_before(self) -> list[Any] | None:
        """Return the gradient that waits for the next step; drop a sharded one, since the resumed run will not have it."""
        self._before = None if self._pieces else self._before
        if self._before is None:
            return None
        step, b, square, gradients = self._before
        return [step, b, square.cpu(), [None if g is None else g.to("cpu", copy=True) for g in gradients]]

    def _saved_parts(self) -> list[tuple[int, Tensor]]:
        return [(size, square.cpu()) for size, square in self._parts]

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name in ("signal", "noise", "weight", "steps", "batch", "source"):
            setattr(self, f"_{name}", state_dict[name])
        session, parts = self._session, state_dict["parts"]
        self._passes = state_dict["passes"]
        if session is not None and session.rank < len(parts):
            device = session.trainer.strategy.root_device
            self._parts = [(size, square.to(device)) for size, square in parts[session.rank]]
        before = state_dict.get("before")  # missing in checkpoints of earlier versions
        if session is not None and before is not None:
            device = session.trainer.strategy.root_device
            step, b, square, gradients = before
            held = [None if g is None else g.to(device, copy=True) for g in gradients]
            self._before = (step, b, square.to(device), held)

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        critical, weight = self.critical_batch, self._weight or float("nan")
        return {
            "signal": self._signal / weight,
            "noise": self._noise / weight,
            "critical_batch": float("nan") if critical is None else critical,
            "steps": self._steps,
            "batch": self._batch,
        }

    @override
    def summary(self) -> str:
        if not self._steps:
            return "measured no step"
        of = f"from {self._steps:,} steps, comparing {self._source}"
        if self.critical_batch is None:
            return f"the critical batch size is unknown: the gradient is lost in noise ({of})"
        share = 1 / (1 + self.critical_batch / self._batch)
        return (
            f"critical batch size: {self.critical_batch:,.0f} samples. A step of {self._batch:,} makes {share:.0%} of the"
            f" true gradient's progress ({of})"
        )
