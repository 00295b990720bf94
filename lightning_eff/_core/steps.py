"""The step chain: one wrapper around the instance's ``training_step``, to which techniques add links at named stages."""

import functools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol

import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_eff._core import rng
from lightning_eff._core._run._muting.null_loggers import unlogged
from lightning_eff._core._stack.walking import modules_of
from lightning_eff._core.batches import num_samples, select
from lightning_eff._core.patches import Patches

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


class Stage(IntEnum):
    """The stage at which a link acts. Smaller stages wrap larger ones, whatever the order of the callbacks."""

    JOIN = 0  #: join several batches of the loader
    AUGMENT = 1  #: change samples one by one, as a data set would
    MIX = 2  #: mix samples and their targets, before samples are scored and chosen
    CHOOSE = 3  #: choose samples
    TRANSFORM = 4  #: change the batch: length, resolution, tokens
    PERTURB = 5  #: run with other weights
    REWEIGHT = 6  #: change the loss
    MEASURE = 7  #: observe the pass and its gradients
    SAVE = 8  #: decide which tensors are kept for the backward pass


_ALL_STAGES = tuple(Stage)
_LOOKING: ContextVar[bool] = ContextVar("looking", default=False)
_SMALL = 64  # containers with more items are not searched for nested containers


@contextmanager
def looking_on() -> Iterator[None]:
    """Mark forward passes as observations, even within a training pass, so that code that counts calls ignores them."""
    token = _LOOKING.set(True)
    try:
        yield
    finally:
        _LOOKING.reset(token)


def looking() -> bool:
    """Return whether an observation pass is running, as in :meth:`Step.forward_only`, also within a training pass."""
    return _LOOKING.get()


Proceed = Callable[[Any], Any]
Around = Callable[[Proceed, Any], Any]


class Link(Protocol):
    """One technique's part of a training step."""

    def __call__(self, step: "Step", batch: Any, proceed: Proceed) -> Any:
        """Return the output of ``training_step``; ``proceed(batch)`` runs the rest of the chain."""
        ...


@dataclass
class Cost:
    """The cost of a run's extra passes, beyond one forward and backward pass per plain step."""

    forward_passes: int = 0
    forward_samples: int = 0
    backward_passes: int = 0
    seconds: float = 0.0

    def add(self, batch: Any, *, forward: int = 1, backward: int = 0, since: float | None = None) -> None:
        """Count passes.

        Args:
            batch: the batch of each pass, or its number of samples. A batch without tensors has none.
            forward: the number of forward passes.
            backward: the number of backward passes.
            since: the time at which they began, from ``time.perf_counter``; None counts no time.
        """
        self.forward_passes += forward
        self.backward_passes += backward
        with suppress(ValueError):
            self.forward_samples += forward * (batch if isinstance(batch, int) else num_samples(batch))
        if since is not None:
            self.seconds += time.perf_counter() - since

    def state_dict(self) -> dict[str, float]:
        return dict(self.__dict__)

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.__dict__.update(state)


def takes_index(step: Any) -> bool:
    """Return whether a step method has a parameter ``batch_idx``."""
    return is_param_in_hook_signature(step, "batch_idx", min_args=2)


