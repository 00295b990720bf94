"""The gradient noise scale: the batch beyond which larger ones buy little (McCandlish et al. 2018, arXiv:1812.06162)."""

from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_eff._core._needs.needs import Need, Part, Reasons
from lightning_eff._core._needs.offers import is_plain
from lightning_eff._core._optim.squares import gradient_square, square, total
from lightning_eff._core.batches import num_samples
from lightning_eff._core.search_space import RunProfile, SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control, Technique

WHO = "GradientNoiseScale"


def signal_and_noise(small: float, large: float, b: float, B: float) -> tuple[float, float]:
    """Unbiased estimates of the true gradient's square ``|G|^2`` and of the trace of one sample's covariance, ``S``.

    ``|G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b)`` and ``S = (|G_b|^2 - |G_B|^2) / (1/b - 1/B)``. Each may be negative in one
    step; their ratio is meaningful of means over many steps alone.

    Args:
        small: ``|G_b|^2``, the mean square norm of gradients of ``b`` samples.
        large: ``|G_B|^2``, that of the gradient of ``B`` samples.
        b: samples, >= 1.
        B: samples, > b.
    """
    return (B * large - b * small) / (B - b), (small - large) / (1 / b - 1 / B)


def _gains_nothing(profile: RunProfile) -> str | None:
    return "it trains as without it, and only tells what batch would pay"


class GradientNoiseScale(Technique):
    """Tell the critical batch: at which twice the steps would do with half the batch, and beyond which more buys little.

    The noise scale is ``tr(Sigma) / |G|^2``, of one sample's gradient covariance and the true gradient. Both come from the
    norms of gradients that the step has anyway: of each micro-batch on each rank, and of their mean. Nothing is run twice, and
    weights are bit for bit those without it. Two means over time are kept, one of each quantity, and divided then; a mean of
    quotients would be biased. With a batch of ``B`` and a noise scale of ``N``, a step makes ``1 / (1 + N / B)`` of the
    progress that the true gradient would.

    Small gradients are those of accumulated micro-batches (``accumulate_grad_batches``), of DDP's ranks, or of both. Where
    there is neither, and under FSDP2, tensor and pipeline parallelism, those of two consecutive steps stand in, whose weights
    differ by a step and whose sizes may. This is an estimate, for which one gradient is held. Checkpoints hold it, too, unless
    it lies in pieces on several processes: then two steps with a checkpoint between them are left out. The summary says which
    gradients were compared. Windows cut short by the epoch's
    end, those of micro-batches of different sizes, and those with a batch for which ``training_step`` returned None, are
    left out. The noise scale grows over training; ``BatchSizeWarmup`` follows it.

    Logged: ``critical_batch`` in samples (NaN while it is not known, as where the mean of ``|G|^2`` is not above zero),
    ``signal`` (``|G|^2``), ``noise`` (``S``), ``steps`` measured and ``batch``, the samples of a step.

    Args:
        half_life: measured steps after which a measurement counts half in the means, > 0.
        every: measure each so many steps, >= 1.

    Raises:
        ValueError: for other values; at setup, with manual optimization, and under strategies that do not exchange exact
            gradients in every step, such as ``LocalSGD`` and ``CompressedDDPStrategy``.

    Sources:
        McCandlish et al. 2018, arXiv:1812.06162, appendix A.
    """

    saves: ClassVar[str] = "nothing by itself: it tells which batch pays"
    paper: ClassVar[str] = "McCandlish et al. 2018, arXiv:1812.06162"
    needs: ClassVar[Need] = Need.PIECES
    refuses: ClassVar[Reasons] = {
        Part.COMPRESSED: "the technique compares gradients with their exact mean over processes"
    }
    survey: ClassVar[Survey | None] = Survey("large batches", shen="5.2")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(pointless=_gains_nothing)
    control: ClassVar[Control] = Control("the baseline: it trains as without it")

    def __init__(self, half_life: float = 50.0, *, every: int = 1) -> None:
        if isinstance(half_life, bool) or not isinstance(half_life, int | float) or not 0 < half_life < float("inf"):
            raise ValueError(f"{WHO}({half_life=}): expected a number of measured steps above 0.")
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise ValueError(f"{WHO}({every=}): expected an integer >= 1, or 0 to measure nothing.")
        self.half_life, self.every = half_life, every
        self._reset()

    def _reset(self) -> None:
        self._signal = self._noise = self._weight = 0.0
        self._steps = 0
        self._batch = 0
        self._source = ""
        self._pieces = False  # of gradients, on several processes
        self._hooks: dict[int, RemovableHandle] = {}
        self._armed = self._measuring = False
        self._norms: list[Tensor] = []  # squares of this pass's gradients
        self._parts: list[tuple[int, Tensor]] = []  # of each pass of the window: samples, and the gradient's square
        self._passes = 0  # backward passes of the window
        self._size = 0
        self._before: tuple[int, int, Tensor, list[Tensor | None]] | None = None

    @property
    @override
    def neutral(self) -> bool:
        return self.every == 0

    # -- the run

    @override
    def attach(self, session: Session) -> None:
        self._reset()
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
        """The backward pass of a step begins: each gradient is seen before it is added to others, or exchanged."""
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
        if over and self._passes == window:  # none of its batches was passed over
            self._measure(trainer, pl_module)

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        loop = session.trainer.fit_loop.epoch_loop
        if (batch_idx + 1) % session.trainer.accumulate_grad_batches == 0 or loop._num_ready_batches_reached():
            self._parts, self._passes = [], 0

    def _measure(self, trainer: Trainer, module: LightningModule) -> None:
        """The window is whole, and every rank has its mean gradient."""
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
        """One gradient a step: this and the last one are the small ones."""
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
            return  # other parameters train since
        # one that a step has no gradient of, as an expert without a token, has a gradient of zero
        self._source, b_before = "consecutive steps", before[1]
        now, then = 2 * b / (b + b_before), 2 * b_before / (b + b_before)  # 1 where the two have as many samples
        weighed = [(p, [w * g for w, g in ((now, new), (then, old)) if g is not None]) for p, new, old in pairs]
        both = [(p, sum(found[1:], found[0]) if found else None) for p, found in weighed]
        small, large = float((of_now + before[2]) / 2), float(gradient_square(trainer.strategy, both)) / 4
        # of a mean over b the noise is tr / b, and so of two such squares that of their harmonic mean
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
        """The noise scale in samples; None while it is not known."""
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
        """The gradient that waits for the next step's; the run that saves lets go of pieces, as the resumed one lacks them."""
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
        before = state_dict.get("before")  # checkpoints of earlier versions have none
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
            return "no step was measured"
        of = f"from {self._steps:,} steps, by {self._source}"
        if self.critical_batch is None:
            return f"the critical batch is not known yet: noise hides the gradient ({of})"
        share = 1 / (1 + self.critical_batch / self._batch)
        return (
            f"critical batch {self.critical_batch:,.0f} samples, a step has {self._batch:,}: {share:.0%} of what the true"
            f" gradient would gain ({of})"
        )
