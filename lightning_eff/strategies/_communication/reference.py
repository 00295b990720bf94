"""The base class of techniques whose ranks train separately and compare their weights with the ones they last had in common."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter
from typing_extensions import override

from lightning_eff._core.session import Session
from lightning_eff.strategies._communication.apart import Apart
from lightning_eff.strategies._communication.exchange import as_real


def differences(reference: Mapping[str, Tensor], parameters: Mapping[str, Parameter]) -> dict[str, Tensor]:
    """Return ``reference - parameter`` for each name in ``reference``, in float32 or float64; complex tensors as real ones."""
    found: dict[str, Tensor] = {}
    for name, old in reference.items():
        dtype = torch.promote_types(old.dtype, torch.float32)
        found[name] = old.to(dtype) - as_real(parameters[name].detach()).to(dtype)
    return found


class ApartFromReference(Apart):
    """Keeps a copy of the weights with which each period of local steps began, the same on all ranks.

    If another technique overwrites weights within a period, there is no copy until the next period begins.
    """

    conflicts: ClassVar[Mapping[str, str]] = {
        "LatestWeightAveraging": "it would take snapshots of each rank's own weights, and only those of rank 0 would be saved",
        "LocalSGD": "both decide when ranks average their weights",
    }

    @override
    def _reset(self) -> None:
        super()._reset()
        self._reference: dict[str, Tensor] = {}  # by parameter, complex ones as real; empty without a copy

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        super().on_batch_start(session, batch, batch_idx)
        if self._several(session) and not self._reference and not self._apart and self._steps >= self.warmup_steps:
            self._reference = {
                name: as_real(p.detach()).clone() for name, p in self._parameters(session).items() if p.numel()
            }

    def _several(self, session: Session) -> bool:
        return self._distributed and session.trainer.world_size > 1

    @override
    def on_blocks_changed(self, session: Session) -> None:
        super().on_blocks_changed(session)
        self._reference = {}

    @override
    def on_optimizers(self, session: Session) -> None:
        if self._pending is not None and session.trainer.world_size > 1:
            self._restore(session, self._pending)
        super().on_optimizers(session)

    def _restore(self, session: Session, saved: dict[str, Any]) -> None:
        """Load what all ranks have in common from a checkpoint."""
        self._reference = on_devices(session, saved["reference"])

    @override
    def state_dict(self) -> dict[str, Any]:
        # where ranks have met, the module's weights are the reference
        return {**super().state_dict(), "reference": on_devices(None, self._reference) if self._apart else {}}


def on_devices(session: Session | None, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of the tensors by parameter on that parameter's device, or on the CPU without a session."""
    if session is None:
        return {name: x.to("cpu", copy=True) for name, x in tensors.items()}
    parameters = dict(session.module.named_parameters())
    return {name: x.to(parameters[name].device, copy=True) for name, x in tensors.items()}
