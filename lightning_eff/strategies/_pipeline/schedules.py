"""PyTorch's stages and schedules for micro-batches of given shapes, built when such a batch first comes."""

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
    """For PyTorch's stage: the whole backward pass runs at once, and nothing where the weights' would."""
    return lambda: None


class Schedules:
    """The schedules of one pipeline; those of the last few shapes are kept.

    Stages get the shape of what they receive and send from outside (PyTorch's static metadata): to learn it by itself,
    PyTorch would run ``training_step`` once more for each stage, on numbers that mean nothing.

    Args:
        ground: what the pipeline is cut from.
        course: how far its passes are.

    Attributes:
        uniform: the hidden state has one shape and type from the first block's entry to the last stage's, so that the
            entry tells it without running a block; None while that is not known.
    """

    def __init__(self, ground: Ground, course: Course) -> None:
        self._ground, self._course = ground, course
        self._kept: OrderedDict[Any, tuple[Any, dict[int, Like]]] = OrderedDict()
        self.uniform: bool | None = None

    def clear(self) -> None:
        """Forget all, after one failed in the middle."""
        self._kept.clear()

    def verified(self, found: Through, step: Step, part: Any) -> None:
        """Learn from a run through all stages in this process."""
        self.uniform = set(found.likes.values()) == {self._entering(step, part)}

    def of(
        self,
        name: str,
        step: Step,
        microbatches: list[Any],
        runners: Sequence[StageRunner],
        *,
        unsplit: Collection[int],
    ) -> tuple[Any, dict[int, Like]]:
        """The schedule of that name for these micro-batches, and the shape and type of what leaves each stage.

        Args:
            name: the schedule's.
            step: runs the user's ``training_step`` on a micro-batch.
            microbatches: of the batch.
            runners: this rank's stages.
            unsplit: the stages whose backward pass is not split though the schedule would.
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
        # unscaled: with two stages on a rank, PyTorch would divide gradients outside the blocks twice
        built = cls(stages[0] if one else stages, number, loss_fn=scaled, scale_grads=False)
        self._kept[key] = built, likes
        if len(self._kept) > _KEPT_SHAPES:
            self._kept.popitem(last=False)
        return built, likes

    def _stage(self, runner: StageRunner, likes: dict[int, Like], unsplit: Collection[int]) -> Stage:
        ground = self._ground
        stage, last = runner.stage, ground.layout.num_stages - 1

        def example(like: Like) -> Tensor:
            return torch.empty(like[0], dtype=like[1], device=ground.device).requires_grad_()

        return Stage(
            runner,
            stage,
            ground.layout.num_stages,
            ground.device,
            input_args=() if stage == 0 else (example(likes[stage - 1]),),
            output_args=example(likes[stage]) if stage < last else example(((), torch.float32)),
            group=ground.group,
            dw_builder=_nothing_left if stage in unsplit else None,
        )

    def _stream(self) -> Stream:
        return Stream(self._course.seed, "verify", 0, 0)

    def _entering(self, step: Step, part: Any) -> Like:
        """Shape and type of the hidden state that enters the first block, learnt without running a block."""
        ground = self._ground
        run = Pass(ground.stack, 0, 0, self._stream())
        with rng.fork(), silent(cast("Any", ground.module)), torch.no_grad():
            hidden, _ = left(run, step, part)
        return tuple(hidden.shape), hidden.dtype

    def _likes(self, step: Step, part: Any) -> dict[int, Like]:
        """Shape and type of the hidden states that this rank's stages receive and send."""
        ground = self._ground
        if self.uniform and ground.stack.form is not None:
            return dict.fromkeys(range(ground.layout.num_stages - 1), self._entering(step, part))
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
        """After the first pass of a module that was not verified: nothing bypassed the stages, and are all shapes one."""
        ground = self._ground
        output = found.output.get("loss") if hasattr(found.output, "get") else found.output
        tainted = [
            stage
            for stage, value in (*found.hidden.items(), (ground.layout.num_stages - 1, output))
            if isinstance(value, Tensor) and value.is_floating_point() and bool(torch.isnan(value.detach()).any())
        ]
        told: list[Any] = [None] * dist.get_world_size(ground.group)
        mine = (set(found.likes.values()) | {self._entering(step, part)}, tainted)
        dist.all_gather_object(told, mine, group=ground.group)
        first = min((stage for _, stages in told for stage in stages), default=None)
        if first is not None:
            raise ValueError(bypassed(ground.stack, ground.layout, first, "what it hands on"))
        self.uniform = len(set().union(*(likes for likes, _ in told))) == 1
