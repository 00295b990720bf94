"""Measure the gradient noise scale: the batch size beyond which larger ones gain little (arXiv:1812.06162)."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Number
from lightning_eff._core._needs.needs import Need, Part, Reasons
from lightning_eff._core._needs.offers import is_plain
from lightning_eff._core._optim.gradient_norms import gradient_square, square_and_product, square_of
from lightning_eff._core.search_space import RunProfile, SearchSpace
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.budget._micro_gradients import MicroGradients, signal_and_noise

WHO = "GradientNoiseScale"
_Before = tuple[int, float, Tensor, list[Tensor | None]]  # step, samples, squared norm and gradients
_Norms = tuple[Tensor | float, ...]  # |G_b|^2, |G_B|^2, b, B and samples of a step
_ALIGNED = 64  # elements; sums of a resumed run, whose copies are tensors of their own, are rounded in the same way
_NUMBERS = ("signal", "noise", "weight", "steps", "batch")
_MOST = 128  # steps whose norms wait on the device until something is reported


class _Copies:
    """Copies of gradients. They are parts of one tensor, which is used again, where all have one real dtype and device.

    Attributes:
        whole: that tensor, shape (n,), with zeros between the parts; None if the last copies are no parts of one.
    """

    def __init__(self) -> None:
        self.whole: Tensor | None = None
        # of the largest ``whole`` so far, because layer dropping changes which gradients exist
        self._memory: Tensor | None = None
        self._forms: list[Any] = []
        self._parts: list[Tensor] = []

    def _zeros(self, like: Tensor, size: int) -> Tensor:
        memory = self._memory
        if memory is None or (memory.dtype, memory.device) != (like.dtype, like.device) or memory.numel() < size:
            memory = self._memory = like.new_empty(size)
        return memory[:size].zero_()

    @torch.no_grad()
    def take(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Copy the gradients, which overwrites the copies of the last call; None stays None."""
        forms = [None if g is None else (type(g), g.dtype, g.device, g.layout, g.shape) for g in gradients]
        found = [g for g in gradients if g is not None]
        if forms != self._forms:
            self._forms, self.whole, self._parts = forms, None, []
            kinds = {form[:4] for form in forms if form is not None}
            first = found[0] if len(kinds) == 1 else None
            if type(first) is Tensor and first.layout == torch.strided and first.is_floating_point():
                sizes = [-(-g.numel() // _ALIGNED) * _ALIGNED for g in found]
                self.whole = self._zeros(first, sum(sizes))
                parts = zip(self.whole.split(sizes), found, strict=True)
                self._parts = [part[: g.numel()].view(g.shape) for part, g in parts]
        if self.whole is None:
            return [None if g is None else g.detach().clone() for g in gradients]
        torch._foreach_copy_(self._parts, found)  # pyright: ignore[reportPrivateImportUsage]
        parts = iter(self._parts)
        return [None if g is None else next(parts) for g in gradients]


def _harmonic_mean(sizes: Sequence[float]) -> float:
    """Return the size whose noise is the mean noise of gradients over ``sizes`` samples."""
    return sizes[0] if len(set(sizes)) == 1 else len(sizes) / sum(1 / size for size in sizes)


def _weights(b: float, b_before: float) -> tuple[float, float]:
    """Return the weights of a gradient over ``b`` samples and of one over ``b_before``: 1 and 1 where these are as many.

    A parameter without a gradient in a step, such as an expert without tokens, counts as zero.
    """
    return 2 * b / (b + b_before), 2 * b_before / (b + b_before)


def _weighted(new: Tensor | None, old: Tensor | None, now: float, then: float) -> Tensor | None:
    """Return ``now * new + then * old``, where None counts as zero. ``old`` is overwritten where it can be."""
    if new is None or old is None:
        return then * old if old is not None else now * new if new is not None else None
    if old.is_sparse:
        return now * new + then * old
    return old.mul_(then).add_(new, alpha=now)


def _gains_nothing(profile: RunProfile) -> str | None:
    return "it only measures, and training stays the same"


class GradientNoiseScale(MicroGradients):
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
    gradients that were compared. Micro-batches may have different sizes, but under FSDP2, steps in which the ranks have
    different numbers of samples are skipped. So are windows that an epoch's end cuts short, or in which ``training_step``
    returned None.

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
    search_space = SearchSpace(pointless=_gains_nothing)
    control = Control("the baseline, which trains identically")
    neutral_at: ClassVar[Mapping[str, Any]] = {"every": 0}

    def __init__(
        self, half_life: Annotated[float, Number(above=0)] = 50.0, *, every: Annotated[int, Count(at_least=0)] = 1
    ) -> None:
        self.half_life, self.every = half_life, every

    def _reset(self) -> None:
        super()._reset()
        self._means = [0.0] * len(_NUMBERS)  # of signal and noise, their weight, measured steps, samples per step
        self._waiting: list[_Norms] = []  # of steps that are not in the means yet
        self._source = ""
        self._pieces = False  # whether gradients are sharded over processes
        self._pairs = False
        self._before: _Before | None = None
        self._copies = _Copies()

    # -- the run

    @override
    def attach(self, session: Session) -> None:
        super().attach(session)
        self._pieces = not is_plain(session.trainer.strategy)

    @override
    def _wanted(self, session: Session) -> bool:
        step = session.trainer.global_step
        self._pairs = self._pieces or (session.replicas.count == 1 and session.trainer.accumulate_grad_batches == 1)
        return (step // 2 if self._pairs else step) % self.every == 0

    @override
    def _by_pass(self) -> bool:
        return not self._pairs  # a pair of steps compares the gradients that they end with

    @override
    def _square(self, session: Session) -> Tensor | None:
        found = super()._square(session)
        return torch.zeros((), device=session.module.device) if found is None and self._pieces else found

    @override
    def _end_pass(self, session: Session) -> None:
        if self._pieces or not self._pairs:
            super()._end_pass(session)
        elif self._passes == 1:  # a second pass in a step would have added to the gradients
            self._compare(session)

    @override
    def _backward_ended(self, session: Session) -> None:
        """Do nothing: gradients are read in on_after_backward, as was tested in every layout."""

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_after_backward(trainer, pl_module)
        if self._session is not None and not self.neutral and self._measuring:
            self._end_pass(self._session)

    @override
    def _measure(self, trainer: Trainer, parameters: list[nn.Parameter]) -> None:
        # an empty batch has no gradient to measure, and its step does not count
        self._parts = [(size or 1, square if size else square * math.nan) for size, square in self._parts]
        sizes = [size for size, _ in self._parts]
        world, b = self.session.replicas.count, _harmonic_mean(sizes)
        count = len(sizes) * world
        if self._pieces:
            # pairs need the samples on the host, so all ranks must have as many as this one
            small, mean, mean_square = self._mean_square(trainer, b, b**2)
            valid = small.isfinite() & (mean_square - mean**2 <= 1e-9 * mean_square)
            large = gradient_square(trainer.strategy, [(p, p.grad) for p in parameters])
            self._pair(trainer, parameters, b * count, large, valid)
            return
        small, inverse, samples = self._mean_square(trainer, 1 / b, sum(sizes))
        large = gradient_square(trainer.strategy, [(p, p.grad) for p in parameters])
        self._source = "micro-batches" if world == 1 else "ranks" if len(sizes) == 1 else "micro-batches and ranks"
        b = b if world == 1 else 1 / inverse
        self._take(small, large, b, b * count, samples * world, trainer)

    @torch.no_grad()
    def _compare(self, session: Session) -> None:
        """Keep this step's whole gradient, or compare it and the last one with their mean."""
        gradients = [p.grad for p in self._parameters(session)]
        found = [g for g in gradients if g is not None]
        if not found:
            return
        # an empty batch has no gradient to measure, and its step does not count
        b, valid, step, before = self._size or 1, self._size > 0, session.trainer.global_step, self._before
        if step % 2 == 0:
            kept = self._copies.take(gradients)
            whole = self._copies.whole
            square = square_of(found) if whole is None else square_and_product([(whole, None)])[0]
            self._before = (step, b, square if valid else square * math.nan, kept)
            return
        self._before = None
        if before is None or before[0] != step - 1:
            return
        pairs = [(new, old) for new, old in zip(gradients, before[3], strict=True) if new is not None]
        if all(old is None for _, old in pairs):
            return  # other parameters are trained now
        square, product = square_and_product(pairs)
        now, then = _weights(b, before[1])
        large = (now**2 * square + 2 * now * then * product + then**2 * before[2]) / 4
        self._take_pair(square if valid else square * math.nan, large, b, before, session.trainer)

    @torch.no_grad()
    def _pair(self, trainer: Trainer, parameters: list[nn.Parameter], b: float, of_now: Tensor, valid: Tensor) -> None:
        """Do as :meth:`_compare` does, for gradients in pieces whose square is ``of_now`` where it is ``valid``."""
        step, before = trainer.global_step, self._before
        of_now = torch.where(valid, of_now, float("nan"))
        gradients = [p.grad for p in parameters]
        if step % 2 == 0:
            self._before = (step, b, of_now, self._copies.take(gradients))
            return
        self._before = None
        if before is None or before[0] != step - 1:
            return
        weights = _weights(b, before[1])
        sums = [_weighted(new, old, *weights) for new, old in zip(gradients, before[3], strict=True)]
        large = gradient_square(trainer.strategy, list(zip(parameters, sums, strict=True))) / 4
        self._take_pair(of_now, large, b, before, trainer)

    def _take_pair(self, of_now: Tensor, large: Tensor, b: float, before: _Before, trainer: Trainer) -> None:
        self._source = "consecutive steps"
        each = _harmonic_mean([b, before[1]])
        self._take((of_now + before[2]) / 2, large, each, b + before[1], round(each), trainer)

    @torch.no_grad()
    def _take(
        self,
        small: Tensor,
        large: Tensor,
        b: float | Tensor,
        B: float | Tensor,
        samples: float | Tensor,
        trainer: Trainer,
    ) -> None:
        small, large = self._unscaled(trainer, small, large)
        self._waiting.append((small, large, b, B, samples))
        if len(self._waiting) == _MOST:
            self._take_in()

    @torch.no_grad()
    def _take_in(self) -> None:
        """Add the steps that wait to the means. Waits for the device once."""
        if not self._waiting:
            return
        device = next(x.device for x in self._waiting[0] if isinstance(x, Tensor))
        columns = [
            torch.stack([torch.as_tensor(x, dtype=torch.float64, device=device) for x in column])
            for column in zip(*self._waiting, strict=True)
        ]
        *sizes, samples = columns
        keep, (signal, noise, weight, steps, batch) = 0.5 ** (1 / self.half_life), self._means
        for one in torch.stack([*signal_and_noise(*sizes), samples], 1).tolist():
            if math.isfinite(one[0]) and math.isfinite(one[1]):  # not where gradients overflowed
                signal, noise = keep * signal + (1 - keep) * one[0], keep * noise + (1 - keep) * one[1]
                weight, steps, batch = keep * weight + (1 - keep), steps + 1, one[2]
        self._means, self._waiting = [signal, noise, weight, steps, batch], []

    def _numbers(self) -> tuple[float, float, float, int, int]:
        """Signal, noise, their weight, steps and batch. Waits for the device."""
        self._take_in()
        signal, noise, weight, steps, batch = self._means
        return signal, noise, weight, int(steps), int(batch)

    @property
    def critical_batch(self) -> float | None:
        """The noise scale in samples, or None while it is unknown. Reading it waits for the device."""
        signal, noise, *_ = self._numbers()
        return noise / signal if signal > 0 and noise > 0 else None

    # -- what is kept and told

    @override
    def detach(self, session: Session) -> None:
        super().detach(session)
        self._before, self._copies = None, _Copies()

    @override
    def state_dict(self) -> dict[str, Any]:
        kept = dict(zip(_NUMBERS, self._numbers(), strict=True)) | {"source": self._source}
        return {**kept, **super().state_dict(), "before": self._saved_before()}

    def _saved_before(self) -> list[Any] | None:
        """Return the gradient that waits for the next step; drop a sharded one, since the resumed run will not have it."""
        self._before = None if self._pieces else self._before
        if self._before is None:
            return None
        step, b, square, gradients = self._before
        return [step, b, square.cpu(), [None if g is None else g.to("cpu", copy=True) for g in gradients]]

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._means, self._waiting = [float(state_dict[name]) for name in _NUMBERS], []
        self._source = state_dict["source"]
        super().load_state_dict(state_dict)
        session = self._session
        before = state_dict.get("before")  # missing in checkpoints of earlier versions
        if session is not None and before is not None:
            device = session.trainer.strategy.root_device
            step, b, square, gradients = before
            held = [None if g is None else g.to(device, copy=True) for g in gradients]
            self._before = (step, b, square.to(device), held)

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        signal, noise, weight, steps, batch = self._numbers()
        weight = weight or float("nan")
        critical = noise / signal if signal > 0 and noise > 0 else float("nan")
        return {
            "signal": signal / weight,
            "noise": noise / weight,
            "critical_batch": critical,
            "steps": steps,
            "batch": batch,
        }

    @override
    def summary(self) -> str:
        *_, steps, batch = self._numbers()
        if not steps:
            return "measured no step"
        of = f"from {steps:,} steps, comparing {self._source}"
        if self.critical_batch is None:
            return f"the critical batch size is unknown: the gradient is lost in noise ({of})"
        share = 1 / (1 + self.critical_batch / batch)
        return (
            f"critical batch size: {self.critical_batch:,.0f} samples. A step of {batch:,} makes {share:.0%} of the"
            f" true gradient's progress ({of})"
        )
