"""The optimizer's step within the backward pass, so that gradients are never all held (Lv et al. 2023, arXiv:2306.09782)."""

import functools
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, ClassVar

import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_eff._core._lightning.names import is_exactly, is_lightnings, is_overridden
from lightning_eff._core._needs.needs import Need
from lightning_eff._core._optim.combined import CombinedOptimizer
from lightning_eff._core._optim.external_rates import is_watch, look
from lightning_eff._core._run.checks import is_checkpointed_reentrantly
from lightning_eff._core.optimizers import PER_PARAMETER, evaluates_anew, is_per_parameter
from lightning_eff._core.search_space import RunProfile, SearchSpace
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Stage
from lightning_eff._core.technique import Control, OtherWeights, Technique

WHO = "OptimizerInBackward"
_READS_GRADIENTS = ("on_before_zero_grad", "on_after_backward", "on_before_optimizer_step")


def why_held(session: Session, optimizer: Optimizer) -> str:
    """Return what in this run needs all gradients at once, and the way out; empty if nothing does."""
    trainer, module = session.trainer, session.module
    plugin = trainer.strategy.precision_plugin
    if not is_exactly(trainer.strategy, SingleDeviceStrategy):
        return f"{type(trainer.strategy).__name__} exchanges all gradients after the backward pass. Train on one device"
    if trainer.gradient_clip_val and trainer.gradient_clip_algorithm != "value":
        return "clipping by norm needs all gradients. Use gradient_clip_algorithm='value', or do not clip"
    if getattr(plugin, "scaler", None) is not None:
        return "the gradient scaler looks for overflow in all gradients. Use precision='bf16-mixed'"
    if not is_lightnings(type(plugin)):
        return f"{type(plugin).__name__} may use all gradients. Use a precision of Lightning's own"
    for part in _parts(optimizer):
        if not is_per_parameter(part) and not vars(type(part)).get("steps_apart"):  # a subclass may step otherwise
            return f"{type(part).__name__} may step several parameters together. Use one of {', '.join(PER_PARAMETER)}"
    if is_checkpointed_reentrantly(module.modules()):
        return "reentrant checkpointing may add to a gradient several times. Use use_reentrant=False"
    for technique in session.working:
        if isinstance(technique, Technique) and _uses_gradients(technique):
            return f"{type(technique).__name__} may use all gradients, or change weights during a step. Remove it"
    for name in (*_READS_GRADIENTS, "configure_gradient_clipping", "backward"):
        if name in vars(module) or is_overridden(name, module):
            return f"{type(module).__name__}.{name} may read all gradients. Remove this method"
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        known = isinstance(callback, Technique) or is_lightnings(type(callback))
        known = known or getattr(callback, "sparse_gradients", False)
        if not known and any(is_overridden(name, callback, Callback) for name in _READS_GRADIENTS):
            return f"{type(callback).__name__} may read all gradients. Remove it"
    return ""


def _parts(optimizer: Optimizer) -> list[Optimizer]:
    return optimizer.parts if isinstance(optimizer, CombinedOptimizer) else [optimizer]


def _has_hooks(optimizer: Optimizer) -> bool:
    """Whether steps have hooks, other than the one by which learning rates follow each other."""
    own = [hook for one in {optimizer, *_parts(optimizer)} for hook in one._optimizer_step_pre_hooks.values()]
    after = any(one._optimizer_step_post_hooks for one in {optimizer, *_parts(optimizer)})
    return after or any(not is_watch(hook) for hook in own)


def _inner(closure: Any) -> Any:
    """Return the closure that the module passed on to its optimizer, without what precision plugins put around it."""
    return closure.args[-1] if isinstance(closure, functools.partial) and closure.args else closure


def _uses_gradients(technique: Technique) -> bool:
    if isinstance(technique, OptimizerInBackward) or technique.sparse_gradients:
        return False
    if technique.stage is Stage.PERTURB or Need.WHOLE in technique.needs:
        return True
    return Need.PIECES in technique.needs and not isinstance(technique, OtherWeights)


def _pointless(profile: RunProfile) -> str | None:
    return None if profile.memory_bound else "memory limits neither the batch nor the model, and steps become slower"


