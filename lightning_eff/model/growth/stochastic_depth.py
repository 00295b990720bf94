"""Stochastic depth: each residual block is passed over at random, the deeper the likelier (Huang et al. 2016)."""

import functools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback
from torch import Generator, Tensor, nn
from typing_extensions import override

from lightning_eff._core.batches import num_samples
from lightning_eff._core.blocks import BlockStack
from lightning_eff._core.search_space import Choice, SearchSpace, Survey, Uniform, needs_blocks
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.growth._dropping import Dropping, keep_probabilities
from lightning_eff.model.growth._shallower import Shallower

MODES = ("batch", "sample")


def drop_samples(
    entered: Tensor, left: Tensor, p: float, generator: Generator, *, dim: int, part: tuple[int, int] = (0, 1)
) -> Tensor:
    """``h + (b / p)(f(h) - h)``, with ``b`` of 0 or 1 for each sample, 1 with probability ``p``.

    Args:
        entered: ``h``, what the block was given, of any shape.
        left: ``f(h)``, what it returned, of that shape.
        p: in (0, 1].
        generator: on the CPU.
        dim: of the samples.
        part: the samples are the first's, second's ... equal part of a batch of so many, for all of which is drawn.
    """
    numbers = torch.rand(entered.shape[dim] * part[1], generator=generator, dtype=torch.float32).chunk(part[1])[part[0]]
    dtype = torch.promote_types(entered.dtype, left.dtype)
    weights = (numbers < p).to(entered.device, dtype) / p
    weights = weights.view([-1 if d == dim % entered.ndim else 1 for d in range(entered.ndim)])
    return torch.lerp(entered.to(dtype), left.to(dtype), weights)


def sample_dim(block: nn.Module) -> int:
    """The dimension of the samples in a block's hidden state: 1 where its attention says that it is not the first."""
    attention = [m for m in block.modules() if isinstance(m, nn.MultiheadAttention)]
    return int(any(not m.batch_first for m in attention))


def mean_kept(num_blocks: int, *, drop: float) -> float:
    """How many of ``num_blocks`` blocks a step runs on average: ``sum_l p_l``."""
    return sum(keep_probabilities(1.0 - drop, num_blocks=num_blocks))


def _shallower(technique: "StochasticDepth") -> dict[str, Callback]:
    """As many blocks throughout as are kept on average; where no work is saved, the baseline is the control."""
    if technique.neutral or technique.mode == "sample":
        return {}
    kept = functools.partial(mean_kept, drop=technique.drop)
    return {"mean depth throughout": Shallower(kept=kept, layers=technique.layers, stages=True)}