@contextmanager
def in_evaluation(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put each of these modules into evaluation mode, and restore its mode on exit."""
    modes = [(m, m.training) for m in modules]
    try:
        for m, _ in modes:
            m.training = False
        yield
    finally:
        for m, mode in modes:
            m.training = mode


@contextmanager
def silent(
    module: "LightningModule", start: Callable[[], None] | None = None, *, buffers: bool = True
) -> Iterator[None]:
    """Run a pass that leaves no trace: nothing is logged, and the state that :func:`snapshot` covers is restored.

    ``self.log`` is muted, and so are the trainer's loggers, which a module may call directly. The autocast cache is emptied
    before and after the pass, because it could hold weights cast before they changed, or without a graph.

    Args:
        module: the module that runs.
        start: restores the state from which the pass begins, if that is not the current one.
        buffers: restore buffers too; False if the caller does so after reading them.
    """
    put_back = snapshot(module, buffers=buffers)
    if start is not None:
        start()
    muted = Patches()
    muted.set(module, "log", _ignore)
    torch.clear_autocast_cache()
    try:
        with unlogged(module):
            yield
    finally:
        torch.clear_autocast_cache()
        muted.restore()
        put_back()


def snapshot(module: nn.Module, *, buffers: bool = True) -> Callable[[], None]:
    """Return a function that restores buffers, metrics and plain attributes to their present values.

    Plain attributes are the module's own public ones, such as a counter or a list of outputs. Buffers are restored without a
    version bump, because a backward pass through a computation on them may follow.
    """
    namespace = module.__dict__
    attributes = {name: (value, _content(value)) for name, value in namespace.items() if not name.startswith("_")}
    modules = modules_of(module)
    owners = [(m._buffers, dict(m._buffers)) for m in modules] if buffers else []
    held = {id(buffer): buffer for had, _ in owners for buffer in had.values() if buffer is not None}
    values = [(buffer, buffer.detach().clone()) for buffer in held.values()]
    metrics = [(m, _metric_state(m)) for m in modules if isinstance(m, Metric)]

    def put_back() -> None:
        for held, had in owners:
            if held.keys() != had.keys() or any(held[name] is not buffer for name, buffer in had.items()):
                held.clear()
                held.update(had)
        for buffer, value in values:
            buffer.data.copy_(value)
        for metric, state in metrics:
            for name, (value, content) in state.items():
                vars(metric)[name] = value
                _put_back(value, content)
        for name in [name for name in namespace if not name.startswith("_") and name not in attributes]:
            del namespace[name]
        for name, (value, content) in attributes.items():
            namespace[name] = value
            _put_back(value, content)

    return put_back


def _content(value: Any, deep: int = 3) -> Any:
    """Return a copy of a plain container's items and of small containers in it; None for any other value."""
    if not isinstance(value, list | dict | set | deque):
        return None
    inner: list[Any] = []
    if deep and len(value) <= _SMALL:
        inner = [*value.values()] if isinstance(value, dict) else [*value]
    return value.copy(), [(item, content) for item in inner if (content := _content(item, deep - 1)) is not None]


def _put_back(value: Any, content: Any) -> None:
    """Restore the ``content`` of a container, or the value of a tensor."""
    if content is None:
        return
    if isinstance(value, Tensor):
        value.data.copy_(content)
        return
    held, inner = content
    if isinstance(value, list):
        value[:] = held
    else:
        value.clear()
        value.extend(held) if isinstance(value, deque) else value.update(held)
    for item, its in inner:
        _put_back(item, its)


def _metric_state(metric: Metric) -> dict[str, tuple[Any, Any]]:
    """Return a metric's states, which metrics of a collection may share, and its counters."""
    states = {name: getattr(metric, name) for name in metric._defaults}
    kept = {name: (s, s.detach().clone() if isinstance(s, Tensor) else _content(s)) for name, s in states.items()}
    own = ("_update_count", "_computed", "_forward_cache")
    return {**kept, **{name: (metric.__dict__[name], None) for name in own if name in metric.__dict__}}


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Replace ``LightningModule.log`` in a silent pass."""


class TakesDerivatives(ValueError, RuntimeError):
    """The user's step computes derivatives itself in a pass without a graph. A ``RuntimeError``, like torch's own error."""


@dataclass
class Step:
    """One call of ``training_step``, as its links see it.

    Attributes:
        chain: the chain that runs.
        module: the LightningModule.
        rest: the arguments of ``training_step`` after the batch: the batch's index, if any.
        batch_idx: the index of the batch in its epoch.
        global_step: the number of optimizer steps before this one.
        indices: the data set indices of the samples in the links' batch, if known.
        around: set by a link to wrap the user's own step, inside all links, in each pass of the training chain.
            ``around(run, batch)`` returns the step's output, and ``run(batch)`` runs it.
        given: the last batch that the user's own step received, behind all links.
        versions: how many versions of each sample a link has concatenated in the batch, all unchanged ones first.
        asking: the link that runs now, or the name of the technique that runs the step outside of training.
        seen: in a pipeline, called with the output of the user's step on each micro-batch, before its backward pass.
    """

    chain: "StepChain"
    module: "LightningModule"
    rest: tuple[Any, ...]
    batch_idx: int
    global_step: int
    indices: list[Any] | None = None
    around: Around | None = None
    given: Any = None
    versions: int = 1
    asking: "Link | str | None" = None
    seen: list[Callable[[Any], None]] = field(default_factory=list)

    def pick(self, batch: Any, index: Tensor, size: int) -> Any:
        """Select the samples ``index`` of ``batch`` (``size`` samples) and their data set indices for the rest of the chain."""
        if self.indices is not None and len(self.indices) == size:
            self.indices = [self.indices[i] for i in index.tolist()]
        return select(batch, index, size)

    def forward_only(self, batch: Any, size: int, around: Around | None = None, *, transform: bool = True) -> Any:
        """Run the user's step on ``batch`` of ``size`` samples for its loss only, inside ``around`` if given.

        The pass keeps no graph, logs nothing, and does not change buffers, metrics or the global random state. The batch
        passes through the links that transform it (unless ``transform`` is False), not through those that choose or perturb.
        The cost is counted.

        Raises:
            ValueError: if the user's step computes derivatives itself, which needs the graph.
        """
        stages = (Stage.TRANSFORM,) if transform else ()
        start = time.perf_counter()
        with torch.no_grad(), rng.fork(), silent(self.module), looking_on():
            try:
                output = self.chain.call(self, batch, stages=stages, around=lambda: around, looks=True)
            except RuntimeError as error:
                self._explain(error)
                raise
        self.chain.cost.add(size, since=start)
        return output

    def _explain(self, error: RuntimeError) -> None:
        """Raise ``ValueError`` if ``error`` is torch's error for a derivative without a graph."""
        if "does not require grad" not in str(error):
            return
        owner = getattr(self.asking, "__self__", None)
        who = self.asking if isinstance(self.asking, str) else getattr(owner, "who", type(owner).__name__)
        raise TakesDerivatives(
            f"{who}: {type(self.module).__name__}.training_step takes derivatives by itself, which a pass for the loss alone"
            f" cannot do, because it keeps no graph. Remove {who}."
        ) from error

    def gradients(
        self, batch: Any, size: int, inputs: Sequence[Tensor], *, factor: float = 1.0
    ) -> list[Tensor | None] | None:
        """Return the gradients of the user's step's loss with respect to ``inputs``; weights get no gradients.

        The pass is as in :meth:`forward_only`, plus a backward pass to these tensors, which is counted too. A gradient is None
        if the loss does not depend on the tensor. The result is None if the step skips the batch.

        Args:
            batch: the batch, which contains ``inputs``.
            size: its number of samples.
            inputs: floating-point leaf tensors that require gradients.
            factor: multiplied with the loss, for example a gradient scaler's scale.
        """
        start = time.perf_counter()
        with torch.enable_grad(), rng.fork(), silent(self.module), looking_on():
            output = self.chain.call(self, batch, stages=(Stage.TRANSFORM,))
            loss = output.get("loss") if isinstance(output, Mapping) else output
            found: list[Tensor | None] | None = None
            if loss is not None and not loss.requires_grad:
                found = [None for _ in inputs]
            elif loss is not None:
                found = [*torch.autograd.grad(loss * factor, inputs, allow_unused=True)]
                self.chain.cost.backward_passes += 1
        self.chain.cost.add(size, since=start)
        return found


@dataclass
class StepChain:
    """The links of a run, in the order of their stages, around the original ``training_step``.

    Attributes:
        original: runs the user's step on a batch. In a pipeline, on its micro-batches and with their backward passes.
        look: in a pipeline, runs the user's step on a whole batch, without gradients and on all its ranks at once.
        links: each link with its stage and order.
        cost: the cost of extra passes.
    """

    original: Callable[..., Any]
    look: Callable[..., Any] | None = None
    links: list[tuple[Stage, Link, int]] = field(default_factory=list)
    cost: Cost = field(default_factory=Cost)
    _divided: "tuple[Step, Around | None] | None" = None  # the pass of a pipeline that is under way

    def add(self, stage: Stage, link: Link, order: int = 0) -> None:
        """Add a link. Within a stage a smaller ``order`` is further out; with the same order, the link added first."""
        self.links.append((stage, link, order))
        self.links.sort(key=lambda item: (item[0], item[2]))

    def run(self, step: Step, batch: Any) -> Any:
        """Run the training step: all links, then the user's own step."""
        return self.call(step, batch, stages=_ALL_STAGES, around=lambda: step.around)

    def call(
        self,
        step: Step,
        batch: Any,
        *,
        stages: tuple[Stage, ...],
        around: Callable[[], Around | None] = lambda: None,
        looks: bool = False,
    ) -> Any:
        """Run the user's step on ``batch`` behind the links of ``stages``.

        Args:
            step: the current step.
            batch: the batch.
            stages: the stages whose links run.
            around: returns the wrapper around the user's step, evaluated after the links.
            looks: the pass is for its output only, without gradients.
        """

        def own(batch: Any) -> Any:
            step.given = batch
            return (self.look if looks and self.look is not None else self.original)(batch, *step.rest)

        def divided(batch: Any) -> Any:
            self._divided = step, around()
            try:
                return own(batch)
            finally:
                self._divided = None

        def proceed_from(position: int) -> Proceed:
            def proceed(batch: Any) -> Any:
                for index in range(position, len(self.links)):
                    stage, link, _ = self.links[index]
                    if stage in stages:
                        asked, step.asking = step.asking, link
                        try:
                            return link(step, batch, proceed_from(index + 1))
                        finally:
                            step.asking = asked
                if self.look is not None and not looks:
                    return divided(batch)
                wrapper = around()
                return own(batch) if wrapper is None else wrapper(own, batch)

            return proceed

        return proceed_from(0)(batch)

    def of_parts(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the module's own step in a pipeline, which runs on micro-batches, so that a link's ``around`` applies to it."""

        @functools.wraps(original)
        def training_step(batch: Any, *rest: Any) -> Any:
            if self._divided is None or looking():
                return original(batch, *rest)
            step, wrapper = self._divided
            step.given = batch
            output = original(batch, *rest) if wrapper is None else wrapper(lambda b: original(b, *rest), batch)
            for see in step.seen:
                see(output)
            return output

        return training_step
