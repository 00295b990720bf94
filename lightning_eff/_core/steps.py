"""The step chain: one wrapper on the instance's ``training_step``, to which each technique adds a link at a stage."""

import functools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from lightning_eff._core.batches import select
from lightning_eff._core.patches import Patches

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


class Stage(IntEnum):
    """Where a link acts; a smaller stage wraps the larger ones, whatever the order of the callbacks."""

    JOIN = 0  #: make one batch of several of the loader's
    AUGMENT = 1  #: change samples one by one, as a data set would
    MIX = 2  #: make samples of several, and targets with them: what chooses samples scores these
    CHOOSE = 3  #: choose samples
    TRANSFORM = 4  #: change the batch: length, resolution, tokens
    PERTURB = 5  #: run at other weights
    REWEIGHT = 6  #: change the loss
    MEASURE = 7  #: look at what the pass computes, and at gradients of it
    SAVE = 8  #: what is kept between forward and backward


_LOOKING: ContextVar[bool] = ContextVar("looking", default=False)
_SMALL = 64  # items of a container in which others are looked for


@contextmanager
def looking_on() -> Iterator[None]:
    """Forward passes within are beside the training pass that they may stand in: what counts its calls passes over them."""
    token = _LOOKING.set(True)
    try:
        yield
    finally:
        _LOOKING.reset(token)


def looking() -> bool:
    """Whether a pass is under way that only looks, as :meth:`Step.forward_only` does, be it within a training pass."""
    return _LOOKING.get()


Proceed = Callable[[Any], Any]
Around = Callable[[Proceed, Any], Any]


class Link(Protocol):
    """One technique's part of a training step."""

    def __call__(self, step: "Step", batch: Any, proceed: Proceed) -> Any:
        """Return what ``training_step`` shall return; ``proceed(batch)`` runs the rest of the chain."""
        ...


@dataclass
class Cost:
    """What the extra passes of a run cost: beyond the one forward and backward pass of each plain step."""

    forward_passes: int = 0
    forward_samples: int = 0
    backward_passes: int = 0
    seconds: float = 0.0

    def state_dict(self) -> dict[str, float]:
        return dict(self.__dict__)

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.__dict__.update(state)


def takes_index(step: Any) -> bool:
    """Whether a step method has a parameter ``batch_idx``."""
    return is_param_in_hook_signature(step, "batch_idx", min_args=2)


