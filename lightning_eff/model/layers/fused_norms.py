"""FusedNorms: compute LayerNorm and RMSNorm with one kernel forward and one backward (Ba et al. 2016; Zhang & Sennrich 2019).

``kernels.norm`` holds the rule and its gradients.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, cast

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.naming import by_reason
from lightning_eff._core._needs.needs import Need
from lightning_eff._core._stack.partial_views import Worn, worn, worn_by
from lightning_eff._core.search_space import RunProfile, SearchSpace
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control, Technique
from lightning_eff.kernels import _launch
from lightning_eff.model.layers._fused_norms.finding import Kind, norms
from lightning_eff.model.layers._shared.arguments import Paths
from lightning_eff.model.layers._shared.choosing import ByName, select

WHO = "FusedNorms"


class Fused(Worn):
    """A norm that a kernel computes."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The kernel's result in the input's dtype; a call with further arguments runs the module's own ``forward``."""
        assert isinstance(self, nn.Module)
        if args or kwargs or not x.numel():
            return self._plain.forward(self, x, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        kind: Kind = worn_by(cast(Any, self))
        return kind(self, x)


def _pointless(profile: RunProfile) -> str | None:
    if profile.accelerator != "cuda":
        return "the kernels run only on CUDA"
    return None if profile.num_blocks >= 1 else "found no repeated blocks, where norms could take time"


class FusedNorms(ByName, Technique):
    """Compute LayerNorm and RMSNorm in training with fused kernels: one forward and one backward, in float32.

    RMSNorm in Hugging Face models is six operations, each of which reads and writes the whole hidden state. Here it is one
    kernel that keeps the input and one number per row for its backward pass. ``nn.LayerNorm`` and ``nn.RMSNorm`` are found by
    class. Other norms are found by comparing their output on random rows with ``(x / sqrt(mean(x^2) + eps)) g``, also with a
    gain of ``1 + g`` as in Gemma, or with LayerNorm. Other modules are skipped. Norms over several dimensions, or over rows
    of more than 8192 elements, are skipped and logged with the reason.

    The results equal those of plain training up to rounding. The output has the input's dtype and is rounded once: under
    autocast, a bfloat16 input gives a bfloat16 output, where torch's LayerNorm returns float32. This saves memory, and the
    next product would round it anyway. Evaluation, parameters and checkpoints are those of the plain module. Double backward
    is not supported.

    Use it for models whose RMSNorm consists of single operations, and compare the step time with ``bench``: **the speed-up on
    a GPU has not been measured**, and torch's fused kernels are good. **On a CPU** no Triton kernel runs. The norms are then
    computed by ``torch.nn.functional.layer_norm`` and ``rms_norm``, which leaves ``nn.LayerNorm`` unchanged bit for bit. It
    logs ``norms``, the number of norms.

    Args:
        names: dotted paths of the norms to fuse, their last parts, or patterns, such as ``["layers.*.input_layernorm"]``.
            None takes all norms, ``[]`` is plain training.

    Raises:
        ValueError: for a wrong value. At setup, if there is no norm, a name matches none, or no kernel computes a named norm.
        ImportError: at setup, on CUDA without triton.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[FusedNorms()])

    References:
        Ba et al. 2016, "Layer Normalization", arXiv:1607.06450.
        Zhang & Sennrich 2019, "Root Mean Square Layer Normalization", arXiv:1910.07467.
        Hsu et al. 2024, "Liger Kernel: Efficient Triton Kernels for LLM Training", arXiv:2410.10989.
    """

    saves = "time and memory of norms written in single operations; not measured on a GPU"
    paper = "Zhang & Sennrich 2019, arXiv:1910.07467; Hsu et al. 2024, arXiv:2410.10989"
    constraints = "kernels on CUDA with triton; torch's functions elsewhere"
    needs: ClassVar[Need] = Need.LAYERS
    search_space = SearchSpace({}, _pointless)
    control = Control("the baseline for the same time: the results are equal up to rounding")
    conflicts: ClassVar[Mapping[str, str]] = {}
    needs_automatic_optimization: ClassVar[bool] = False
    sparse_gradients: ClassVar[bool] = True

    def __init__(self, names: Paths = None) -> None:
        self._take_names(names)

    def _reset(self) -> None:
        self._kinds: list[tuple[nn.Module, Kind]] = []
        self._count = 0

    @override
    def check(self, session: Session) -> None:
        if session.trainer.strategy.root_device.type == "cuda":
            _launch.triton_module("norm")

    @override
    def on_model(self, session: Session) -> None:
        if not session.fitting:
            return
        root = session.module
        every = norms(root)
        kinds = {path: kind for path, (_, kind) in every.items()}
        chosen, left = select(
            {path: m for path, (m, _) in every.items()},
            self.names,
            lambda path, m: kind if isinstance(kind := kinds[path], str) else None,
            who=WHO,
            what="norms",
            root=root,
        )
        self._kinds = [(m, kind) for path, m in chosen.items() if not isinstance(kind := kinds[path], str)]
        if not self._kinds:
            others = sorted({type(m).__name__ for m in root.modules() if "norm" in type(m).__name__.lower()})
            raise ValueError(
                f"{WHO}: {type(root).__name__} has no LayerNorm or RMSNorm to act on.{by_reason(left)} It has"
                f" norms of {', '.join(others[:5]) or 'no kind'}. Remove the callback."
            )
        self._count = len(self._kinds)
        session.views.append(self._view)
        on = "Triton kernels" if session.trainer.strategy.root_device.type == "cuda" else "torch's own functions"
        skipped = f" Skipped{by_reason(left)}" if left else ""
        rank_zero_info(f"{WHO}: {self._count} norms are computed by {on}.{skipped}")

    def _view(self, training: bool) -> AbstractContextManager[None]:
        kinds = self._kinds if training else []
        return worn(Fused, [m for m, _ in kinds], [kind for _, kind in kinds])

    @override
    def detach(self, session: Session) -> None:
        self._kinds = []

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"norms": self._count}

    @override
    def summary(self) -> str:
        return f"computed {self._count} norms with one kernel forward and one backward"
