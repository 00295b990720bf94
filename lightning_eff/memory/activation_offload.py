"""Activation offloading: tensors saved for the backward pass wait in host memory (vDNN, Rhu et al. 2016)."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Either, Layers, Number, OneOf
from lightning_eff._core._needs.needs import Need
from lightning_eff._core.batches import tensors
from lightning_eff._core.blocks import refuse_compiled_around, untraced_hooks
from lightning_eff._core.losses import loss_of
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, needs_memory_bound
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step, snapshot
from lightning_eff._core.technique import Control, Technique
from lightning_eff.memory._compression.saved import is_weight_copy
from lightning_eff.memory._hosting.host import HostStore, Ticket, can_leave
from lightning_eff.memory._hosting.staying import Staying


class Offloading:
    """Choose the saved tensors that leave the device, as hooks for ``torch.autograd.graph.saved_tensors_hooks``.

    Floating-point tensors of at least ``min_bytes`` leave. Those whose memory is held anyway stay: parameters, their views and
    their copies in another precision, and the storages given to :meth:`begin`.

    Args:
        store: the host memory.
        min_bytes: the smallest size of a tensor that leaves.
    """

    def __init__(self, store: HostStore, min_bytes: float) -> None:
        self.store = store
        self.min_bytes = min_bytes
        self.seen = self.left = self.largest = 0
        self._staying: set[int] = set()

    def begin(self, module: nn.Module, batch: Any) -> None:
        """Begin a forward pass: parameters and buffers of ``module``, and the tensors of ``batch``, stay."""
        held = [*module.parameters(), *module.buffers(), *(tensor for _, tensor in tensors(batch))]
        self._staying = {t.untyped_storage()._cdata for t in held if can_leave(t)}

    def pack(self, tensor: Tensor) -> Ticket | Staying:
        """Return what autograd stores in place of ``tensor``."""
        self.seen += 1
        if not can_leave(tensor) or not tensor.is_floating_point():
            return Staying(tensor)
        size = tensor.numel() * tensor.element_size()
        if tensor.untyped_storage()._cdata in self._staying:
            return Staying(tensor)
        if size < self.min_bytes:
            self.largest = max(self.largest, size)
            return Staying(tensor)
        if is_weight_copy(tensor):
            return Staying(tensor)
        self.left += 1
        return self.store.put(tensor)

    def unpack(self, packed: Ticket | Staying) -> Tensor:
        """Return the tensor."""
        return packed.get()

    def hooks(self) -> saved_tensors_hooks:
        """Return the context that handles saved tensors; hooks that are set inside it come first."""
        return untraced_hooks(self.pack, self.unpack)


def _pointless(profile: RunProfile) -> str | None:
    if profile.accelerator == "cpu":
        return "the device is the host, so there is nothing to offload from"
    return needs_memory_bound(profile)


class ActivationOffload(Technique):
    """Move large activations to host memory between the forward and the backward pass.

    Each floating-point tensor of at least ``min_bytes`` that autograd saves in ``training_step`` is copied to the host, and
    back before the backward pass needs it. Values, shape and strides are the same, so gradients are bit-identical to plain
    training. On CUDA, copies run on their own streams through pinned memory, and start ``prefetch`` tensors ahead.

    Use it on an accelerator when activations do not fit and each step computes long enough to hide the copies;
    ``seconds_waited`` shows the time that they are not hidden. On a CPU it saves nothing, copies within host memory, and warns.

    Parameters, their views and autocast copies, buffers and the batch stay on the device, because they are held anyway. The
    autocast copy of a frozen parameter cannot be told from an activation, and leaves. Compared with
    ``torch.autograd.graph.save_on_cpu``, it reuses host memory, prefetches, copies views of a tensor once, and raises an
    error for tensors that were changed in place. Where another technique handles the tensors saved inside blocks, only the
    rest leaves.

    It logs, for the last batch: ``bytes_to_host`` and ``bytes_to_device``, ``bytes_held``, the most in host memory, and
    ``seconds_waited``, the time that the computation waited for copies.

    Args:
        min_bytes: the smallest size in bytes of a saved tensor that leaves the device. ``math.inf`` is plain training.
        layers: the blocks, as a dotted path, a pattern or a list of paths, to offload only what is saved inside
            them. None covers the whole ``training_step``.
        prefetch: the number of copies that start back before they are needed. Each takes memory on the device, and 0 waits
            for each copy.
        pin_memory: whether to use pinned host memory on CUDA. Without it, copies are slower and block the computation.

    Raises:
        ValueError: for a value out of range. At setup, if ``layers`` names no stack of blocks, or they are inside a compiled
            module. In the first step, before any weight changes, if no saved tensor has ``min_bytes``.
        RuntimeError: in the backward pass, if a tensor was changed in place after it was saved, as in plain training.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[ActivationOffload(min_bytes=2**22)])

    References:
        Rhu et al. 2016, "vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural Network Design",
        arXiv:1602.08124.
    """

    saves: ClassVar[str] = (
        "device memory of large activations, at the cost of copies that the computation does not hide"
    )
    paper: ClassVar[str] = "Rhu et al. 2016, arXiv:1602.08124 (vDNN)"
    constraints: ClassVar[str] = "needs an accelerator; layers= must not be inside a compiled module"
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"min_bytes": Choice((2**18, 2**20, 2**22)), "prefetch": Choice((1, 2))}, _pointless
    )
    sparse_gradients: ClassVar[bool] = True
    control: ClassVar[Control] = Control("the baseline for the same time, since gradients are bit-identical")
    conflicts: ClassVar[Mapping[str, str]] = {
        "ACTPrecision": "both handle saved tensors, and autograd asks only the inner one"
    }
    needs_automatic_optimization: ClassVar[bool] = False
    needs: ClassVar[Need] = Need.SAVED
    neutral_at: ClassVar[Mapping[str, Any]] = {"min_bytes": math.inf}
    checkpointed: ClassVar[tuple[str, ...]] = ("_steps", "_total")

    def __init__(
        self,
        *,
        min_bytes: Annotated[float, Either(Number(at_least=1), OneOf(math.inf))] = 2**20,
        layers: Layers | None = None,
        prefetch: Annotated[int, Count(at_least=0)] = 1,
        pin_memory: bool = True,
    ) -> None:
        self.min_bytes = min_bytes
        self.layers = layers
        self.prefetch = prefetch
        self.pin_memory = pin_memory

    def _reset(self) -> None:
        self._offloading: Offloading | None = None
        self._inside = False  # whether a pass of the training step is running
        self._steps = 0
        self._total: dict[str, float] = {"bytes_to_host": 0, "bytes_to_device": 0, "seconds_waited": 0.0}
        self._last: dict[str, float] = {**self._total, "bytes_held": 0}
        self._before: dict[str, float] = dict(self._total)

    @override
    def attach(self, session: Session) -> None:
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
            way_out="Compile the blocks themselves, or remove layers=.",
        )
        for block in {id(block): block for block in stack.blocks}.values():
            for name in ("_call_impl", "_compiled_call_impl"):
                call = getattr(block, name, None)
                if call is not None:
                    session.patches.set(block, name, self._within(call))

    def _within(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a block's call so that its saved tensors leave in the training step."""

        @functools.wraps(call)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not self._inside or self._offloading is None:
                return call(*args, **kwargs)
            with self._offloading.hooks():
                return call(*args, **kwargs)

        return wrapped

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        offloading = self._offloading
        assert offloading is not None, "attach creates it"
        offloading.begin(step.module, batch)
        # until a pass has moved something, it may be refused, and nothing is lost
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
                f" step saves is as large, and the largest that could leave has {offloading.largest:,} bytes. Lower min_bytes,"
                " or remove ActivationOffload."
            )
        return output

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        assert self._offloading is not None, "attach creates it"
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
    def report(self) -> dict[str, float | int | Tensor]:
        return dict(self._last)

    @override
    def summary(self) -> str:
        steps = max(self._steps, 1)
        moved, waited = self._total["bytes_to_host"] / steps, self._total["seconds_waited"] / steps
        return f"offloaded {moved / 2**20:,.2f} MiB of activations per batch; waited {waited * 1000:.1f} ms for copies"
