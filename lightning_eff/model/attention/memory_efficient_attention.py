"""Exact attention in memory that grows linearly with the length (Rabe & Staats 2021; Dao et al. 2022).

The rule is in ``_replacing.chunks``.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn.attention import SDPBackend
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count
from lightning_eff._core._attention.calls import Call
from lightning_eff._core.search_space import RunProfile, SearchSpace, needs_attention
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.attention._replacing.chunks import chunked_attention
from lightning_eff.model.attention._replacing.technique import OUTSIDE, ReplacedAttention

WHO = "MemoryEfficientAttention"
#: torch's kernels, in the words of the summary.
KERNELS = {
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient",
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
}
CHUNKS = "chunks"


def kernel_of(call: Call) -> str:
    """Return the kernel that ``F.scaled_dot_product_attention`` takes for a call without a square of weights, or
    ``chunks``.
    """
    tensors: tuple[Any, ...] = (call.query, call.key, call.value, call.mask)
    kind = call.query.device.type
    if torch.is_autocast_enabled(kind):
        tensors = tuple(_as_autocast(t, kind) for t in tensors)
    q, k, v, mask = tensors
    chosen = torch._fused_sdp_choice(  # pyright: ignore[reportPrivateImportUsage]
        q, k, v, mask, call.dropout, call.causal, scale=call.scale, enable_gqa=call.groups > 1
    )
    return KERNELS.get(SDPBackend(chosen), CHUNKS)


def _as_autocast(t: Tensor | None, kind: str) -> Tensor | None:
    """Return a tensor as autocast passes it to fused attention."""
    if t is None or not torch.is_autocast_enabled(kind) or not t.is_floating_point() or t.dtype == torch.float64:
        return t
    return t.to(torch.get_autocast_dtype(kind))


def _pointless(profile: RunProfile) -> str | None:
    if (why := needs_attention(profile)) is not None:
        return why
    return None if profile.memory_bound else "memory limits neither the batch nor the model, and this costs time"


class MemoryEfficientAttention(ReplacedAttention):
    """Compute attention exactly without ever storing all of its weights, forward and backward.

    Every call of ``F.scaled_dot_product_attention`` (Hugging Face's "sdpa" among them) and of ``nn.MultiheadAttention``
    (with ``need_weights=False``) is computed in chunks of queries and keys, with running maxima and sums. The backward
    pass keeps queries, keys, values, the output and one number per row, and recomputes the weights chunk by chunk. So
    memory grows linearly with the number of tokens, and at most ``chunk^2`` weights per head and sample exist at a
    time. Masks of either kind, learnt biases, causal attention, grouped queries and dropout of weights are exact. A
    query that may see no key gets zeros.

    **Where it pays.** torch's own fused kernels (flash, memory-efficient, cuDNN's) do the same and are faster. With
    ``kernel="auto"`` they run wherever torch would use one, and chunks elsewhere. torch's plain kernel, which stores
    all L^2 weights, remains for dropout of weights and masks with gradients on a CPU, and for old devices, large heads
    and float64 on a GPU. Chunks cost time: the weights are computed again in the backward pass, in small products. If
    torch has a fused kernel for every call, the run is plain training, bit for bit, and a log line says so.

    Weights are those of plain training up to rounding. It adds no parameter, and checkpoints are plain. It acts in
    evaluation as long as the Trainer has it. Gradients of gradients (``create_graph``) are refused by torch in chunks,
    as in its fused kernels.

    Logged: ``attentions``, the calls in the last step; ``chunked``, how many of them ran in chunks.

    Args:
        chunk: the number of queries, and of keys, at a time. Large chunks are faster.
        kernel: the choice of the kernel. "auto" takes torch's fused kernel where it has one for the call, "chunks"
            always uses chunks, and "torch" is plain training.

    Raises:
        ValueError: for a value out of range. At setup, for compiled modules. At the first batch, before any weight has
            changed, if there is no attention or a call cannot be replaced: its weights are requested, or its mask is a
            tensor subclass.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[MemoryEfficientAttention()])

    References:
        Rabe & Staats 2021, "Self-attention Does Not Need O(n^2) Memory", arXiv:2112.05682; Dao et al. 2022,
        "FlashAttention", arXiv:2205.14135 (the backward pass).
    """

    saves = "the quadratic memory of attention weights, where torch has no fused kernel for the call"
    paper = "Rabe & Staats 2021, arXiv:2112.05682; Dao et al. 2022, arXiv:2205.14135"
    constraints = "attention by scaled_dot_product_attention or nn.MultiheadAttention, not compiled"
    search_space = SearchSpace({}, _pointless)
    control = Control(
        "the baseline for as many seconds, since torch's own scaled_dot_product_attention computes the same"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        **OUTSIDE,
        "MetaInit": "its search needs gradients of gradients, which attention in chunks does not have",
    }
    turn: ClassVar[int] = 0  # it computes what other techniques leave of a call
    neutral_at: ClassVar[Mapping[str, Any]] = {"kernel": "torch"}
    checkpointed = ("_kernels",)

    def __init__(
        self,
        chunk: Annotated[int, Count()] = 128,
        *,
        kernel: Literal["auto", "chunks", "torch"] = "auto",
    ) -> None:
        self.chunk = chunk
        self.kernel: Literal["auto", "chunks", "torch"] = kernel
        self._kernels: dict[str, int] = {}

    @override
    def begin(self) -> None:
        self._kernels = {}

    @override
    def attend(self, call: Call) -> Tensor:
        kernel = kernel_of(call) if self.kernel == "auto" else CHUNKS
        if self._modes and not self._modes[0].rerunning:
            self._kernels[kernel] = self._kernels.get(kernel, 0) + 1
        if kernel != CHUNKS:
            return call.run()
        kind = call.query.device.type
        q, k, v = (_as_autocast(t, kind) for t in (call.query, call.key, call.value))
        assert q is not None and k is not None and v is not None
        with torch.autocast(kind, enabled=False):
            return chunked_attention(
                q, k, v, call.mask, causal=call.causal, scale=call.scale, dropout=call.dropout, chunk=self.chunk
            )

    @override
    def looked(self, session: Session) -> None:
        rank_zero_info(
            f"{WHO}: {self._told()}"
            + (
                ""
                if CHUNKS in self._kernels
                else "; torch's kernels already save the memory, so this is plain training"
            )
        )

    def _told(self) -> str:
        return ", ".join(f"{count} calls by {kernel}" for kernel, count in self._kernels.items())

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "chunked": self._kernels.get(CHUNKS, 0)}

    @override
    def summary(self) -> str:
        return f"{self._told()} per step" if self._kernels else "no step taken"
