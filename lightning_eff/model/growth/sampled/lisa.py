"""LISA: layerwise importance sampled AdamW, which trains a few random blocks at a time (Pan et al. 2024)."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Alias, Count, Layers
from lightning_eff._core._needs.needs import UNTRIED, Part, Reasons
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, needs_blocks
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.growth._freezing import Freezing


def drawn(num_blocks: int, num_active: int, generator: torch.Generator) -> list[int]:
    """Return ``gamma`` of ``L`` blocks, uniformly without replacement, in order."""
    return sorted(torch.randperm(num_blocks, generator=generator)[:num_active].tolist())


def _pointless(profile: RunProfile) -> str | None:
    return needs_blocks(profile) or (None if profile.memory_bound else "memory limits neither the batch nor the model")


def _same_blocks(technique: Any) -> Mapping[str, "LISA"]:
    if technique.neutral:
        return {}
    return {"same blocks": LISA(technique.num_active, interval=2**40, states=technique.states, layers=technique.layers)}


class LISA(Freezing):
    """Train a few random blocks at a time; parameters outside the blocks always train.

    Every ``interval`` steps, ``num_active`` of the ``L`` blocks are drawn uniformly. They train, with the embedding, the head
    and everything else outside the blocks, and the other blocks are frozen. Over the run every block trains, so the weights
    move at full rank.

    Use it to fine-tune all weights of a large model in about the memory of LoRA. Frozen blocks need no gradients and, with
    ``states="release"``, no optimizer states. The backward pass still runs through them to the embedding, so a step saves
    their weights' gradients, about a third of their compute. A tied embedding trains as part of the head.

    With ``states="release"``, a block that is drawn again starts with new optimizer states. A block that is drawn twice in
    a row keeps them. ``"keep"`` keeps the states of all blocks, so it saves gradients only. Frozen
    parameters have no gradient, so no optimizer changes them by momentum or weight decay.

    Frozen blocks run in training mode. The draw follows from the run's seed and the step, and is the same on all ranks.
    Under DDP, the module is wrapped again at each draw.

    It logs ``first_block``, the index of the first block that trains, and ``parameters_frozen``, the frozen fraction of the
    parameters.

    Args:
        num_active: the number ``gamma`` of blocks that train at a time, less than the number of blocks. None trains all, which
            is plain training. Also accepted as ``lisa_activated_layers``.
        interval: the number ``K`` of optimizer steps between two draws. Also accepted as ``lisa_interval_steps``.
        states: "release" to delete the optimizer states of blocks that are frozen, or "keep".
        layers: the blocks, as dotted paths or patterns (``"block_*"``), of one stack or several. None takes all stacks of the
            most frequent block class.

    Raises:
        ValueError: for a value out of range. At setup, if there are no blocks or not more than ``num_active``, or if they are
            shared or checkpointed with ``use_reentrant=True``.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[LISA(2, interval=20)])

    References:
        Pan et al. 2024, "LISA: Layerwise Importance Sampling for Memory-Efficient Large Language Model Fine-Tuning",
        arXiv:2403.17919.
    """

    saves: ClassVar[str] = "gradients and optimizer states of all but a few blocks"
    paper: ClassVar[str] = "Pan et al. 2024, arXiv:2403.17919"
    constraints: ClassVar[str] = "automatic optimization; blocks not checkpointed with use_reentrant=True"
    refuses: ClassVar[Reasons] = {
        Part.PIPELINE: "the technique draws blocks of the whole stack",
        **dict.fromkeys((Part.SHARD, Part.TENSOR), UNTRIED),
    }
    needs_budget: ClassVar[bool] = False
    stage = None
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"num_active": Choice((1, 2, 4)), "interval": Choice((5, 20, 50))}, _pointless
    )
    control: ClassVar[Control] = Control("the same number of blocks, drawn once for the whole run", _same_blocks)
    conflicts: ClassVar[Mapping[str, str]] = {
        "LayerFreezing": "both set which blocks train",
        "GreedyLayerwise": "both set which blocks train",
        "FixRes": "both set what trains",
        **dict.fromkeys(
            ("AutoProg", "JointSpar"),
            "it may leave out just those blocks that train, and the loss then has no gradient",
        ),
        **dict.fromkeys(
            ("MESA", "Lookahead"), "it averages what trains, so the result would depend on the order of the callbacks"
        ),
    }
    neutral_at: ClassVar[Mapping[str, Any]] = {"num_active": None}

    def __init__(
        self,
        num_active: Annotated[int, Count(), Alias("lisa_activated_layers")] | None = 2,
        *,
        interval: Annotated[int, Count(), Alias("lisa_interval_steps")] = 20,
        states: Literal["release", "keep"] = "release",
        layers: Layers | None = None,
    ) -> None:
        self.num_active = num_active
        self.interval = interval
        self.states: Literal["release", "keep"] = states
        self.layers = layers

    @override
    def plan(self, u: float, num_blocks: int) -> tuple[int, list[int]]:
        assert self.num_active is not None, "it is neutral otherwise"
        period = self.session.trainer.global_step // self.interval
        active = drawn(num_blocks, self.num_active, self.session.generator("LISA", period))
        return 0, [i for i in range(num_blocks) if i not in active]

    @override
    def on_model(self, session: Session) -> None:
        super().on_model(session)
        if session.fitting and self._length <= (self.num_active or 0):
            raise ValueError(
                f"LISA(num_active={self.num_active}): the module has {self._length} blocks, so all of them would always train."
                " Lower num_active, or remove LISA."
            )

    @override
    def _apply(self, session: Session) -> None:
        super()._apply(session)
        if self.states == "keep":
            return
        for optimizer in session.optimizers:
            for p in self._stacks[0].held:
                if p in optimizer.state:
                    del optimizer.state[p]

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        active = [i for i in range(self._length) if i not in self._plan[1]]
        return {"first_block": active[0] if active else -1, "parameters_frozen": self._share}

    @override
    def summary(self) -> str:
        return f"{self._length - len(self._plan[1])} of {self._where} trained at the end"
