"""Stochastic depth: skip residual blocks at random, deeper ones more often (Huang et al. 2016)."""

import functools
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal

import torch
from lightning.pytorch import Callback
from torch import Generator, Tensor, nn
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Alias, Fraction, Layers
from lightning_eff._core.batches import num_samples
from lightning_eff._core.blocks import BlockStack
from lightning_eff._core.search_space import Choice, SearchSpace, Uniform, needs_blocks
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.growth._dropping import Dropping, keep_probabilities
from lightning_eff.model.growth._shallower import Shallower


def drop_samples(
    entered: Tensor, left: Tensor, p: float, generator: Generator, *, dim: int, part: tuple[int, int] = (0, 1)
) -> Tensor:
    """Return ``h + (b / p)(f(h) - h)``, where ``b`` is 1 with probability ``p`` and else 0, drawn for each sample.

    Args:
        entered: the block's input ``h``, of any shape.
        left: the block's output ``f(h)``, of the same shape.
        p: in (0, 1].
        generator: on the CPU.
        dim: the dimension of the samples.
        part: (index, count): the samples are one of ``count`` equal parts of a batch; numbers are drawn for the whole
            batch.
    """
    numbers = torch.rand(entered.shape[dim] * part[1], generator=generator, dtype=torch.float32).chunk(part[1])[part[0]]
    dtype = torch.promote_types(entered.dtype, left.dtype)
    weights = (numbers < p).to(entered.device, dtype) / p
    weights = weights.view([-1 if d == dim % entered.ndim else 1 for d in range(entered.ndim)])
    return torch.lerp(entered.to(dtype), left.to(dtype), weights)


def sample_dim(block: nn.Module) -> int:
    """Return the dimension of the samples in a block's hidden state: 1 if its attention is not batch-first, else 0."""
    attention = [m for m in block.modules() if isinstance(m, nn.MultiheadAttention)]
    return int(any(not m.batch_first for m in attention))


def mean_kept(num_blocks: int, *, drop: float) -> float:
    """Return how many of ``num_blocks`` blocks a step runs on average: ``sum_l p_l``."""
    return sum(keep_probabilities(1.0 - drop, num_blocks=num_blocks))


def _shallower(technique: "StochasticDepth") -> dict[str, Callback]:
    """Make the control run: throughout, as many blocks as are kept on average; none in "sample" mode, which saves no work."""
    if technique.neutral or technique.mode == "sample":
        return {}
    kept = functools.partial(mean_kept, drop=technique.drop)
    return {"mean depth throughout": Shallower(kept=kept, layers=technique.layers, stages=True)}


class StochasticDepth(Dropping):
    """Skip whole residual blocks at random, with fixed probabilities that grow linearly with depth.

    Block ``l`` of ``L`` is kept with probability ``p_l = 1 - (l/L) drop``. In training, the residual branch of a kept
    block ``h + f(h)`` is scaled by ``1/p_l``, so the expected output is that of the full block. The paper scales in
    evaluation instead. Here validation, test and prediction run the plain module, and a checkpoint means the same
    without this callback.

    ``mode="batch"`` draws once per optimizer step, for all its micro-batches and ranks. A dropped block does no work,
    forward or backward, and gets no gradient. At ``drop=0.5`` this saves about a quarter of the compute.
    ``mode="sample"`` is the paper's and timm's: every sample has its own draw in each block. It **saves nothing**,
    because every block still runs on the whole batch; it only regularises.

    All stacks of the most frequent block class take part, such as the stages of a ResNet, and ``l`` counts through
    them. Blocks that change their input's shape are always kept. A block is dropped with everything in it, such as a
    ReLU behind the sum or a post-norm. In "batch" mode, DDP runs with ``find_unused_parameters``, and at least one
    block runs in every step: the first one where none is drawn, which its ``p_l`` counts. One block is always kept in
    two cases. Where blocks pass further tensors on (T5's position bias), it is the first block. Where nothing outside
    the blocks is trained (adapters, freezing), it is the first block that trains.

    A block must return its input plus something; norms, activations and changes of shape around the sum are allowed.
    The first training step checks this before anything is updated. It also checks that each block feeds the next one,
    that the loss uses no other output of a block by itself, and that nothing reads attributes that a block sets while
    it runs. A forward hook of your own on a dropped block still fires, with the block's input as its output.

    Logged: ``layers_dropped``, the number of blocks that the step skipped (0 in "sample" mode), and ``drop``.

    Args:
        drop: the probability with which the last block is dropped. 0 is plain training. Also accepted as ``p``,
            ``drop_rate`` and ``drop_path_rate``.
        mode: what a draw holds for. "batch" drops a block for a whole step, and "sample" drops it for single samples.
        layers: the blocks, as dotted paths or patterns (``"block_*"``), of one stack or several. None finds them.

    Raises:
        ValueError: for a value out of range. At setup, if no blocks are found or they are shared; in "batch" mode, also
            under DDP with ``static_graph=True`` or reentrant checkpointing. On the first batches, if a block cannot be
            skipped or every block changes its input's shape; in "sample" mode, also if no dimension of the hidden state
            is the batch's.

    Example:
        >>> trainer = L.Trainer(max_epochs=90, callbacks=[StochasticDepth(drop=0.2)])

    References:
        Huang et al. 2016, "Deep Networks with Stochastic Depth", arXiv:1603.09382.
    """

    saves = (
        "compute of the dropped blocks, forward and backward, in mode 'batch': about a quarter of the total at drop 0.5;"
        " nothing in mode 'sample'"
    )
    paper = "Huang et al. 2016, arXiv:1603.09382"
    constraints = (
        "residual blocks; mode 'batch': DDP without static_graph, and with use_reentrant=False where blocks "
        "are checkpointed"
    )
    search_space = SearchSpace({"drop": Uniform(0.05, 0.5), "mode": Choice(("batch", "sample"))}, needs_blocks)
    control = Control(
        "in mode 'batch' a shallower model with as many FLOPs per step: only the first blocks, as many as are kept on"
        " average; in mode 'sample' the baseline for as many seconds",
        _shallower,
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "ProgressiveLayerDropping": "both set the probability of dropping a block"
    }
    reshaping: ClassVar[bool] = True
    neutral_at: ClassVar[Mapping[str, Any]] = {"drop": 0.0}

    def __init__(
        self,
        drop: Annotated[float, Fraction(below=1), Alias("p"), Alias("drop_rate"), Alias("drop_path_rate")] = 0.5,
        *,
        mode: Literal["batch", "sample"] = "batch",
        layers: Layers | None = None,
    ) -> None:
        self.drop = drop
        self.mode = mode
        self.layers = layers

    def _reset(self) -> None:
        super()._reset()
        self._batch: tuple[int, ...] = ()
        self._samples: int | None = None  # in the first batch, until a block's input was compared with it
        self._looked = False

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
            if not self._looked and session.working == [self]:  # other techniques may change their number
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
        """Drop a block's residual branch for some samples; the same ones if a step runs the block again."""
        if not training:
            return left
        expected, self._samples, part = self._samples, None, session.part
        expected = None if expected is None else expected // part[1]
        if expected is not None and (entered.ndim <= dim or entered.shape[dim] != expected):
            raise ValueError(
                f"StochasticDepth(mode='sample'): block {index} of {self._stacks[number]} got a hidden state of shape"
                f" {tuple(entered.shape)}, without the batch's {expected} samples in dimension {dim}. Use mode='batch',"
                " which needs no samples."
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
            return f"dropped each block for single samples, of {self._where}; no work saved"
        return f"dropped {self._passed_over / max(self._passes, 1):.1%} of block passes, of {self._where}"