@contextmanager
def in_evaluation(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let these modules, one by one, be in evaluation mode; afterwards each is in the mode it was in."""
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
    """Run a pass that leaves no trace: nothing is logged, and what :func:`snapshot` tells of is put back.

    ``self.log`` is muted, and so are the trainer's loggers, which a module may write to by hand.

    The autocast cache is emptied on both ends: it would serve weights cast before they changed, or without a graph.

    Args:
        module: the module that runs.
        start: puts the state back from which the pass begins, where that is not the one at hand.
        buffers: put buffers back too; False where the caller does so, once it has looked at them.
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
    """What sets buffers, metrics and plain attributes back to what they are now.

    Plain attributes are the module's own public ones, such as a counter or a list of outputs. Buffers are put back
    without a version bump, since a backward pass through what was run on them may still come.
    """
    namespace = module.__dict__
    attributes = {name: (value, _content(value)) for name, value in namespace.items() if not name.startswith("_")}
    owners = [(m._buffers, dict(m._buffers)) for m in module.modules() if buffers]
    values = [(buffer, buffer.detach().clone()) for buffer in module.buffers() if buffers]
    metrics = [(m, _metric_state(m)) for m in module.modules() if isinstance(m, Metric)]

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
    """A copy of what a plain container holds, and the contents of small containers in it; None for anything else."""
    if not isinstance(value, list | dict | set | deque):
        return None
    inner: list[Any] = []
    if deep and len(value) <= _SMALL:
        inner = [*value.values()] if isinstance(value, dict) else [*value]
    return value.copy(), [(item, content) for item in inner if (content := _content(item, deep - 1)) is not None]


def _put_back(value: Any, content: Any) -> None:
    """Let a container hold ``content`` again, or a tensor have that value."""
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
    """A metric's states, which others of its collection may share, and how far it is."""
    states = {name: getattr(metric, name) for name in metric._defaults}
    kept = {name: (s, s.detach().clone() if isinstance(s, Tensor) else _content(s)) for name, s in states.items()}
    own = ("_update_count", "_computed", "_forward_cache")
    return {**kept, **{name: (metric.__dict__[name], None) for name in own if name in metric.__dict__}}


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Stands in for ``LightningModule.log`` in a silent pass."""


class TakesDerivatives(ValueError, RuntimeError):
    """The user's step takes derivatives by itself, where a pass keeps no graph: a ``RuntimeError`` as torch's own."""


@dataclass
class Step:
    """One call of ``training_step``, as its links see it.

    Attributes:
        module: the LightningModule.
        rest: what ``training_step`` takes after the batch (the batch's index), if anything.
        batch_idx: the index of the batch in its epoch.
        global_step: optimizer steps done before this one.
        indices: the data set indices of the samples of the batch that the links get, where they are known.
        around: where a link sets it, what stands around the user's own step in each pass of the training chain, inside
            all links: ``around(run, batch)`` returns what the step shall return, and ``run(batch)`` runs it.
        given: the batch that the user's own step was called with last, behind all links.
        versions: how many versions of each sample a link has put one after the other into the batch, all of the plain ones
            first.
        asking: the link that acts at the moment, or the name of the technique that runs the step outside of training.
        seen: in a pipeline, called with what the user's step returns for each micro-batch, before its backward pass.
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
        """The samples ``index`` of ``batch``, which has ``size``: what the rest of the chain trains on, by its indices too."""
        if self.indices is not None and len(self.indices) == size:
            self.indices = [self.indices[i] for i in index.tolist()]
        return select(batch, index, size)

    def forward_only(self, batch: Any, size: int, around: Around | None = None, *, transform: bool = True) -> Any:
        """Run the user's step on ``batch`` of ``size`` samples for its loss alone, inside ``around`` if given.

        No graph, no log, no change to buffers, metrics or the global random state; the batch passes through the links
        that transform it (unless ``transform`` is False), not those that choose or perturb. The cost is counted.

        Raises:
            ValueError: if the user's step takes derivatives by itself, for which it needs the graph.
        """
        stages = (Stage.TRANSFORM,) if transform else ()
        start = time.perf_counter()
        with torch.no_grad(), rng.fork(), silent(self.module), looking_on():
            try:
                output = self.chain.call(self, batch, stages=stages, around=lambda: around, looks=True)
            except RuntimeError as error:
                self._explain(error)
                raise
        self.chain.cost.forward_passes += 1
        self.chain.cost.forward_samples += size
        self.chain.cost.seconds += time.perf_counter() - start
        return output

    def _explain(self, error: RuntimeError) -> None:
        """Raise ``ValueError`` if ``error`` is torch's for a derivative without a graph."""
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
        """The gradients of the user's step's loss on ``batch`` of ``size`` samples in tensors of the batch; weights get none.

        As :meth:`forward_only`, with a backward pass to these tensors, which is counted too. None stands for a tensor that
        the loss does not come of, and for all of them where the step skips the batch.

        Args:
            batch: what holds ``inputs``.
            size: of the batch.
            inputs: leaves of floating point that require gradients.
            factor: what the loss is multiplied with, such as a gradient scaler's.
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
        self.chain.cost.forward_passes += 1
        self.chain.cost.forward_samples += size
        self.chain.cost.seconds += time.perf_counter() - start
        return found


@dataclass
class StepChain:
    """The links of a run, in the order of their stages, around the original ``training_step``.

    Attributes:
        original: runs the user's step on a batch, in a pipeline on its micro-batches and with their backward passes.
        look: of a pipeline: runs the user's step on a whole batch, without gradients and on all its ranks at once.
    """

    original: Callable[..., Any]
    look: Callable[..., Any] | None = None
    links: list[tuple[Stage, Link, int]] = field(default_factory=list)
    cost: Cost = field(default_factory=Cost)
    _divided: "tuple[Step, Around | None] | None" = None  # the pass of a pipeline that is under way

    def add(self, stage: Stage, link: Link, order: int = 0) -> None:
        """Add a link; links of one stage wrap each other by ``order``, the smaller the outer, else in the order they came."""
        self.links.append((stage, link, order))
        self.links.sort(key=lambda item: (item[0], item[2]))

    def run(self, step: Step, batch: Any) -> Any:
        """The training step: all links, then the user's own."""
        return self.call(step, batch, stages=tuple(Stage), around=lambda: step.around)

    def call(
        self,
        step: Step,
        batch: Any,
        *,
        stages: tuple[Stage, ...],
        around: Callable[[], Around | None] = lambda: None,
        looks: bool = False,
    ) -> Any:
        """The user's step on ``batch`` behind the links of ``stages``, inside what ``around()`` is by then.

        Args:
            looks: the pass is for what it returns alone, without gradients.
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
        """The module's own step in a pipeline, which runs on micro-batches: inside what a link put around it."""

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
