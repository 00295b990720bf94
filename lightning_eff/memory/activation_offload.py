"""Activation offloading: what autograd keeps for the backward pass waits in host memory (vDNN, Rhu et al. 2016)."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from typing_extensions import override

from lightning_eff._core._needs.needs import Need
from lightning_eff._core.batches import tensors
from lightning_eff._core.blocks import refuse_compiled_around, untraced_hooks
from lightning_eff._core.losses import loss_of
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey, needs_memory_bound
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step, snapshot
from lightning_eff._core.technique import Control, Technique
from lightning_eff.memory._compression.saved import is_weight_copy
from lightning_eff.memory._hosting.host import HostStore, Ticket, can_leave


class _Kept:
    """A saved tensor that stays where it is; never itself, since an output that its own node holds is never freed."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self._version = -1 if tensor.is_inference() else tensor._version

    def get(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: if it was changed in place meanwhile.
        """
        if self._version >= 0 and self._tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a"
                f" tensor of shape {list(self._tensor.shape)} and {self._tensor.dtype} is at version"
                f" {self._tensor._version}; expected version {self._version} instead. Plain training would fail in the"
                " same way. Change a copy of it instead."
            )
        return self._tensor


class Offloading:
    """Which saved tensors leave their device, as a pair of hooks for ``torch.autograd.graph.saved_tensors_hooks``.

    Floating-point tensors of at least ``min_bytes`` leave. Those stay whose memory is held anyway: parameters, views of
    them and their copies in another precision, and what lies in the storages given to :meth:`begin`.

    Args:
        store: where they wait.
        min_bytes: the size from which on a tensor leaves.
    """

    def __init__(self, store: HostStore, min_bytes: float) -> None:
        self.store = store
        self.min_bytes = min_bytes
        self.seen = self.left = self.largest = 0
        self._staying: set[int] = set()

    def begin(self, module: nn.Module, batch: Any) -> None:
        """A forward pass begins: parameters and buffers of ``module``, and the tensors of ``batch``, stay."""
        held = [*module.parameters(), *module.buffers(), *(tensor for _, tensor in tensors(batch))]
        self._staying = {t.untyped_storage()._cdata for t in held if can_leave(t)}

    def pack(self, tensor: Tensor) -> Ticket | _Kept:
        """What autograd keeps in place of ``tensor``."""
        self.seen += 1
        if not can_leave(tensor) or not tensor.is_floating_point():
            return _Kept(tensor)
        size = tensor.numel() * tensor.element_size()
        if tensor.untyped_storage()._cdata in self._staying:
            return _Kept(tensor)
        if size < self.min_bytes:
            self.largest = max(self.largest, size)
            return _Kept(tensor)
        if is_weight_copy(tensor):
            return _Kept(tensor)
        self.left += 1
        return self.store.put(tensor)

    def unpack(self, packed: Ticket | _Kept) -> Tensor:
        """The tensor again."""
        return packed.get()

    def hooks(self) -> saved_tensors_hooks:
        """The context in which saved tensors pass through here; hooks set inside it come before it."""
        return untraced_hooks(self.pack, self.unpack)


def _pointless(profile: RunProfile) -> str | None:
    if profile.accelerator == "cpu":
        return "the device is the host: there is nowhere to offload to"
    return needs_memory_bound(profile)


class ActivationOffload(Technique):
    """Let large activations wait in host memory between the forward and the backward pass.

    Each floating-point tensor of at least ``min_bytes`` that autograd saves in ``training_step`` is copied to the host as it
    is saved, and back before the backward pass needs it, with the same values, shape and strides: gradients are bit for bit
    those of plain training. On CUDA both ways run on streams of their own, through pinned memory that later steps use again,
    and the way back begins ``prefetch`` tensors ahead. What it costs in time depends on how much is computed for each byte
    copied; ``seconds_waited`` tells.

    Parameters, views of them and their autocast copies stay, as do buffers and the batch: they are held anyway. A frozen
    parameter's autocast copy cannot be told from an activation, and leaves. Beyond ``torch.autograd.graph.save_on_cpu`` that
    is this list of what stays, memory used again, prefetching, views of one tensor copied once, the error for tensors that
    were changed in place, and the counts. Where another technique handles what is saved inside blocks, that is its own, and
    only the rest leaves.

    On the CPU nothing is gained: the same copies are made within host memory, and a warning says so.

    Logged, of the last batch: ``bytes_to_host`` and ``bytes_to_device``, ``bytes_held``, the most that waited in host memory,
    and ``seconds_waited``, for which computing stood still for copies.

    Args:
        min_bytes: the size from which on a saved tensor leaves, >= 1, in bytes; ``math.inf`` is plain training.
        layers: blocks, as a path, a pattern (``"block_*"``) or a list of paths: only what is saved inside them leaves.
            None takes all of ``training_step``.
        prefetch: how many copies begin their way back ahead of the one that is needed, >= 0; each holds its size on the
            device.
        pin_memory: use pinned host memory on CUDA. Without it copies are slower and stop the computing.

    Raises:
        ValueError: if an argument is out of its range; at setup, if ``layers`` names no stack of blocks, or they lie within a
            compiled module; in the first step, before any weight changes, if no saved tensor is as large as ``min_bytes``.
        RuntimeError: in the backward pass, if a tensor was changed in place after it was saved, as in plain training.

    Sources:
        Rhu et al. 2016, arXiv:1602.08124 (vDNN).
    """

    saves: ClassVar[str] = "device memory of large activations, for the time of copies that computing does not hide"
    paper: ClassVar[str] = "Rhu et al. 2016, arXiv:1602.08124 (vDNN)"
    constraints: ClassVar[str] = "gains on an accelerator alone; layers= not within a compiled module"
    survey: ClassVar[Survey | None] = Survey("offloading of activations", zhuang="3", shen="7.3")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"min_bytes": Choice((2**18, 2**20, 2**22)), "prefetch": Choice((1, 2))}, _pointless
    )
    sparse_gradients: ClassVar[bool] = True
    control: ClassVar[Control] = Control("the baseline for as many seconds: gradients are bit for bit the same")
    conflicts: ClassVar[Mapping[str, str]] = {
        "ACTPrecision": "each decides what becomes of a saved tensor, and autograd asks the inner one alone"
    }
    needs_automatic_optimization: ClassVar[bool] = False
    needs: ClassVar[Need] = Need.SAVED

    def __init__(
        self,
        *,
        min_bytes: float = 2**20,
        layers: str | Sequence[str] | None = None,
        prefetch: int = 1,
        pin_memory: bool = True,
    ) -> None:
        if not min_bytes >= 1:
            raise ValueError(
                f"ActivationOffload(min_bytes={min_bytes}): expected a number of bytes >= 1, the size from which on a saved"
                " tensor leaves the device. 2**20 is the default; math.inf keeps all."
            )
        if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
            raise ValueError(
                f"ActivationOffload(prefetch={prefetch!r}): expected an integer >= 0, how many copies begin their way back"
                " ahead of the one that is needed. 1 is the default; 0 waits for each."
            )
        self.min_bytes = min_bytes
        self.layers = layers
        self.prefetch = prefetch
        self.pin_memory = pin_memory
        self._reset()

    def _reset(self) -> None:
        self._offloading: Offloading | None = None
        self._inside = False  # whether blocks are within a pass of the training step
        self._steps = 0
        self._total: dict[str, float] = {"bytes_to_host": 0, "bytes_to_device": 0, "seconds_waited": 0.0}
        self._last: dict[str, float] = {**self._total, "bytes_held": 0}
        self._before: dict[str, float] = dict(self._total)

    @property
    @override
    def neutral(self) -> bool:
        return math.isinf(self.min_bytes)

    @override
    def attach(self, session: Session) -> None:
        self._reset()
        self._offloading = Offloading(HostStore(depth=self.prefetch, pin_memory=self.pin_memory), self.min_bytes)
        session.chain.add(Stage.SAVE, self._link)

    @override
    def on_model(self, session: Session) -> None:
        if not session.fitting or self.layers is None:
            return
        stack = session.stack(self.layers, who="ActivationOffload", chain=False)
        refuse_compiled_around(
            session.module,
            stack.path,
            who="ActivationOffload",
            way_out="Compile the blocks themselves, or leave layers out.",
        )
        for block in {id(block): block for block in stack.blocks}.values():
            for name in ("_call_impl", "_compiled_call_impl"):
                call = getattr(block, name, None)
                if call is not None:
                    session.patches.set(block, name, self._within(call))

    def _within(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A block's call, whose saved tensors leave in the training step."""

        @functools.wraps(call)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not self._inside or self._offloading is None:
                return call(*args, **kwargs)
            with self._offloading.hooks():
                return call(*args, **kwargs)

        return wrapped

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        offloading = self._offloading
        assert offloading is not None, "attach has made it"
        offloading.begin(step.module, batch)
        # until a pass has moved something it may be an error, which loses nothing
        put_back = None if self._total["bytes_to_host"] else snapshot(step.module)
        if self.layers is None:
            with offloading.hooks():
                output = proceed(batch)
        else:
            self._inside = True
            try:
                output = proceed(batch)
            finally:
                self._inside = False
        loss = loss_of(output)
        saves = offloading.seen > 0 or (loss is not None and loss.requires_grad)
        if saves and not offloading.left and put_back is not None:
            put_back()
            raise ValueError(
                f"ActivationOffload(min_bytes={self.min_bytes:,}): none of the {offloading.seen} tensors that the first"
                f" step saves is as large; expected one at least, or the technique does nothing. The largest that could"
                f" leave has {offloading.largest:,} bytes: lower min_bytes, or take the technique out. What another technique"
                " handles is not among them."
            )
        return output

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        assert self._offloading is not None, "attach has made it"
        store = self._offloading.store
        now = {key: getattr(store, key) for key in self._total}
        self._last = {key: now[key] - self._before[key] for key in now}
        self._last["bytes_held"] = store.peak_bytes_on_host
        for key in self._total:
            self._total[key] += self._last[key]
        self._before = now
        store.peak_bytes_on_host = store.bytes_on_host
        self._steps += 1

    @override
    def detach(self, session: Session) -> None:
        if self._offloading is not None:
            self._offloading.store.release()
            self._offloading = None

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "total": dict(self._total)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._steps = state_dict["steps"]
        self._total = dict(state_dict["total"])

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return dict(self._last)

    @override
    def summary(self) -> str:
        steps = max(self._steps, 1)
        moved, waited = self._total["bytes_to_host"] / steps, self._total["seconds_waited"] / steps
        return f"{moved / 2**20:,.2f} MiB of activations a batch waited on the host; {waited * 1000:.1f} ms stood still"