class _Steps:
    """Steps each parameter of an optimizer as soon as its gradient is complete.

    Attributes:
        optimizer: the optimizer.
        acting: whether the backward pass of an optimizer step is running.
        released_bytes: the bytes of the gradients that were released in the last backward pass.
    """

    def __init__(self, optimizer: Optimizer, clip: float, names: dict[int, str]) -> None:
        self.optimizer, self._clip, self._names = optimizer, clip, names
        self.acting = False
        self.released_bytes = 0
        self._groups: dict[Tensor, tuple[Optimizer, dict[str, Any]]] = {}
        self._done: set[Tensor] = set()
        self._handles: dict[Tensor, RemovableHandle] = {}

    def begin(self) -> None:
        """Prepare for the backward pass of an optimizer step."""
        parts = _parts(self.optimizer)
        self._groups = {p: (part, group) for part in parts for group in part.param_groups for p in group["params"]}
        self._done.clear()
        self.released_bytes = 0
        for p in self._groups:
            if p.requires_grad and p not in self._handles:
                self._handles[p] = p.register_post_accumulate_grad_hook(self._arrived)

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles.values():
            handle.remove()

    def _arrived(self, p: Tensor) -> None:
        if not self.acting or p not in self._groups or p.grad is None:
            return
        if p in self._done:
            raise RuntimeError(
                f"{WHO}: the gradient of {self._names.get(id(p), 'a parameter')} is computed in several parts, but the weight"
                " was updated after the first one. Use use_reentrant=False in torch.utils.checkpoint, and call backward only"
                f" once per step; or remove {WHO}."
            )
        if self._clip:
            torch.nn.utils.clip_grad_value_([p], self._clip)
        self.released_bytes += _bytes(p.grad)
        optimizer, group = self._groups[p]
        groups, params = optimizer.param_groups, group["params"]
        optimizer.param_groups, group["params"] = [group], [p]
        try:
            type(optimizer).step(optimizer)
        finally:
            optimizer.param_groups, group["params"] = groups, params
        p.grad = None
        self._done.add(p)


def _bytes(gradient: Tensor) -> int:
    values = gradient._values() if gradient.is_sparse else gradient
    return values.numel() * values.element_size()


