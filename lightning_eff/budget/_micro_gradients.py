"""The norms of the gradients of each micro-batch on each rank, and of their mean, measured in passing."""

from typing import Any, ClassVar, TypeVar

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_eff._core._optim.gradient_norms import norm
from lightning_eff._core._optim.tensors import Tensors
from lightning_eff._core.batches import num_samples
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Technique

Figure = TypeVar("Figure", float, Tensor)


def signal_and_noise(small: Figure, large: Figure, b: float | Figure, B: float | Figure) -> tuple[Figure, Figure]:
    """Return unbiased estimates of the true gradient's ``|G|^2`` and of ``S``, the trace of one sample's covariance.

    ``|G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b)`` and ``S = (|G_b|^2 - |G_B|^2) / (1/b - 1/B)``. Either may be negative in one
    step. Their ratio is meaningful only for means over many steps.

    For ``n`` small gradients over ``b_i`` samples and their unweighted mean, ``b`` is the harmonic mean of ``b_i`` and ``B`` is
    ``n b``: the mean of ``|G_b|^2`` has the noise ``S mean(1 / b_i)``, and that of ``|G_B|^2`` is ``S mean(1 / b_i) / n``.

    Args:
        small: ``|G_b|^2``, the mean squared norm of gradients over ``b`` samples.
        large: ``|G_B|^2``, the squared norm of the gradient over ``B`` samples.
        b: the samples of each small gradient, > 0.
        B: the samples of the large gradient, > b.
    """
    return (B * large - b * small) / (B - b), (small - large) / (1 / b - 1 / B)


class MicroGradients(Technique):
    """Measures the squared gradient norm of each backward pass of a window before gradients are summed or averaged.

    A subclass implements :meth:`_measure`, which is called after the last backward pass of a window in which no batch was
    skipped, before clipping and the optimizer step.
    """

    stage: ClassVar[Stage | None] = Stage.SAVE

    def _reset(self) -> None:
        self._tensors: Tensors | None = None
        self._hooks: dict[int, RemovableHandle] = {}
        self._armed = self._measuring = False
        self._norms: list[Tensor] = []  # of this pass's gradients
        self._parts: list[tuple[int, Tensor]] = []  # samples and squared gradient norm of each pass of the window
        self._passes = 0  # backward passes of the window
        self._size = 0

    def _wanted(self, session: Session) -> bool:
        """Whether to measure the pass that begins."""
        return True

    def _by_pass(self) -> bool:
        """Whether the gradients of single passes are measured."""
        return True

    def _measure(self, trainer: Trainer, parameters: list[nn.Parameter]) -> None:
        """Measure a complete window, whose mean gradient every rank has."""
        raise NotImplementedError

    # -- the run

    @override
    def attach(self, session: Session) -> None:
        super().attach(session)
        backward = session.trainer.strategy.backward

        def measured(*args: Any, **kwargs: Any) -> Any:
            if session.asleep:
                return backward(*args, **kwargs)
            self._begin(session)
            try:
                output = backward(*args, **kwargs)
            finally:
                self._armed = False
            if self._measuring:
                self._backward_ended(session)
            return output

        session.patches.set(session.trainer.strategy, "backward", measured)

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        self._size = num_samples(batch)
        return proceed(batch)

    def _begin(self, session: Session) -> None:
        """Watch the gradients of a backward pass before they are accumulated or reduced over ranks."""
        self._passes += 1
        self._measuring = self._wanted(session)
        self._norms = []
        if not self._measuring or not self._by_pass():
            return
        for p in self._parameters(session):
            if p.requires_grad and id(p) not in self._hooks:
                self._hooks[id(p)] = p.register_hook(self._see)
        self._armed = True

    def _parameters(self, session: Session) -> list[nn.Parameter]:
        if self._tensors is None:
            self._tensors = Tensors(session, reshard=False)
        self._tensors.look()
        return list(self._tensors.parameters.values())

    def _see(self, gradient: Tensor) -> None:
        if self._armed:  # at once, because DDP soon replaces the values by their mean over ranks
            self._norms.append(norm(gradient))

    def _square(self, session: Session) -> Tensor | None:
        """The squared gradient norm of the pass that has ended, or None if it has no gradients."""
        return torch.stack(self._norms).double().square().sum() if self._norms else None

    def _backward_ended(self, session: Session) -> None:
        """Measure the pass that has ended, and the window with its last pass, before other techniques change gradients."""
        self._end_pass(session)

    def _end_pass(self, session: Session) -> None:
        square = self._square(session)
        if square is None:
            return
        self._parts.append((self._size, square))
        trainer = session.trainer
        window = trainer.accumulate_grad_batches
        over = (trainer.fit_loop.epoch_loop.batch_idx + 1) % window == 0
        if over and self._passes == window:  # none of its batches was skipped
            self._measure(trainer, self._parameters(session))

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        loop = session.trainer.fit_loop.epoch_loop
        if (batch_idx + 1) % session.trainer.accumulate_grad_batches == 0 or loop._num_ready_batches_reached():
            self._parts, self._passes = [], 0

    def _mean_square(self, trainer: Trainer, *others: float) -> list[Tensor]:
        """Return the mean squared norm of micro-batch gradients over the window and all ranks, and the means of ``others``."""
        squares = [square for _, square in self._parts]
        small = torch.stack(squares).double().mean() * len(squares) ** 2  # the loss was divided by the window
        told = torch.stack([small, *(small.new_full((), other) for other in others)])
        if self.session.replicas.count > 1:
            mean = trainer.strategy.reduce(told, reduce_op="mean")
            assert isinstance(mean, Tensor)
            told = mean
        return list(told)

    @staticmethod
    def _unscaled(trainer: Trainer, *squares: Tensor) -> list[Tensor]:
        """Return squared gradient norms in float64 on one device, without the factor of a loss scaler."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = None if scaler is None else scaler._get_scale_async()  # get_scale waits for the device
        found = [square.double().to(squares[0].device) for square in squares]
        return found if scale is None else [square / scale.double() ** 2 for square in found]

    # -- what is kept

    @override
    def detach(self, session: Session) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks, self._parts, self._tensors, self._norms = {}, [], None, []

    @override
    def state_dict(self) -> dict[str, Any]:
        parts = [] if self._session is None or not self._parts else self._session.gather(self._saved_parts())
        return {"parts": parts, "passes": self._passes}

    def _saved_parts(self) -> list[tuple[int, Tensor]]:
        return [(size, square.cpu()) for size, square in self._parts]

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        session, parts = self._session, state_dict["parts"]
        self._passes = state_dict["passes"]
        if session is not None and session.rank < len(parts):
            device = session.trainer.strategy.root_device
            self._parts = [(size, square.to(device)) for size, square in parts[session.rank]]
