"""The hooks with which the monitor sees a run's steps, passes and phases."""

import functools
import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_eff._core._lightning.names import is_overridden
from lightning_eff._core._samples import counting as samples
from lightning_eff._core.batches import num_samples, num_tokens, tensors
from lightning_eff._core.patches import Patches
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import techniques_of
from lightning_eff.monitor import _counting as counting
from lightning_eff.monitor._held import held_bytes
from lightning_eff.monitor._phases import PHASES, PhaseClock, Seconds
from lightning_eff.monitor._totals import Record, Totals

_COMPILED = "the module is compiled"
_WITHIN = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")


class Watch:
    """Watch one fit, from :meth:`install` to :meth:`remove`.

    Phases come from Lightning's own profiler actions and from ``strategy.backward``. Passes come from a wrapper around the
    module's own ``training_step``, inside the links of all techniques, wherever the monitor is in the list of callbacks.

    Args:
        trainer: the Trainer of the fit.
        module: the LightningModule.
        max_counts: the largest number of kinds of step whose FLOPs are counted.
        activations: whether to count bytes held for the backward pass.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, *, max_counts: int, activations: bool) -> None:
        self.trainer, self.module = trainer, module
        self.max_counts, self.activations = max_counts, activations
        techniques = techniques_of(trainer)
        self.session = techniques[0]._session if techniques else None
        self.device = trainer.strategy.root_device
        self.kinds: dict[Any, counting.Kind] = {}
        self.unknown: set[str] = set()
        self.reason: str | None = None if max_counts else "max_counts=0"
        self.busy = False  # whether another record was active when a kind of step was last counted
        self.counting_seconds = 0.0  # of the counted passes only, on the host
        self.seconds: Seconds = defaultdict(float)
        self.totals = Totals()
        self.running = self.over = False
        self._record = Record()
        self._clock: PhaseClock[Record] | None = None
        self._patches = Patches()
        self._parameters = list(module.parameters())
        self._actions = self._known_actions()
        self._chained = False  # whether the current pass is the training chain's, not a technique's own
        self._calls = 0  # passes of the training chain since the last backward pass
        self._pending: counting.Kind | None = None  # the pass that waits for its backward pass
        self._last: counting.Kind | None = None
        self._counter: counting.Counter | None = None  # of the current pass, if it is counted as a whole
        self._root: torch.Tensor | None = None  # the loss of the pass that waits for its backward pass
        self._apart: list[torch.Tensor] = []  # that pass's batch
        self._held: int | None = None  # of the current pass, with manual optimization
        self._backward_passes = 0

    # -- in and out

    def install(self) -> None:
        trainer, module = self.trainer, self.module
        profiler: Any = trainer.profiler  # pyright: ignore[reportAttributeAccessIssue]
        validation = trainer.fit_loop.epoch_loop.val_loop
        self._patches.set(profiler, "start", self._starting(profiler.start))
        self._patches.set(profiler, "stop", self._stopping(profiler.stop))
        self._patches.set(trainer.strategy, "backward", self._backward(trainer.strategy.backward))
        self._patches.set(validation, "run", self._validating(validation.run))
        if self.session is None:
            self._patches.set(module, "training_step", self._training(module.training_step))
        else:
            self._patches.set(self.session.chain, "original", self._training(self.session.chain.original))
            self.session.chain.add(Stage.REWEIGHT, self._link)  # inside all links that change the loss

    def remove(self) -> None:
        """Undo the patches that are still in place. Other code may have removed some together with its own."""
        self.running = False
        self._patches.restore(ours_alone=True)
        if self.session is not None:
            self.session.chain.links = [item for item in self.session.chain.links if item[1] != self._link]

    def _known_actions(self) -> dict[str, str]:
        """Map Lightning's profiler actions to phases."""
        trainer = self.trainer
        strategy, module = type(trainer.strategy).__name__, type(self.module).__name__
        actions = {
            "run_training_epoch": "begin",
            "[_TrainingEpochLoop].train_dataloader_next": "data",
            f"[Strategy]{strategy}.batch_to_device": "data",
            f"[LightningModule]{module}.on_before_batch_transfer": "data",
            f"[Strategy]{strategy}.training_step": "forward",
            f"[LightningModule]{module}.optimizer_step": "optimizer",
            "optimizer_step": "optimizer",  # with manual optimization
            f"[Strategy]{strategy}.on_train_end": "end",
        }
        for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            for hook in _WITHIN:
                if is_overridden(hook, callback, Callback):
                    actions[f"[Callback]{callback.state_key}.{hook}"] = "other"
        return actions

    # -- phases

    def _starting(self, original: Callable[[str], None]) -> Callable[[str], None]:
        fetch = "[_TrainingEpochLoop].train_dataloader_next"

        def start(action_name: str) -> None:
            phase = self._actions.get(action_name)
            if phase == "begin":
                self._begin()
            elif phase is not None and phase != "end" and self.running:
                assert self._clock is not None
                if action_name == fetch:
                    self._end_step(self._clock.end_step)
                self._clock.enter(phase)
            original(action_name)

        return start

    def _stopping(self, original: Callable[[str], None]) -> Callable[[str], None]:
        def stop(action_name: str) -> None:
            original(action_name)
            phase = self._actions.get(action_name)
            if phase == "end":
                self.end()
            elif phase is not None and phase != "begin" and self.running:
                assert self._clock is not None
                self._clock.leave()

        return stop

    def _validating(self, original: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            if not self.running:
                return original()
            return self._within("validation", original)

        return run

    def _within(self, phase: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        assert self._clock is not None
        self._clock.enter(phase)
        try:
            return fn(*args, **kwargs)
        finally:
            self._clock.leave()

    def _begin(self) -> None:
        """Begin training, unless this is a tuner's trial run, which has other callbacks."""
        awake = any(getattr(c, "watch", None) is self for c in self.trainer.callbacks)  # pyright: ignore[reportAttributeAccessIssue]
        if self.running or self.over or not awake:
            return
        self._backward_passes = self._cost("backward_passes")
        self._clock = PhaseClock(self.device, lambda: self._cost("seconds"), self._take)
        self.running = True

    def _cost(self, name: str) -> Any:
        return getattr(self.session.chain.cost, name) if self.session is not None else 0

    def end(self) -> None:
        """End training."""
        if self.running:
            assert self._clock is not None
            self._end_step(self._clock.stop)
            self.running, self.over = False, True

    def _end_step(self, end: Callable[[Record], None]) -> None:
        if self._pending is not None:  # no backward pass came
            self._record.model += self._pending.forward
        passes, last = self._cost("backward_passes"), self._last
        if last is not None:
            self._record.more += (passes - self._backward_passes) * (last.backward or 0)
        self._backward_passes, self._pending, self._calls = passes, None, 0
        self._root, self._apart = None, []
        record, self._record = self._record, Record()
        end(record)

    def _take(self, record: Record, seconds: Seconds) -> None:
        for phase, value in seconds.items():
            self.seconds["counting" if record.counted and phase != "validation" else phase] += value
        self.totals.add(record, sum(seconds[phase] for phase in PHASES))

    @property
    def counting_now(self) -> bool:
        """Whether the FLOPs of the current batch are counted."""
        return self._record.counted

    def batch(self, batch: Any) -> None:
        """Record the batch that was trained on, as it came from the loader."""
        self._record.batches += 1
        with (
            samples.counting(self.trainer, tensors(batch)),
            suppress(ValueError),
        ):  # batches without tensors
            self._record.samples += num_samples(batch)
            self._record.tokens += num_tokens(batch)

    # -- passes

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        self._chained = True
        try:
            return proceed(batch)
        finally:
            self._chained = False

    def _training(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            if not self.running or not self.trainer.training:
                return original(*args, **kwargs)
            return self._pass(original, args, kwargs)

        training_step.__wrapped__ = inspect.unwrap(original)  # Lightning unwraps only once
        return training_step

    def _pass(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        clock, record = self._clock, self._record
        assert clock is not None
        batch = args[0] if args else None
        training = self.session is None or self._chained
        key = self._key(batch)
        kind = self.kinds.get(key)
        if not training and clock.cuda:
            clock.enter("extra")
        try:
            if kind is None and self._may_count():
                output, kind = self._count(original, args, kwargs, [t for _, t in tensors(batch)])
                if kind is not None:
                    self.kinds[key] = kind
            else:
                output = original(*args, **kwargs)
        finally:
            if not training and clock.cuda:
                clock.leave()
        if not training:
            record.more += kind.forward if kind is not None else 0
            return output
        record.known &= kind is not None
        if self._pending is not None:  # the previous pass was not the one that is trained on
            record.more += self._pending.forward
        self._calls += 1
        if clock.cuda:  # everything from a step's first pass to its last is extra
            clock.mark("extra" if self._calls > 1 else None)
        self._pending, self._last = kind, kind or self._last
        if kind is not None and kind.backward is None:
            self._root, self._apart = _loss(output), [t for _, t in tensors(batch)]
        if kind is not None and not self.module.automatic_optimization:
            record.model += kind.forward + (kind.backward or 0)
            record.more += kind.again
            self._pending = None
        return output

    def _key(self, batch: Any) -> Any:
        shapes = tuple((path, tensor.shape, tensor.dtype) for path, tensor in tensors(batch))
        blocks = self.session.signature() if self.session is not None else ()
        return shapes, blocks, torch.is_grad_enabled(), tuple([p.requires_grad for p in self._parameters])

    def _may_count(self) -> bool:
        if self.reason is None and counting.compiled(self.module):
            by = [type(t).__name__ for t in self.session.working if t.compiles] if self.session is not None else []
            self.reason = f"{by[0]} compiles its blocks. Remove it to count FLOPs" if by else _COMPILED
        return self.reason is None and len(self.kinds) < self.max_counts

    def _count(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], batch: list[torch.Tensor]
    ) -> tuple[Any, counting.Kind | None]:
        start = time.perf_counter()
        manual = not self.module.automatic_optimization
        counter, self._held = counting.Counter(), None
        self._apart = batch
        try:
            with counter:
                self._counter = counter if manual else None
                output = original(*args, **kwargs)
        finally:
            self._counter = None
        flops, self.busy = counter.flops, counter.flops is None
        if flops is None:
            return output, None
        self.unknown |= counter.unknown
        backward = flops["backward"] if manual or not torch.is_grad_enabled() else None
        self._record.counted = True
        self.counting_seconds += time.perf_counter() - start
        return output, counting.Kind(flops["forward"], backward, flops["again"], self._held)

    def _measure(self, loss: torch.Tensor | None) -> int | None:
        """Return the bytes held for the backward pass that begins."""
        if not self.activations or loss is None:
            return None
        apart = [*self.module.parameters(), *self.module.buffers(), *self._apart]
        return held_bytes([loss], apart, self.device)

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if not self.running:
                return original(*args, **kwargs)
            return self._within("backward", self._run_backward, original, args, kwargs)

        return backward

    def _run_backward(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind, self._pending, self._calls = self._pending, None, 0
        loss, self._root = self._root, None
        if self._counter is not None:  # manual optimization, in a pass that is counted as a whole
            held = self._measure(_loss(args[0]) if args else None)
            self._held = held if self._held is None or held is None else max(self._held, held)
            with self._counter.backward():
                return original(*args, **kwargs)
        if kind is None:
            return original(*args, **kwargs)
        if kind.backward is None:
            start = time.perf_counter()
            kind.activation_bytes = self._measure(loss)
            counter = counting.Counter(backward=True)
            with counter:
                output = original(*args, **kwargs)
            if counter.flops is None:
                self._record.known = False
                return output
            kind.backward, kind.again = counter.flops["backward"], counter.flops["again"]
            self.unknown |= counter.unknown
            self._record.counted = True
            self.counting_seconds += time.perf_counter() - start
        else:
            output = original(*args, **kwargs)
        self._record.model += kind.forward + kind.backward
        self._record.more += kind.again
        return output


def _loss(output: Any) -> torch.Tensor | None:
    """Return the loss in the output of a training step."""
    found = output.get("loss") if isinstance(output, Mapping) else output
    return found if isinstance(found, torch.Tensor) else None