class OptimizerInBackward(Technique):
    """Update each weight as soon as its gradient is complete, and release the gradient at once.

    Plain training holds the gradients of all weights when the backward pass ends: 4 bytes per weight in float32. Here a
    weight's step runs within the backward pass, so only the gradients on their way are held. The weights after each step are
    bit for bit those of the plain optimizer. The optimizer stays the same object, so groups, schedulers and checkpoints do
    not change. A run can be resumed with or without the technique.

    Use it when weights, gradients and optimizer states fill the memory, with large models and small batches. Each parameter
    is stepped by a call of its own, which takes longer than torch's steps over lists of tensors, above all on a GPU.

    Some runs need all gradients at once. They clip by norm, accumulate gradients, have a gradient scaler or several
    processes, or an optimizer with hooks or one that steps parameters together (``SOAP``, ``Muon`` of this package).
    Others have code or techniques that read gradients after the backward pass. Such a run keeps its gradients, trains as
    without the technique, and a warning names the reason. Between steps ``p.grad`` is None.

    It logs ``released_bytes``, the bytes of gradients that the last backward pass released.

    Raises:
        ValueError: at setup, for an optimizer that evaluates the loss again, such as LBFGS, and for manual optimization.
        RuntimeError: in a step, if a weight's gradient is computed in several parts, as by reentrant checkpointing of
            shared weights.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[OptimizerInBackward()])

    References:
        Lv et al. 2023, "Full Parameter Fine-tuning for Large Language Models with Limited Resources", arXiv:2306.09782,
        fuses SGD's step with the backward pass. PyTorch's tutorial "How to save memory by fusing the optimizer step into
        the backward pass" does so for any optimizer.
    """

    saves: ClassVar[str] = "the memory of gradients, 4 bytes per weight in float32; steps take longer"
    paper: ClassVar[str] = "Lv et al. 2023, arXiv:2306.09782"
    constraints: ClassVar[str] = "one device, automatic optimization, no accumulation, and no clipping by norm"
    search_space: ClassVar[SearchSpace | None] = SearchSpace(pointless=_pointless)
    control: ClassVar[Control] = Control("the baseline for the same time, since each step is the plain optimizer's")
    needs_optimizer: ClassVar[bool] = True
    sparse_gradients: ClassVar[bool] = True
    conflicts: ClassVar[Mapping[str, str]] = {
        "OptimizerOffload": "it needs all gradients on the host before the optimizer steps",
        "ScheduleFree": "it runs the optimizer's step at other weights than the backward pass",
    }

    def __init__(self) -> None:
        super().__init__()

    def _reset(self) -> None:
        self._steps: _Steps | None = None
        self._released = 0
        self._stepping = self._warned = False
        self._held: str | None = None  # why gradients are kept; unknown before the first step

    @override
    def on_optimizers(self, session: Session) -> None:
        (optimizer,) = session.optimizers
        if evaluates_anew(optimizer):
            raise ValueError(
                f"{WHO}: {type(optimizer).__name__} evaluates the loss several times per step, but here the weights change"
                f" within the backward pass. Use an optimizer such as AdamW, or remove {WHO}."
            )
        clip = float(session.trainer.gradient_clip_val or 0.0)
        names = {id(p): name for name, p in session.module.named_parameters()}
        steps = self._steps = _Steps(optimizer, clip, names)
        plain = optimizer.step

        @functools.wraps(getattr(plain, "__func__", plain))
        def step(_: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            steps.released_bytes = 0
            if self._keeps(session, optimizer, closure):
                return plain(closure, **kwargs)
            assert closure is not None, "otherwise gradients are kept"
            steps.begin()
            self._stepping = True
            try:
                with torch.enable_grad():
                    loss = closure()
            finally:
                self._stepping = steps.acting = False
            plain(**kwargs)  # parameters whose gradient came in another way; schedulers count this call
            return loss

        session.patches.set(optimizer, "step", MethodType(step, optimizer))
        if clip:
            of_all = session.module.clip_gradients

            def clip_gradients(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
                """Clip what is left, since torch refuses to clip nothing."""
                if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
                    of_all(optimizer, *args, **kwargs)

            session.patches.set(session.module, "clip_gradients", clip_gradients)

    def _keeps(self, session: Session, optimizer: Optimizer, closure: Any) -> bool:
        """Whether this step needs all gradients at once."""
        if self._held:
            return True
        why = ""
        if session.trainer.accumulate_grad_batches != 1:
            why = "gradients are accumulated over several batches. Use accumulate_grad_batches=1 and larger batches"
        elif closure is None:
            why = "the optimizer steps after the backward pass. Pass the closure to optimizer.step in optimizer_step"
        elif not is_lightnings(type(_inner(closure))):
            why = "the module puts code around the closure, which may use them. Pass the closure to optimizer.step as it is"
        elif _has_hooks(optimizer):
            why = f"{type(optimizer).__name__} has step hooks, which may use them. Remove the hooks, or what registers them"
        if why:
            self._warn(why)
        return bool(why)

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            rank_zero_warn(
                f"{WHO}: all gradients are kept, so no memory is saved: {why}.", category=PossibleUserWarning
            )

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Begin to step, since passes before this one belong to other techniques."""
        if self._steps is not None and self._stepping:
            look([self._steps.optimizer], stepping=True)  # learning rates that the module has written
            self._steps.acting = True

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        if self._held is None:  # every technique has changed what it changes
            self._held = why_held(session, session.optimizers[0])
            if self._held:
                self._warn(self._held)

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        if self._steps is not None:
            self._released = self._steps.released_bytes

    @override
    def detach(self, session: Session) -> None:
        if self._steps is not None:
            self._steps.remove()
        self._steps = None

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"released_bytes": self._released}

    @override
    def summary(self) -> str:
        if not self._released:
            return "released no gradient within the last backward pass"
        return f"released {self._released / 2**20:,.2f} MiB of gradients within the last backward pass"
