"""Compares a cut module with the whole one before the cut, in one process on one micro-batch."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_eff._core import rng
from lightning_eff._core._stack.chains import Feeding
from lightning_eff._core.blocks import listed, repeated
from lightning_eff._core.steps import silent
from lightning_eff.strategies._pipeline._checks.side_effects import check_sideways
from lightning_eff.strategies._pipeline._checks.splitting import splits
from lightning_eff.strategies._pipeline.evaluation import Through, through
from lightning_eff.strategies._pipeline.layout import Layout
from lightning_eff.strategies._pipeline.logging import Record, Recorder
from lightning_eff.strategies._pipeline.memory import Holdings, holdings, names_of, registered
from lightning_eff.strategies._pipeline.order import SPLIT_BACKWARD
from lightning_eff.strategies._pipeline.runner import left, loss_of
from lightning_eff.strategies._pipeline.shared_state import Step
from lightning_eff.strategies._pipeline.stack import ONE_OUTPUT, Stack
from lightning_eff.strategies._pipeline.streams import Stream
from lightning_eff.strategies._pipeline.view import Pass, learn_origins, uncut
from lightning_eff.strategies._side_outputs.places import Values, detached

_WAY_OUT = (
    "Pass each block everything it needs as arguments, name another stack by layers=, or use pipeline_parallel_size=1."
)


def bypassed(stack: Stack, where: Layout, stage: int, what: str) -> str:
    """Return the message for a stage whose ``what`` depends on more of the earlier blocks than it receives."""
    first, end = where.bounds[stage]
    more = (
        f" The blocks also return tensors at {stack.extra}, which are not sent (T5's position bias). {ONE_OUTPUT}"
        if stack.extra
        else ""
    )
    return (
        f"{stack.who}: with the model cut before block {first} of {stack.path!r}, {what} in stage {stage} (blocks {first}"
        f" to {end - 1}) depends on more results of earlier blocks than the hidden state, and these are on another rank."
        " Typical causes are a skip around the stack (a U-Net), a sum over all hidden states, a hook that collects values"
        f" in a closure, or a sum over self.parameters().{more} {_WAY_OUT}"
    )


def reached(output: Tensor, stop: Collection[Any] = ()) -> set[int]:
    """Return the ids of leaf tensors that get gradients from ``output``, except through the nodes ``stop``."""
    if output.grad_fn is None:
        return {id(output)} if output.requires_grad else set()
    return {id(node.variable) for node in _nodes(output, stop) if hasattr(node, "variable")}


def _nodes(output: Tensor, stop: Collection[Any] = ()) -> Iterator[Any]:
    """Yield every node of the graph of ``output``, except beyond the nodes ``stop``."""
    seen: set[Any] = set()
    todo: list[Any] = [output.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in stop and node not in seen:
            seen.add(node)
            todo.extend(following for following, _ in node.next_functions)
            yield node


def _can_be_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _has_nan(tensor: Tensor) -> bool:
    return _can_be_nan(tensor) and bool(torch.isnan(tensor.detach()).any())


def no_reentrant(who: str, schedule: str) -> str:
    """Return the message for a reentrant checkpoint under a schedule that splits the backward pass."""
    return (
        f"{who}(schedule={schedule!r}): the schedule splits the backward pass, which PyTorch's reentrant checkpoints do not"
        " allow. Use non-reentrant ones (use_reentrant=False; in Hugging Face models gradient_checkpointing_enable("
        "gradient_checkpointing_kwargs={'use_reentrant': False})), or GPipe, 1F1B, Interleaved1F1B or LoopedBFS."
    )


@contextmanager
def valued(parameters: list[nn.Parameter], value: float) -> Iterator[None]:
    """Set all elements of parameters to one value, in the memory of one element, until the context ends."""
    before = [p.data for p in parameters]
    try:
        for p in parameters:
            p.data = torch.full((), value, dtype=p.dtype, device=p.device).expand(p.shape)
        yield
    finally:
        for p, data in zip(parameters, before, strict=True):
            p.data = data


class Verification:
    """The checks of one module.

    Args:
        module: the whole module before the cut.
        step: the user's step.
        batch: one micro-batch.
        divided: whether a batch has several micro-batches.

    Attributes:
        unsplit: stages whose gradients PyTorch's split backward pass does not compute.
    """

    def __init__(
        self,
        module: nn.Module,
        stack: Stack,
        where: Layout,
        step: Step,
        batch: Any,
        *,
        divided: bool = True,
        device: torch.device,
        who: str,
    ) -> None:
        self.module, self.stack, self.where, self.step, self.batch = module, stack, where, step, batch
        self.divided = divided
        self.device, self.who = device, who
        self.unsplit: list[int] = []
        self._received: dict[int, tuple[Tensor, dict[int, Values]]] = {}
        self._spoilt: set[str] = set()
        self.names = {id(p): name for name, p in module.named_parameters()}

    def _stream(self) -> Stream:
        return Stream(0, "verify", 0, 0)

    def _whole(self) -> tuple[Tensor, dict[str, Record], Pass]:
        recorder = Recorder(self.module, who=self.who)
        with rng.fork(), silent(cast("Any", self.module)), torch.enable_grad(), recorder.recorded():
            with uncut(self.stack, self._stream(), learn=True) as run:
                output = self.step(self.batch)
            run.finished()
            self._chained(run.feeding)
            return loss_of(output, who=self.who), recorder.take(), run

    def _chained(self, feeding: Feeding) -> None:
        """Raise ``ValueError`` if a block does not feed the next one."""
        feeding.end()
        apart = next((pair for pair, fed in feeding.links.items() if fed is False), None)
        if apart is not None:
            others = listed([c for c in repeated(self.module) if c.path != self.stack.path])
            raise ValueError(
                f"{self.who}: block {apart[1]} of {self.stack.path!r} is not fed by block {apart[0]}, and a pipeline needs"
                f" blocks that each feed the next one. Name another stack by layers=, or use pipeline_parallel_size=1."
                f" Candidates: {others}."
            )

    def _cut(self) -> tuple[Through, dict[str, Record]]:
        """Run all stages one after the other, with NaN from the blocks that a stage skips."""
        recorder = Recorder(self.module, who=self.who)
        last = self.where.num_stages - 1
        with rng.fork(), torch.enable_grad():
            found = through(
                self.stack,
                self.where,
                self.step,
                self.batch,
                self._stream(),
                group=None,
                device=self.device,
                taint=True,
                grad=True,
                around=lambda s: self._apart(recorder if s == last else Recorder(self.module, who=self.who)),
            )
        return found, recorder.take()

    @contextmanager
    def _apart(self, recorder: Recorder) -> Iterator[None]:
        """Return the context of a pass whose effects are undone, except its logged values and the names of NaN states."""
        with silent(cast("Any", self.module)), recorder.recorded():
            before = self._nan_states()
            yield
            self._spoilt = self._nan_states() - before

    def _nan_states(self) -> set[str]:
        states = dict(self.module.named_buffers())
        for path, metric in self.module.named_modules():
            if isinstance(metric, Metric):
                states |= {
                    f"{path}.{name}": s for name in metric._defaults if isinstance(s := getattr(metric, name), Tensor)
                }
        return {name for name, s in states.items() if _has_nan(s)}

    def run(self) -> tuple[Holdings, Through]:
        """Run all checks.

        Returns:
            The stages that use each parameter, and the shapes between stages.

        Raises:
            ValueError: if the cut would compute something else.
        """
        loss, logs, whole = self._whole()
        with silent(cast("Any", self.module)), torch.enable_grad():
            learn_origins(self.stack, self.step, self.batch, self._stream())
        expected = float(loss.detach())
        if not math.isfinite(expected):
            raise ValueError(
                f"{self.who}: training_step returned a loss of {expected} on the first batch; expected a finite number"
                " to check the pipeline's loss. Correct the model or the batch."
            )
        gradients = reached(loss)
        if self.where.schedule in SPLIT_BACKWARD and any("CheckpointFunction" in node.name() for node in _nodes(loss)):
            raise ValueError(no_reentrant(self.who, self.where.schedule))
        self._nothing_beside(loss, whole)
        del loss, whole
        reaches: dict[int, set[int]] = {}
        found, cut_logs = self._cut()
        for stage, hidden in found.hidden.items():
            self._clean(hidden, stage, "what it hands on")
            reaches[stage] = reached(hidden)
            for value in _tensors(found.beside[stage]):
                self._clean(value, stage, f"{self.stack.beside} of a block")
                reaches[stage] |= reached(value)
        last = self.where.num_stages - 1
        cut_loss = loss_of(found.output, who=self.who)
        self._clean(cut_loss, last, "the loss")
        if self._spoilt:
            what = f"the state {min(self._spoilt)!r}"
            raise ValueError(bypassed(self.stack, self.where, last, what))
        reaches[last] = reached(cut_loss)
        self._equal("the loss", expected, float(cut_loss.detach()), lambda: float(self._whole()[0].detach()))
        for name, record in logs.items():
            if name in cut_logs and isinstance(record.values[-1], int | float | Tensor):
                self._same_log(name, record, cut_logs[name])
        lost = [self.names[key] for key in gradients - set().union(*reaches.values()) if key in self.names]
        if lost:
            raise ValueError(
                f"{self.who}: cut into {self.where.num_stages} stages, these parameters would get no gradient, although in"
                f" the whole model they do: {sorted(lost)[:8]}. They act between the blocks of {self.stack.path!r} on values"
                f" other than the hidden state. {_WAY_OUT}"
            )
        settings = {"divided": self.divided, "who": self.who}
        check_sideways(self.module, self.stack, self.step, self.batch, self._stream(), **settings)
        self._received = {
            stage + 1: (hidden.detach(), {i: detached(values) for i, values in found.beside[stage].items()})
            for stage, hidden in found.hidden.items()
        }
        if self.where.schedule in SPLIT_BACKWARD and self.stack.beside:
            self.unsplit = [*range(self.where.num_stages)]
        elif self.where.schedule in SPLIT_BACKWARD:
            outputs = {**found.hidden, last: cut_loss}
            for s, given in found.received.items():
                with found.passes[s].again(), rng.fork(), silent(cast("Any", self.module)):
                    if not self._splits(outputs[s], given, reaches[s]):
                        self.unsplit.append(s)
            outputs.clear()
        del cut_loss
        found.received.clear()
        found.passes.clear()
        outside = self._used(reaches)
        found.hidden.clear()
        found.beside.clear()
        return holdings(self.module, self.stack, self.where, outside), found

    def _splits(self, output: Tensor, received: Tensor, ids: set[int]) -> bool:
        if not output.requires_grad:
            return True
        return splits(output, received, [p for p in self.module.parameters() if id(p) in ids])

    def _nothing_beside(self, loss: Tensor, whole: Pass) -> None:
        """Raise ``ValueError`` if the uncut loss depends on a stage's blocks through more than is sent."""
        inside = {id(m) for block in self.stack.blocks for m in block.modules()}
        outside = {id(p) for m in self.module.modules() if id(m) not in inside for p in m._parameters.values()}
        for stage, (first, _) in enumerate(self.where.bounds):
            node = whole.entered[first].grad_fn if stage else None
            if node is None:
                continue
            before = {id(p) for block in self.stack.blocks[:first] for p in block.parameters()}
            after = {id(p) for block in self.stack.blocks[first:] for p in block.parameters()}
            sent = {t.grad_fn for t in _tensors({i: whole.beside[i] for i in whole.beside if i < first})}
            found = reached(loss, {node, *sent}) & (before - after - outside)
            if found:
                name = min(self.names[key] for key in found)
                what = f"the loss, by a way that leads to {name!r},"
                raise ValueError(bypassed(self.stack, self.where, stage, what))

    def _clean(self, value: Tensor, stage: int, what: str) -> None:
        if _has_nan(value):
            raise ValueError(bypassed(self.stack, self.where, stage, what))

    def _equal(self, what: str, expected: float, got: float, again: Callable[[], float]) -> None:
        allowed = 4 * torch.finfo(torch.float32).eps * max(1.0, abs(expected))
        if abs(expected - got) <= allowed:
            return
        noise = abs(again() - expected)  # for devices that do not sum in a fixed order
        if abs(expected - got) <= allowed + 4 * noise:
            return
        raise ValueError(
            f"{self.who}: cut into {self.where.num_stages} stages at {self.stack.path!r}, {what} of the first micro-batch"
            f" would be {got!r}; uncut it is {expected!r} (allowed difference {allowed + 4 * noise:.1e}). More than the"
            " hidden state goes between blocks, or from blocks to the loss, such as through a hook, a sum over"
            " self.parameters(), or a number or a dict that blocks set."
            f" {_WAY_OUT}"
        )

    def _same_log(self, name: str, record: Record, cut: Record) -> None:
        def again() -> float:
            return float(self._whole()[1][name].value())

        self._equal(f"the logged {name!r}", float(record.value()), float(cut.value()), again)

    def _used(self, reaches: dict[int, set[int]]) -> dict[str, set[int]]:
        """Return the stages that use each parameter outside the blocks, by its gradient or its value."""
        outside: dict[str, set[int]] = {}
        by_name = {name: registered(self.module, name) for name in names_of(self.module)}
        for stage, ids in reaches.items():
            for name, p in by_name.items():
                if id(p) in ids:
                    outside.setdefault(name, set()).add(stage)
        owned = [
            {id(p) for block in self.stack.blocks[first:end] for p in block.parameters()}
            for first, end in self.where.bounds
        ]
        rest = {
            stage: [n for n, p in by_name.items() if id(p) not in ids | owned[stage] and _can_be_nan(p)]
            for stage, ids in reaches.items()
        }
        for stage, names in rest.items():
            for name in self._matter(stage, names, by_name):
                outside.setdefault(name, set()).add(stage)
        of_blocks = set().union(*owned)
        for name, p in by_name.items():
            if not _can_be_nan(p) and id(p) not in of_blocks:
                outside[name] = set(range(self.where.num_stages))
        return outside

    def _matter(self, stage: int, names: list[str], by_name: dict[str, nn.Parameter]) -> list[str]:
        """Return the parameters of ``names`` whose value changes the stage's hidden state or logs, by bisection."""
        if not names or not self._tainted(stage, [by_name[name] for name in names]):
            return []
        if len(names) == 1:
            return names
        half = len(names) // 2
        return self._matter(stage, names[:half], by_name) + self._matter(stage, names[half:], by_name)

    def _tainted(self, stage: int, parameters: list[nn.Parameter]) -> bool:
        first, end = self.where.bounds[stage]
        recorder = Recorder(self.module, who=self.who)
        received, beside = self._received.get(stage, (None, {}))
        run = Pass(self.stack, first, end, self._stream(), received, beside=beside)
        try:
            with rng.fork(), torch.enable_grad(), self._apart(recorder), valued(parameters, math.nan):
                output, exited = left(run, self.step, self.batch)
                output = output if exited else loss_of(output, who=self.who)
        except Exception:  # the step fails with such values, so it uses them
            return True
        logs = [r.value() for r in recorder.take().values() if isinstance(r.values[-1], int | float | Tensor)]
        # the last stage has the buffers and metrics outside the blocks
        spoilt = bool(self._spoilt) and stage == self.where.num_stages - 1
        given = _tensors(run.beside) if exited else ()
        return spoilt or any(bool(torch.isnan(value.detach()).any()) for value in (output, *logs, *given))


def _tensors(beside: Mapping[int, Values]) -> Iterator[Tensor]:
    """Yield all tensors that blocks left next to their hidden states."""
    for values in beside.values():
        yield from (value for value in values if value is not None)
