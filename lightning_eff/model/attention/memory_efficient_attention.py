"""Attention in memory that grows with the length and not with its square (Rabe & Staats 2021; Dao et al. 2022).

The rule stands in ``_replacing.chunks``.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn.attention import SDPBackend
from typing_extensions import override

from lightning_eff._core._attention.calls import Call
from lightning_eff._core.search_space import RunProfile, SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.attention._replacing.chunks import chunked_attention
from lightning_eff.model.attention._replacing.technique import OUTSIDE, ReplacedAttention, no_sequences

WHO = "MemoryEfficientAttention"
#: What torch calls its kernels, in the words of the summary.
KERNELS = {
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient",
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
}
CHUNKS = "chunks"


def kernel_of(call: Call) -> str:
    """Which kernel ``F.scaled_dot_product_attention`` takes for a call that needs no square of weights, or ``chunks``."""
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
    """A tensor as autocast hands it on to fused attention."""
    if t is None or not torch.is_autocast_enabled(kind) or not t.is_floating_point() or t.dtype == torch.float64:
        return t
    return t.to(torch.get_autocast_dtype(kind))


def _pointless(profile: RunProfile) -> str | None:
    if (why := no_sequences(profile)) is not None:
        return why
    return None if profile.memory_bound else "memory limits neither batch nor model, and this costs time"


class MemoryEfficientAttention(ReplacedAttention):
    """Compute attention exactly without ever holding all of its weights, forward and backward.

    Every call of ``F.scaled_dot_product_attention`` (Hugging Face's "sdpa" among them) and of ``nn.MultiheadAttention``
    (with ``need_weights=False``) is computed by chunks of queries and keys, with running maxima and sums. Kept for the
    backward pass are queries, keys, values, the output and one number for each row; weights are computed again, chunk by
    chunk. So the memory of L tokens grows with L, and at one time there are ``chunk^2`` weights of each head and sample. Masks
    of either kind, biases that are learnt, causal attention, grouped queries and dropout of weights are exact; a query that may
    see nothing gets zeros.

    **Where it pays.** torch's own fused kernels (flash, memory-efficient, cuDNN's) do the same and are faster; with
    ``kernel="auto"`` they run wherever torch would take one, and chunks elsewhere. What torch leaves to its plain kernel, which
    holds all L^2 weights, depends on the device: on a CPU, dropout of weights and masks that take gradients; on a GPU also
    old devices, large heads and float64. Chunks cost time: the weights again in the backward pass, and a small product at a
    time. If nothing is left to do, the run is plain training, to the bit, and the log says so. Backward passes through
    gradients (``create_graph``) are refused by torch in chunks, as in its fused kernels.

    Weights are those of plain training but for rounding. No parameter changes; checkpoints are plain. It acts in evaluation
    too, as long as the Trainer has it.

    Logged: ``attentions``, calls in the last step; ``chunked``, how many of them were in chunks.

    Args:
        chunk: queries, and keys, at a time, >= 1. Large chunks are faster.
        kernel: ``"auto"``, torch's fused kernel where it has one for the call; ``"chunks"``, always by chunks; or ``"torch"``,
            whatever torch takes, which is plain training.

    Raises:
        ValueError: for other values; at the first batch, before any weight has changed, where no attention is seen, or one
            cannot be replaced, with the reason: its weights are asked for, or its mask is a tensor of a kind of its own; at
            setup for compiled modules.

    Sources:
        Rabe & Staats 2021, arXiv:2112.05682; Dao et al. 2022, "FlashAttention", arXiv:2205.14135 (the backward pass).
    """

    saves: ClassVar[str] = "the square of attention weights, where torch has no fused kernel for the call"
    paper: ClassVar[str] = "Rabe & Staats 2021, arXiv:2112.05682; Dao et al. 2022, arXiv:2205.14135"
    constraints: ClassVar[str] = "attention by scaled_dot_product_attention or nn.MultiheadAttention, not compiled"
    survey: ClassVar[Survey | None] = Survey(
        "self-attention in less than O(n²) memory (Rabe & Staats; FlashAttention)", zhuang="3", shen="6"
    )
    search_space: ClassVar[SearchSpace | None] = SearchSpace({}, _pointless)
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds: torch's own scaled_dot_product_attention is the same function"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        **OUTSIDE,
        "MetaInit": "its search takes gradients of gradients, which attention in chunks has none of",
    }
    turn: ClassVar[int] = 0  # what others leave of a call

    def __init__(self, chunk: int = 128, *, kernel: Literal["auto", "chunks", "torch"] = "auto") -> None:
        if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
            raise ValueError(f"{WHO}({chunk=}): expected an integer >= 1, queries and keys at a time, such as 128.")
        if kernel not in ("auto", CHUNKS, "torch"):
            raise ValueError(
                f"{WHO}({kernel=}): expected 'auto', torch's fused kernel where it has one, 'chunks', always by chunks, or"
                " 'torch', which is plain training."
            )
        self.chunk = chunk
        self.kernel: Literal["auto", "chunks", "torch"] = kernel
        self._kernels: dict[str, int] = {}

    @property
    @override
    def neutral(self) -> bool:
        return self.kernel == "torch"

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
            + ("" if CHUNKS in self._kernels else "; nothing is left to save, plain training runs")
        )

    def _told(self) -> str:
        return ", ".join(f"{count} calls by {kernel}" for kernel, count in self._kernels.items())

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "chunked": self._kernels.get(CHUNKS, 0)}

    @override
    def summary(self) -> str:
        return f"{self._told()} in a step" if self._kernels else "no step taken"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "kernels": dict(self._kernels)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._kernels = dict(state_dict["kernels"])
