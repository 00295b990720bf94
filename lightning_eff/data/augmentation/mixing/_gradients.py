"""Mixtures guided by saliency: the gradient of the network's loss with respect to the pixels."""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core.steps import Step
from lightning_eff.data.augmentation._engine import replaced
from lightning_eff.data.augmentation._mixing import Mixing


class ByGradients(Mixing):
    """Makes mixtures guided by the gradient of the loss on the unmixed samples."""

    _at: tuple[Step, Any] | None = None  # the batch that is being mixed

    @override
    def _mixture(self, step: Step, batch: Any, labels: dict[str, Tensor]) -> tuple[Any, Tensor, Tensor] | None:
        self._at = step, batch
        try:
            return super()._mixture(step, batch, labels)
        finally:
            self._at = None

    def gradient_sizes(self, step: Step, batch: Any, inputs: list[Tensor]) -> Tensor:
        """Return the saliency of each pixel: the root mean square of the loss's gradient over channels, (B, H, W).

        This takes an extra forward and backward pass of the step. Both leave no trace, and their cost is counted.

        Args:
            step: the step that mixes.
            batch: the batch as the loader returned it.
            inputs: the batch's images, each (B, C, H, W). The mean is over the channels of all of them.

        Raises:
            ValueError: if the loss has no gradient with respect to the images.
        """
        leaves = [x.detach().requires_grad_() for x in inputs]
        given = replaced(batch, {id(x): leaf for x, leaf in zip(inputs, leaves, strict=True)})
        # the gradient scaler's factor keeps small gradients representable in float16
        scaler = getattr(self.session.trainer.precision_plugin, "scaler", None)
        factor = 1.0 if scaler is None else float(scaler.get_scale())
        found = step.gradients(given, len(inputs[0]), leaves, factor=factor)
        if found is None:  # the step skips this batch
            return torch.zeros_like(inputs[0][:, 0], dtype=torch.float32)
        if any(g is None for g in found):
            raise ValueError(
                f"{type(self).__name__}: the loss has no gradient with respect to the images, for example because training_step"
                f" detaches or rounds them. Name the right images with keys=, or remove {type(self).__name__}."
            )
        squares = torch.cat([g.float().square() for g in found if g is not None], dim=1)
        return squares.mean(dim=1).sqrt()

    def sizes_of(self, inputs: list[Tensor]) -> Tensor:
        """Return :meth:`gradient_sizes` of the inputs that are being mixed."""
        assert self._at is not None
        return self.gradient_sizes(*self._at, inputs)
