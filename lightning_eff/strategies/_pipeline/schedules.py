"""PyTorch's stages and schedules, built for the shapes of micro-batches when they first occur."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_eff._core import rng
from lightning_eff._core.steps import silent
from lightning_eff.strategies._pipeline._checks.verify import bypassed
from lightning_eff.strategies._pipeline.batch import signature
from lightning_eff.strategies._pipeline.evaluation import Through, through
from lightning_eff.strategies._pipeline.order import ONE_STAGE, SCHEDULES
from lightning_eff.strategies._pipeline.runner import Stage, StageRunner, left
from lightning_eff.strategies._pipeline.shared_state import Course, Ground, Step
from lightning_eff.strategies._pipeline.stack import Like
from lightning_eff.strategies._pipeline.streams import Stream
from lightning_eff.strategies._pipeline.view import Pass

_KEPT_SHAPES = 4


def _nothing_left() -> Callable[[], None]:
    """Replace the weights' backward pass of PyTorch's stage, if the whole backward pass runs at once."""
    return lambda: None


class Schedules:
    """The schedules of one pipeline, cached for the last few shapes.

    The shapes of hidden states are passed to the stages (PyTorch's static metadata). Otherwise PyTorch would run
    ``training_step`` again on each stage, with meaningless numbers, to find them.

    Args:
        ground: the module and its layout.
        course: the progress of the passes.

    Attributes:
        uniform: whether the hidden state has one shape and type before every stage, and nothing else is sent. The first
            block's input then suffices to find them. None means unknown.
    """

    def __init__(self, ground: Ground, course: Course) -> None:
        self._ground, self._course = ground, course
        self._kept: OrderedDict[Any, tuple[Any, dict[int, tuple[Like, ...]]]] = OrderedDict()
        self.uniform: bool | None = None

    def clear(self) -> None:
        """Clear the cache after a schedule failed."""
        self._kept.clear()

    def verified(self, found: Through, step: Step, part: Any) -> None:
        """Record the shapes of a run through all stages in this process."""
        self.uniform = set(found.likes.values()) == {(self._entering(step, part),)}

    def of(
        self,
        name: str,
        step: Step,
        microbatches: list[Any],
        runners: Sequence[StageRunner],
        *,
        unsplit: Collection[int],
    ) -> tuple[Any, dict[int, tuple[Like, ...]]]:
        """Return the schedule for these micro-batches, and the shapes and types of what each stage sends.

        Args:
            name: name of the schedule.
            step: runs the user's ``training_step`` on a micro-batch.
            microbatches: the micro-batches of a batch.
            runners: this rank's stages.
            unsplit: stages whose backward pass is not split.
        """
        course, number = self._course, len(microbatches)
        modes = tuple(m.training for m in self._ground.module.modules())
        key = (name, number, tuple(sorted(set(map(signature, microbatches)))), modes)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        likes = self._likes(step, microbatches[0])
        stages = [self._stage(runner, likes, unsplit) for runner in runners]

        def scaled(loss: Tensor, target: Tensor) -> Tensor:
            assert course.running is not None
            return loss * course.running.factor(int(target))

        cls = cast("Any", SCHEDULES[name])
        one = name in ONE_STAGE
        # no scaling by PyTorch: with two stages on a rank it would divide gradients outside the blocks twice
        built = cls(stages[0] if one else stages, number, loss_fn=scaled, scale_grads=False)
        self._kept[key] = built, likes
        if len(self._kept) > _KEPT_SHAPES:
            self._kept.popitem(last=False)
        return built, likes

    def _stage(self, runner: StageRunner, likes: dict[int, tuple[Like, ...]], unsplit: Collection[int]) -> Stage:
        ground = self._ground
        stage, last = runner.stage, ground.layout.num_stages - 1

        def example(like: Like) -> Tensor:
            return torch.empty(like[0], dtype=like[1], device=ground.device).requires_grad_()

        return Stage(
            runner,
            stage,
            ground.layout.num_stages,
            ground.device,
            input_args=() if stage == 0 else tuple(map(example, likes[stage - 1])),
            output_args=tuple(map(example, likes[stage])) if stage < last else example(((), torch.float32)),
            group=ground.group,
            dw_builder=_nothing_left if stage in unsplit else None,
        )

    def _stream(self) -> Stream:
        return Stream(self._course.seed, "verify", 0, 0)

    def _entering(self, step: Step, part: Any) -> Like:
        """Find the shape and type of the first block's input without running a block."""
        ground = self._ground
        run = Pass(ground.stack, 0, 0, self._stream())
        with rng.fork(), silent(cast("Any", ground.module)), torch.no_grad():
            hidden, _ = left(run, step, part)
        return tuple(hidden.shape), hidden.dtype

    def _likes(self, step: Step, part: Any) -> dict[int, tuple[Like, ...]]:
        """Find the shapes and types of what this rank's stages receive and send."""
        ground = self._ground
        if self.uniform and ground.stack.form is not None:
            return dict.fromkeys(range(ground.layout.num_stages - 1), (self._entering(step, part),))
        with rng.fork(), silent(cast("Any", ground.module)), torch.enable_grad():
            found = through(
                ground.stack,
                ground.layout,
                step,
                part,
                self._stream(),
                group=ground.group,
                device=ground.device,
                grad=True,
                taint=self.uniform is None,
            )
        if self.uniform is None:
            self._learnt(found, step, part)
        return found.likes

    def _learnt(self, found: Through, step: Step, part: Any) -> None:
        """Check after the first pass of an unverified module that nothing bypasses the stages, and record the shapes."""
        ground = self._ground
        output = found.output.get("loss") if hasattr(found.output, "get") else found.output
        beside = [(stage, t) for stage, left in found.beside.items() for values in left.values() for t in values]
        tainted = [
            stage
            for stage, value in (*found.hidden.items(), *beside, (ground.layout.num_stages - 1, output))
            if isinstance(value, Tensor) and value.is_floating_point() and bool(torch.isnan(value.detach()).any())
        ]
        told: list[Any] = [None] * dist.get_world_size(ground.group)
        mine = (set(found.likes.values()) | {(self._entering(step, part),)}, tainted)
        dist.all_gather_object(told, mine, group=ground.group)
        first = min((stage for _, stages in told for stage in stages), default=None)
        if first is not None:
            raise ValueError(bypassed(ground.stack, ground.layout, first, "its hidden state"))
        self.uniform = len(set().union(*(likes for likes, _ in told))) == 1