class StochasticDepth(Dropping):
    """Pass over whole residual blocks at random, with probabilities that stay the same and grow linearly with depth.

    Block ``l`` of ``L`` is kept with ``p_l = 1 - (l/L) drop``. In training a kept block ``h + f(h)`` counts its branch
    ``1/p_l``, so that the expectation over the draws is what the whole block returns. The paper leaves the branch as it is in
    training, and scales it by ``p_l`` in evaluation. Here evaluation is the plain module's: validation, test and prediction
    run all blocks as they are, and a checkpoint means the same without this callback.

    ``mode="batch"`` draws once for an optimizer step, all its micro-batches and all ranks. A dropped block then does no work,
    forward or backward, and gets no gradient. ``mode="sample"`` is the paper's and timm's: each sample has a draw of its own
    in each block, and **saves nothing**, since every block still runs on the whole batch; it regularises, and costs a little.

    A residual network for images has stages of several widths: all stacks of the class that most blocks are of take part,
    ``l`` counts through them, and blocks that change their input's shape are always kept. Whole blocks are dropped, with
    whatever stands in them: a ReLU behind the sum, or a post-norm. In "batch" mode DDP runs with
    ``find_unused_parameters``; and where blocks hand tensors on beside the hidden state (T5's position bias), the first one is
    always kept; where nothing outside the blocks is trained (adapters, freezing), the first of those that train.

    A block must return its input plus something; norms, activations and changes of shape around the sum are allowed. The first
    training step checks this before anything is updated. It also checks that each block feeds the next one, that the loss uses
    no other output of a block by itself, and that nobody reads what a block sets on itself as it runs. A forward hook of your
    own on a dropped block still fires, with the block's input as its output.

    Logged: ``layers_dropped``, the number of blocks that the step passed over (0 in "sample" mode), and ``drop``.

    Args:
        drop: the probability with which the last block is dropped, in [0, 1); 0 is plain training.
        mode: "batch" or "sample".
        layers: the blocks, as paths or patterns (``"block_*"``), of one stack or several; None finds them.

    Raises:
        ValueError: if an argument is out of its range; at setup, if no blocks are found or they are shared, or, in "batch"
            mode, under DDP with ``static_graph=True`` or reentrant checkpointing; on the first batches, if a block cannot be
            skipped, if no block returns its input's shape, or in "sample" mode no dimension of the hidden state is the batch's.

    Sources:
        Huang et al. 2016, arXiv:1603.09382.
    """

    saves: ClassVar[str] = (
        "in mode 'batch', compute of the dropped blocks, forward and backward: about a quarter of all at drop 0.5; in mode"
        " 'sample' nothing"
    )
    paper: ClassVar[str] = "Huang et al. 2016, arXiv:1603.09382"
    constraints: ClassVar[str] = (
        "residual blocks; mode 'batch': DDP without static_graph, and with use_reentrant=False where blocks are checkpointed"
    )
    survey: ClassVar[Survey | None] = Survey("stochastic depth", zhuang="2.1", shen="4.4")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"drop": Uniform(0.05, 0.5), "mode": Choice(MODES)}, needs_blocks
    )
    control: ClassVar[Control] = Control(
        "in mode 'batch' a shallower model with as many FLOPs a step: throughout the first blocks alone, as many as are"
        " kept on average; in mode 'sample' the baseline for as many seconds",
        _shallower,
    )
    conflicts: ClassVar[Mapping[str, str]] = {"ProgressiveLayerDropping": "both say how likely each block is dropped"}
    reshaping: ClassVar[bool] = True

    def __init__(self, drop: float = 0.5, *, mode: str = "batch", layers: str | Sequence[str] | None = None) -> None:
        if not 0.0 <= drop < 1.0:
            raise ValueError(
                f"StochasticDepth(drop={drop}): expected a probability in [0, 1), that with which the last block is"
                " dropped. 0.5 is the paper's; 0 is plain training."
            )
        if mode not in MODES:
            raise ValueError(
                f"StochasticDepth(mode={mode!r}): expected 'batch', which drops a block for a whole step and saves its"
                " work, or 'sample', which draws for each sample and saves nothing."
            )
        self.drop = drop
        self.mode = mode
        self.layers = layers
        self._reset()

    def _reset(self) -> None:
        super()._reset()
        self._batch: tuple[int, ...] = ()
        self._samples: int | None = None  # of the first batch, until a block has been seen to get as many
        self._looked = False

    @property
    @override
    def neutral(self) -> bool:
        return self.drop == 0.0

    @property
    @override
    def skips(self) -> bool:
        return self.mode == "batch"

    @override
    def find(self, session: Session) -> list[BlockStack]:
        return session.stages(self.layers, who="StochasticDepth")

    @override
    def probabilities(self, session: Session, num_blocks: int) -> list[float]:
        return keep_probabilities(1.0 - self.drop, num_blocks=num_blocks)

    @override
    def on_model(self, session: Session) -> None:
        super().on_model(session)
        if self.mode == "sample":
            for number, stack in enumerate(self._stacks):
                stack.mixes[self.name()] = functools.partial(self._mix, session, number, sample_dim(stack.blocks[0]))

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        if self.mode == "batch":
            super().on_batch_start(session, batch, batch_idx)
        else:
            self._batch = (session.trainer.global_step, batch_idx, session.rank)
            if not self._looked and session.working == [self]:  # others may change how many there are
                with suppress(ValueError):  # a batch without tensors
                    self._samples = num_samples(batch)
            self._looked = True

    @override
    def on_blocks_changed(self, session: Session) -> None:
        if self.mode == "batch":
            super().on_blocks_changed(session)

    def _mix(
        self, session: Session, number: int, dim: int, index: int, entered: Tensor, left: Tensor, training: bool
    ) -> Tensor:
        """A block's output with the branch of some samples only; the same ones however often a step runs it."""
        if not training:
            return left
        expected, self._samples, part = self._samples, None, session.part
        expected = None if expected is None else expected // part[1]
        if expected is not None and (entered.ndim <= dim or entered.shape[dim] != expected):
            raise ValueError(
                f"StochasticDepth(mode='sample'): block {index} of {self._stacks[number]} was given a hidden state of shape"
                f" {tuple(entered.shape)}; expected {expected} in dimension {dim}, as many as the batch has samples. Use"
                " mode='batch', which asks for no samples."
            )
        before = sum(stack.active for stack in self._stacks[:number])
        keep = self.probabilities(session, sum(stack.active for stack in self._stacks))
        generator = session.generator(self.name(), *self._batch, number, index)
        return drop_samples(entered, left, keep[before + index], generator, dim=dim, part=part)

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"layers_dropped": self._dropped, "drop": self.drop}

    @override
    def summary(self) -> str:
        if self.mode == "sample":
            return f"samples pass over each block by themselves, of {self._where}; no work saved"
        return f"{self._passed_over / max(self._passes, 1):.1%} of block passes dropped, of {self._where}"
