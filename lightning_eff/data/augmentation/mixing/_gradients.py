"""Mixtures that are made by what the network itself says of its inputs: the loss's gradient in their pixels."""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core.steps import Step
from lightning_eff.data.augmentation._engine import replaced
from lightning_eff.data.augmentation._mixing import Mixing


class ByGradients(Mixing):
    """Makes mixtures by what the gradient of the loss on the samples as they are says of the inputs."""

    _at: tuple[Step, Any] | None = None  # the batch that is being mixed

    @override
    def _mixture(self, step: Step, batch: Any, labels: dict[str, Tensor]) -> tuple[Any, Tensor, Tensor] | None:
        self._at = step, batch
        try:
            return super()._mixture(step, batch, labels)
        finally:
            self._at = None

    def gradient_sizes(self, step: Step, batch: Any, inputs: list[Tensor]) -> Tensor:
        """How much each pixel matters: the root of the mean over channels of the loss's squared gradient, (B, H, W).

        It takes a forward and a backward pass of the step's own, which leave no trace and are counted.

        Args:
            step: the one that mixes.
            batch: as the loader gave it.
            inputs: the batch's images, each (B, C, H, W); the channels of all count together.

        Raises:
            ValueError: if the step's loss does not come of the images in a way that gradients take.
        """
        leaves = [x.detach().requires_grad_() for x in inputs]
        given = replaced(batch, {id(x): leaf for x, leaf in zip(inputs, leaves, strict=True)})
        # a gradient scaler's factor keeps what lies below the smallest number of float16
        scaler = getattr(self.session.trainer.precision_plugin, "scaler", None)
        factor = 1.0 if scaler is None else float(scaler.get_scale())
        found = step.gradients(given, len(inputs[0]), leaves, factor=factor)
        if found is None:  # the step skips this batch, mixed or not
            return torch.zeros_like(inputs[0][:, 0], dtype=torch.float32)
        if any(g is None for g in found):
            raise ValueError(
                f"{type(self).__name__}: the loss does not come of the images in a way that gradients take, as where"
                " training_step detaches or rounds them; expected one that does. Say by keys= which are the images, or take the"
                " technique out."
            )
        squares = torch.cat([g.float().square() for g in found if g is not None], dim=1)
        return squares.mean(dim=1).sqrt()

    def sizes_of(self, inputs: list[Tensor]) -> Tensor:
        """:meth:`gradient_sizes` of the inputs that are being mixed."""
        assert self._at is not None
        return self.gradient_sizes(*self._at, inputs)
