"""Memory-efficient SAF (MESA): keep scores close to those of averaged weights (Du et al. 2022)."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim.swa_utils import get_ema_multi_avg_fn
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Fraction
from lightning_eff._core._targets.calls import TargetCall
from lightning_eff._core.search_space import Choice, SearchSpace, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Step, in_evaluation
from lightning_eff._core.technique import LOCAL_STEPS, Control
from lightning_eff.optim.sharpness._trajectory import Calls, Earlier, Labels, Start, Temperature, Trajectory, Weight


@torch.no_grad()
def follow(teacher: list[Tensor], weights: list[Tensor], *, beta: float) -> None:
    """``v <- beta v + (1 - beta) w`` in place, for all tensors.

    Args:
        teacher: ``v``, floating.
        weights: ``w``, of the shapes of ``teacher``, of any floating dtype.
        beta: in [0, 1].
    """
    # v = β v + (1 − β) w
    move = get_ema_multi_avg_fn(beta)
    move(teacher, [w.to(v.dtype) for v, w in zip(teacher, weights, strict=True)], 0)  # pyright: ignore[reportArgumentType]


class MESA(Trajectory):
    """Keep the network's scores close to those of a moving average of its weights on the same batch (MESA).

    After each optimizer step the teacher's weights follow, ``v <- beta v + (1 - beta) w``, beginning with the first weights.
    From ``start`` on, each step runs once more without gradients with the teacher's weights. The term ``lambda / |B| sum_i
    KL(softmax(z_i_v / tau) || softmax(z_i / tau))`` is added to each classification loss call, where ``z_i_v`` are the
    teacher's scores in the same call. The teacher is only for training: validation and checkpoints see the trained weights.

    Use it as a cheaper SAM for streams, single epochs and language models, where SAF cannot store scores. A step costs one
    more forward pass, which is counted, and the technique keeps two copies of the weights.

    The teacher's pass has the same batch, and starts from the same random numbers and buffers. Its dropout is off. BatchNorm
    layers in training mode use the batch's statistics, as in the step itself, and their running statistics are left alone,
    because only parameters are averaged. The pass leaves no logs and no change in buffers, metrics or random state. If
    another technique changes the network's blocks or overwrites weights, the teacher starts anew from them.

    It logs ``divergence``, the mean over the last batch.

    Args:
        weight: the factor of the divergence, ``lambda``. 0 is plain training.
        temperature: the divisor of the scores, ``tau``.
        decay: the fraction of the teacher that is kept per optimizer step, ``beta``. 0.9995 remembers about 2,000 steps; use
            less for shorter runs.
        start: the fraction of the budget at which the divergence begins to count and the teacher to run. The paper's value
            is 5 of 200 epochs. 1 is plain training.
        labels: names or positions of the labels in the batch, if several of its tensors become targets.

    Raises:
        ValueError: for a value out of range. At setup, with ``start`` in a run without an end. At the first step, on all
            ranks, before weights move, if no classification loss can be seen. At any step, if the teacher's scores have
            another shape.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[MESA(weight=0.8, decay=0.995)])

    References:
        Du et al. 2022, "Sharpness-Aware Training for Free", arXiv:2205.14083.
    """

    saves: ClassVar[str] = "the second backward pass of SAM: its generalization for one more forward pass"
    paper: ClassVar[str] = "Du et al. 2022, arXiv:2205.14083"
    constraints: ClassVar[str] = (
        "needs automatic optimization and a classification loss of torch.nn.functional; keeps two more copies of the weights"
        " and one of the scores; training_step runs twice, including what it prints or writes"
    )
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {
            "weight": Uniform(0.1, 2.0, log=True),
            "temperature": Choice((1.0, 5.0)),
            "decay": Choice((0.98, 0.995, 0.9995)),
        },
        lambda profile: None if profile.visible_loss else "the loss of a sample cannot be seen",
    )
    control: ClassVar[Control] = Control(
        "the baseline for the same time with a learning rate that decays to zero, in up to 4/3 times the steps; and SAM"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "ImportanceSampling": "ImportanceSampling weights samples by the gradient of the step's own loss, without the"
        " divergence",
        **dict.fromkeys(LOCAL_STEPS, "each rank would have its own teacher, and only rank 0's would be saved"),
    }
    checkpointed: ClassVar[tuple[str, ...]] = ("_teacher", "_stepped")

    def __init__(
        self,
        weight: Weight = 0.8,
        *,
        temperature: Temperature = 5.0,
        decay: Annotated[float, Fraction(below=1)] = 0.9995,
        start: Start = 0.025,
        labels: Labels = None,
    ) -> None:
        self.weight = weight
        self.temperature = temperature
        self.start = start
        self.labels = labels
        self.decay = decay

    @override
    def _reset(self) -> None:
        super()._reset()
        self._teacher: dict[str, Tensor] = {}  # v, by parameter
        self._stepped = False  # the teacher has not followed the last optimizer step yet
        self._step = 0
        self._said: tuple[Any, dict[str, Tensor]] | None = None  # a batch, and the teacher's scores of it by call

    # -- the teacher

    @override
    def on_optimizers(self, session: Session) -> None:
        devices = {name: p.device for name, p in session.module.named_parameters()}
        self._teacher = {name: v.to(devices[name]) for name, v in self._teacher.items()}

    @override
    @torch.no_grad()
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        if self._stepped:  # not at the end of the step, when others may still move the weights
            named = dict(session.module.named_parameters())
            follow([*self._teacher.values()], [named[name].detach() for name in self._teacher], beta=self.decay)
            self._stepped = False
        self._step = session.trainer.global_step
        self._take_in(session)

    @torch.no_grad()
    def _take_in(self, session: Session, *, frozen: bool = False) -> None:
        """Let parameters that train and have no teacher have one that is what they are; those that are ``frozen``, too."""
        for name, p in session.module.named_parameters():
            if (p.requires_grad or frozen) and p.is_floating_point() and name not in self._teacher:
                self._teacher[name] = p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        self._stepped |= session.trainer.global_step > self._step
        self._said = None

    @override
    def on_blocks_changed(self, session: Session) -> None:
        self._teacher = {}
        self._stepped = False
        # at once, and whatever trains by then, so that the order of techniques does not count; what stays is its own mean
        self._take_in(session, frozen=True)

    @contextmanager
    def _in_place(self, module: nn.Module) -> Iterator[None]:
        """The module has the teacher's weights, dropout is off, and layers that normalise by the batch do so."""
        named = dict(module.named_parameters())
        held = {name: named[name].detach().clone() for name in self._teacher}
        try:
            with torch.no_grad():  # in place, so that whoever keeps something made of a weight sees that it changed
                for name, v in self._teacher.items():
                    named[name].copy_(v)
            with in_evaluation([m for m in module.modules() if not isinstance(m, _NormBase)]):
                yield
        finally:
            with torch.no_grad():
                for name, w in held.items():
                    named[name].copy_(w)

    # -- every step

    @override
    def earlier(self, step: Step, batch: Any) -> Callable[[str, TargetCall], Earlier | None]:
        if self.session.progress.u < self.start:
            return lambda name, call: None
        if self._said is None or self._said[0] is not batch:  # the passes of SAM have one batch and one teacher
            seen = Calls()
            with self._in_place(step.module):
                calls = self._targets.seen(step, batch)
            self._said = batch, {seen.name(call): call.scores for call in calls if call.of_classes}
        said = self._said[1]

        def find(name: str, call: TargetCall) -> Earlier | None:
            z = said.get(name)
            if z is not None and z.shape != call.scores.shape:
                raise ValueError(
                    f"MESA: an F.{call.fn.__name__} of training_step had scores of shape {tuple(call.scores.shape)}, and"
                    f" {tuple(z.shape)} in evaluation mode; expected the same in both. Let the step's loss be on the same"
                    " elements whether dropout is on or off, or take the technique out."
                )
            return None if z is None else (z, None)

        return find

    @override
    def detach(self, session: Session) -> None:
        self._said = None

    # -- what it tells and keeps

    @override
    def summary(self) -> str:
        if not self._teacher:
            return "MESA: no step made"
        return (
            f"MESA, lambda {self.weight:g}: the last batch diverged by {float(self._last):.3g} from the moving average"
        )
