"""Pipeline parallelism for an unchanged module: each rank runs the user's step with its own blocks.

On a later stage, the received hidden state enters the first owned block. The user's code computes masks, positions and other
arguments from the same micro-batch. The step ends at the block after the stage's last one, and the hidden state is sent. So
only the last stage computes head and loss. This runs as the submodule of PyTorch's ``PipelineStage`` under PyTorch's
schedules.

References:
    GPipe: Huang et al. 2019, arXiv:1811.06965.

    1F1B: Narayanan et al. 2019, arXiv:1806.03377. Interleaving: Narayanan et al. 2021, arXiv:2104.04473.

    Breadth-first: Lamy-Poirier 2022, arXiv:2211.05953. Zero bubble: Qi et al. 2024, arXiv:2401.10241.

    DualPipeV: DeepSeek-AI 2024, arXiv:2412.19437.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torchmetrics import Metric

from lightning_eff._core import rng
from lightning_eff._core._branches.side_by_side import side_by_side
from lightning_eff._core._run.error_text import causes
from lightning_eff._core.batches import num_samples
from lightning_eff._core.blocks import find_stack, refuse_compiled_around
from lightning_eff._core.steps import looking_on, silent
from lightning_eff.strategies._pipeline import layout as layouts
from lightning_eff.strategies._pipeline._checks.module import check_compiled, check_module
from lightning_eff.strategies._pipeline._checks.verify import Verification, no_reentrant
from lightning_eff.strategies._pipeline._everywhere.lent_parameters import Lent
from lightning_eff.strategies._pipeline._everywhere.lockstep import Lockstep
from lightning_eff.strategies._pipeline._everywhere.session_view import Telling
from lightning_eff.strategies._pipeline._everywhere.step_effects import Leavings
from lightning_eff.strategies._pipeline._losses.losses import CutLosses, UncutLosses
from lightning_eff.strategies._pipeline._losses.weights import Given, Weights, tell_of_statistics, weighted
from lightning_eff.strategies._pipeline.batch import check_same, split
from lightning_eff.strategies._pipeline.gradients import SharedGradients
from lightning_eff.strategies._pipeline.logging import Agreement, Recorders, fetched, replay
from lightning_eff.strategies._pipeline.memory import Holdings, free, holdings, only_in_blocks, owners, registered
from lightning_eff.strategies._pipeline.order import SPLIT_BACKWARD, schedule_name
from lightning_eff.strategies._pipeline.runner import StageRunner
from lightning_eff.strategies._pipeline.schedules import Schedules
from lightning_eff.strategies._pipeline.shared_state import Course, Ground, OuterBuffers, OuterParameters, Running, Step
from lightning_eff.strategies._pipeline.stack import Stack
from lightning_eff.strategies._pipeline.streams import Stream
from lightning_eff.strategies._pipeline.view import learn_origins

_CHECKED_PASSES = 2


class Pipeline(Telling):
    """One module over the ranks of a pipeline group.

    ``training_step`` runs once for each micro-batch and each stage of a rank, so a counter in it counts these. Logged values
    are means over micro-batches (or the sum, minimum or maximum of ``reduce_fx``). So ``loss.exp()`` logs the mean of the
    exponentials, which is more than the exponential of the mean loss. Every rank gets the last stage's changes to metrics,
    lists and attributes of the module (see :mod:`._everywhere.step_effects`).

    Args:
        module: the LightningModule, or any module, with the same weights on all ranks.
        layers: the blocks, as a path, a pattern or a list of paths; None finds the longest stack.
        group: the pipeline ranks, in the order of the stages.
        schedule: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble or DualPipeV.
        num_microbatches: number of micro-batches per batch, >= 1, or None; see :func:`.layout.num_microbatches`.
        split: "balanced" (by parameters, with the head on the last stage), or the number of blocks of each stage.
        device: device of the blocks and messages.
        seed: seed of all random numbers in steps, equal on all ranks of the pipeline and of a tensor-parallel group. None
            uses the first pipeline rank's ``torch.initial_seed()``.
        microbatch_weight: function for the weight >= 0 of a micro-batch's loss; None finds it (see :mod:`.weights`).
        who: name of the caller in messages.

    Attributes:
        layout: the assignment of blocks to stages and ranks.
        stages: this rank's stages in order; ``stages[i].blocks`` are the modules of its blocks.
        splits_backward: whether the schedule computes gradients of weights and inputs separately. Parameters must then not
            be resharded after the forward pass.
        unsplit: stages whose backward pass is not split under such a schedule; all of them before the check.
        all_names: keys of the whole module's ``state_dict``.
        owned_names: the keys that this rank saves; every key has one owner.
        all_parameters: first name, shape and type of every parameter of the whole module, in order.

    Raises:
        ValueError: if module, stack, schedule, split or number of micro-batches do not fit together.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        layers: str | Sequence[str] | None,
        group: ProcessGroup,
        schedule: str,
        num_microbatches: int | None,
        split: str | Sequence[int],
        device: torch.device | str,
        seed: int | None = None,
        microbatch_weight: Given | None = None,
        who: str = "HybridParallelStrategy",
    ) -> None:
        self.module, self.group, self.who = module, group, who
        self.device = torch.device(device)
        self.schedule = schedule_name(schedule, who=who)
        self.splits_backward = self.schedule in SPLIT_BACKWARD
        check_module(module, who=who)
        found = find_stack(module, layers, who=who, without=partial(side_by_side, module))
        refuse_compiled_around(module, found.path, who=who, way_out="Compile the blocks one by one (block.compile()).")
        self.stack = Stack(found, module, who=who)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.layout = layouts.layout(
            module,
            self.stack.blocks,
            schedule=self.schedule,
            num_ranks=self.size,
            split=split,
            path=found.path,
            who=who,
        )
        layouts.check_num_microbatches(num_microbatches, self.layout, who=who)
        check_compiled(self.stack, self.schedule, who=who)
        self.num_microbatches = num_microbatches
        self.local_stages = self.layout.stages_of(self.rank)
        self.metrics = [m for m in module.modules() if isinstance(m, Metric)]
        self.holdings: Holdings | None = None
        self.stages: list[StageRunner] = []
        self.all_names = list(module.state_dict())
        self.all_parameters = {n: (tuple(p.shape), p.dtype) for n, p in module.named_parameters()}
        self.owned_names: list[str] = list(self.all_names)
        self.outer_buffers = OuterBuffers(module, self.stack.blocks, self.local_stages)
        agreed = torch.tensor([torch.initial_seed() % 2**62], dtype=torch.int64, device=self.device)
        dist.broadcast(agreed, group_src=0, group=group)
        self._course = Course(seed=int(agreed) if seed is None else seed)
        self._agreement = Agreement(module, group, self.layout.last_rank, self.device)
        self._shared: SharedGradients | None = None
        self._lent: Lent | None = None
        self._leavings: Leavings | None = None
        self.unsplit = [*range(self.layout.num_stages)]
        self._ground = Ground(module, self.stack, self.layout, group, self.device, who)
        self._schedules = Schedules(self._ground, self._course)
        self._weights = Weights(microbatch_weight, who=who)

    # -- setup

    def verify(self, step: Step, batch: Any) -> None:
        """Compare the stages with the whole module on one micro-batch of ``batch``, before :meth:`cut`.

        Every rank runs the whole module, then its stages, without backward passes. So parameters and the activations of one
        micro-batch must fit. Random numbers, buffers, metrics, logs and gradients do not change. The check also finds which
        stage uses which parameters outside the blocks, so that :meth:`cut` can free the others.

        Raises:
            ValueError: if the stages would compute something else.
        """
        parts = self._parts(batch)
        part = parts[0]
        several = self.num_microbatches != 1
        checks = Verification(
            self.module, self.stack, self.layout, step, part, divided=several, device=self.device, who=self.who
        )
        holdings_here, found = checks.run()
        told: list[Any] = [(holdings_here, checks.unsplit)]
        dist.broadcast_object_list(told, group_src=0, group=self.group)
        self.holdings, self.unsplit = told[0]
        if self.unsplit:
            rank_zero_info(
                f"{self.who}(schedule={self.schedule!r}): stages {self.unsplit} do not split their backward pass, because"
                " several blocks use activations with a separate gradient (a conditioning, a router's loss), which"
                " PyTorch's split backward pass does not support. Gradients are right, but the pipeline waits longer."
            )
        self._schedules.verified(found, step, part)
        self._weigh(UncutLosses(self.module, self.stack, step, who=self.who), batch, len(parts))

    def learn(self, step: Step, batch: Any) -> None:
        """Find the weights of micro-batches after :meth:`cut` if :meth:`verify` could not run; on all processes."""
        parts = self._parts(batch)
        with silent(cast("Any", self.module)), torch.enable_grad():
            learn_origins(self.stack, step, parts[0], Stream(self._course.seed, "train", 0, 0))
        kind = {"group": self.group, "device": self.device, "who": self.who}
        losses = CutLosses(self.module, self.stack, step, self.layout, **kind)
        self._weigh(losses, batch, len(parts))

    def _parts(self, batch: Any) -> list[Any]:
        """Split a batch of the usual size. In a resumed run an epoch's smaller last batch can be the first one."""
        size = num_samples(batch)
        number, _ = layouts.num_microbatches(size, self.num_microbatches, self.layout, most=None, who=self.who)
        self._course.most = size
        parts = split(batch, number)
        self._weights.of(parts)  # so that a wrong microbatch_weight fails here
        return parts

    def _weigh(self, losses: UncutLosses, batch: Any, number: int) -> None:
        if self.num_microbatches != 1:
            self._weights.learn(losses, batch, number)
        self._weights.agree()
        tell_of_statistics(self.module, number, num_samples(batch) // number, who=self.who)

    def cut(self) -> None:
        """Free the parameters that this rank does not use, and build its stages.

        The names of other parameters do not change. Without :meth:`verify`, all parameters outside the blocks stay.
        """
        whole = self.holdings or holdings(self.module, self.stack, self.layout, None)
        self.holdings = whole
        mine = [n for n in whole.stages if self.rank in whole.ranks(n, self.layout)]
        keep = {id(registered(self.module, name)) for name in mine}
        owner = owners(self.all_names, self.stack, self.layout, whole)
        self.owned_names = [key for key in self.all_names if owner[key] == self.rank]
        blocks = [self.stack.blocks[slice(*self.layout.bounds[stage])] for stage in self.local_stages]
        owned = [i for stage in self.local_stages for i in range(*self.layout.bounds[stage])]
        outer = [n for n in whole.stages if not only_in_blocks(self.module, n, self.stack)]
        sources = {n: ranks[0] for n in outer if len(ranks := whole.ranks(n, self.layout)) < self.size}
        self._lent = Lent(self._ground, sources, free(self.module, self.stack, owned, keep))
        alone = self.module if len(self.local_stages) == 1 else None
        outside = OuterParameters(self.module, [block for own in blocks for block in own])
        self._leavings = Leavings(self._ground, self.metrics)
        shared = {"buffers": self.outer_buffers, "leavings": self._leavings, "outside": outside}
        self.stages = [
            StageRunner(self._ground, self._course, stage, own, whole=alone, **shared)
            for stage, own in zip(self.local_stages, blocks, strict=True)
        ]
        holders = {
            whole.names[n]: ranks
            for n in whole.stages
            if len(ranks := whole.ranks(n, self.layout)) > 1 and self.rank in ranks
        }
        self._shared = SharedGradients(self.module, holders, self.group)

    @property
    def seed(self) -> int:
        """The seed of all random numbers in steps."""
        return self._course.seed

    @property
    def loss_dtype(self) -> torch.dtype:
        """The dtype of the loss from :meth:`run`: float32, or float64 if the module's parameters have it."""
        double = any(dtype == torch.float64 for _, dtype in self.all_parameters.values())
        return torch.float64 if double else torch.float32

    @property
    def shared(self) -> list[nn.Parameter]:
        """This rank's parameters that other pipeline ranks hold too, whose gradients are summed."""
        return [] if self._shared is None else self._shared.parameters()

    def shared_by_name(self) -> dict[str, nn.Parameter]:
        """Return them by first name in the whole module, including frozen ones."""
        return {} if self._shared is None else self._shared.by_name()

    def reduce_shared(self) -> None:
        """Sum the gradients of :attr:`shared` over the pipeline ranks that hold them; collective."""
        if self._shared is not None:
            self._shared.reduce()

    # -- training

    def run(
        self,
        step: Step,
        batch: Any,
        *,
        accumulate: int = 1,
        scale: float | Tensor = 1.0,
        before_reduce: Callable[[], None] | None = None,
    ) -> Tensor:
        """Run the forward and backward passes of all micro-batches of a batch.

        It adds the gradients of the mean loss over micro-batches, divided by ``accumulate``, to ``p.grad``. The mean is
        weighted if some micro-batches have more tokens that count (see :mod:`.weights`). Gradients of :attr:`shared`
        parameters are summed over the pipeline ranks. All ranks log the step's values.

        Args:
            step: runs the user's ``training_step`` on a micro-batch, in the precision's context.
            batch: the whole batch, the same on all pipeline ranks.
            accumulate: number of batches in an accumulation window, >= 1.
            scale: factor of the loss before the backward passes, from a gradient scaler.
            before_reduce: called between the backward passes and the sum over shared gradients.

        Returns:
            The mean loss, shape (), detached, the same on all pipeline ranks.

        Raises:
            ValueError: if the batch does not divide, ranks have different batches, or a pipeline cannot run the step.
        """
        if not self.stages:
            raise RuntimeError("Pipeline.run: the module is not cut. Call cut() first.")
        self.end_evaluation()
        microbatches, name = self._microbatches(batch)
        course = self._course
        weights = None if self.evenly else self._weights.of(microbatches)
        self.evenly = False
        microbatches = self._weights.defined(microbatches, weights)
        recorders = Recorders(self.module, self.local_stages, who=self.who)
        assert self._leavings is not None
        is_last = self.rank == self.layout.last_rank
        state = rng.capture()
        kept = None if self._shared is None else self._shared.set_aside()
        unsplit = self.unsplit if self.splits_backward else ()
        try:
            with looking_on():
                schedule, likes = self._schedules.of(name, step, microbatches, self.stages, unsplit=unsplit)
            running = Running(step, microbatches, course.passes, scale / accumulate, weights, likes, recorders)
            course.running = running
            if is_last:
                self._leavings.begin()
            self._execute(schedule, running)
        finally:
            course.running, course.part = None, (0, 1)
            rng.restore(state)
        course.passes += 1
        if before_reduce is not None:
            before_reduce()
        self.reduce_shared()
        if self._shared is not None and kept is not None:
            self._shared.put_back(kept)
        records = recorders.take()
        losses = fetched(records, running.losses)
        total = weighted(losses, weights, records) if losses else 0.0
        left = self._leavings.found() if is_last else []
        told = self.numbers_told()
        (loss, any_left, *told), logged = self._agreement.share("train", records, [total, bool(left), *told])
        self.take_numbers(told)
        if any_left:
            self._leavings.share(left)
        replay(self.module, logged)
        return torch.tensor(loss, dtype=self.loss_dtype, device=self.device)

    def _execute(self, schedule: Any, running: Running) -> None:
        number = len(running.microbatches)
        torch_log = logging.getLogger("torch.distributed.pipelining.schedules")
        level = torch_log.level
        torch_log.setLevel(logging.CRITICAL)  # after an error torch would print the whole schedule before its message
        try:
            schedule.step(mb=torch.arange(number), target=torch.arange(number), return_outputs=False)
        except BaseException as error:
            self._schedules.clear()
            failure = running.failure
            if failure is not None and failure is not error:
                raise failure from None  # the user's error, not PyTorch's report of it
            if "use_reentrant" in _chain(error):
                raise RuntimeError(no_reentrant(self.who, self.schedule)) from error
            if str(error).strip().startswith("Failed to run stage") and error.__cause__ is not None:
                raise error.__cause__ from None
            raise
        finally:
            torch_log.setLevel(level)

    def _microbatches(self, batch: Any) -> tuple[list[Any], str]:
        """Return the micro-batches and their schedule, after checking that all pipeline ranks have the same batch."""
        size = num_samples(batch)
        check_same(batch, self.group, self.device, inside=self._course.passes < _CHECKED_PASSES, who=self.who)
        parts, schedule = layouts.num_microbatches(
            size, self.num_microbatches, self.layout, most=self._course.most or None, who=self.who
        )
        self._course.most = max(size, self._course.most)
        return split(batch, parts), schedule

    # -- evaluation

    def evaluate(self, step: Step, batch: Any) -> Any:
        """Run a validation, test or predict step on the whole batch, on all pipeline ranks in lockstep.

        Each rank runs the step's code outside the blocks, so the results, logged values and effects are the same on each.
        """
        inside = self._course.evaluations < _CHECKED_PASSES
        check_same(batch, self.group, self.device, inside=inside, who=self.who)
        stream = Stream(self._course.seed, "evaluate", self._course.evaluations, 0)
        lent = nullcontext() if self._lent is None else self._lent.shown()
        with rng.fork(), lent, Lockstep(self._ground, stream).view():
            output = step(batch)
        self._course.evaluations += 1
        return output

    def look(self, step: Step, batch: Any) -> Any:
        """Run a training step on the whole batch without gradients, on all pipeline ranks in lockstep.

        All passes before one training pass draw the same random numbers.
        """
        self.end_evaluation()
        stream = Stream(self._course.seed, "look", self._course.passes, 0)
        lent = nullcontext() if self._lent is None else self._lent.shown()
        try:
            with rng.fork(), lent, Lockstep(self._ground, stream).view():
                return step(batch)
        finally:
            self.end_evaluation()  # weights can move before the next one

    def end_evaluation(self) -> None:
        """Free the values that other ranks lent to this one."""
        if self._lent is not None:
            self._lent.drop()

    # -- state

    def state_dict(self) -> dict[str, int]:
        """Return the state of random numbers, and the batch size that decides how smaller batches are split."""
        return {name: getattr(self._course, name) for name in ("seed", "passes", "evaluations", "most")}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue the random numbers of the saved run, in any layout."""
        vars(self._course).update({**state, "most": max(state.get("most", 0), self._course.most)})
        self.outer_buffers.forget()


def _chain(error: BaseException | None) -> str:
    """Join the messages of an error and its causes."""
    return " ".join(str(one) for one in causes(error))
