"""The fastest plan within a memory budget: measure on a real batch, solve, agree over ranks, and store for a resume."""

import re
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from lightning_eff._core import rng
from lightning_eff._core.batches import num_samples
from lightning_eff._core.blocks import BlockStack
from lightning_eff._core.losses import loss_of
from lightning_eff._core.session import Session
from lightning_eff._core.steps import silent, takes_index
from lightning_eff.memory._planning.chain import Item, Keep, Segment, Stage
from lightning_eff.memory._planning.offload_plan import optimal_with_offload, smallest_budget_with_offload
from lightning_eff.memory._planning.plan import Plan, keep_all
from lightning_eff.memory._planning.rotor import optimal, smallest_budget
from lightning_eff.memory._planning.view import amount
from lightning_eff.memory._recompute.profile import Profiler

Hand = Callable[[Profiler], AbstractContextManager[None]]
_UNITS = {"": 1, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_budget(budget: int | float | str) -> int | float:
    """Parse a memory budget into bytes (an int), or a fraction of what storing everything takes (a float).

    Args:
        budget: bytes > 0; ``"8GB"`` (10^9 bytes each) or ``"512MiB"`` (2^20); or a float in (0, 1].

    Raises:
        ValueError: for any other value.
    """
    if isinstance(budget, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([KMGT]?)(i?)B\s*", budget, re.IGNORECASE)
        if match and not (match[3] and not match[2]):
            number = int(
                float(match[1]) * (1024 if match[3] else 1000) ** (_UNITS[match[2].upper()] if match[2] else 0)
            )
            if number > 0:
                return number
    elif isinstance(budget, bool):
        pass
    elif (isinstance(budget, int) and budget > 0) or (isinstance(budget, float) and 0.0 < budget <= 1.0):
        return budget
    raise ValueError(
        f"Rematerialization(memory_budget={budget!r}): expected bytes as an integer > 0, a string, or a float in (0, 1],"
        " the fraction of what storing all activations takes. Write memory_budget=0.5 or memory_budget='8GB'."
    )


def measure(
    session: Session, stack: BlockStack, batch: Any, batch_idx: int, hand: Hand, *, together: bool
) -> tuple[tuple[Stage, ...], int] | None:
    """Measure the blocks that run, in passes of the module's own ``training_step`` without side effects.

    One pass counts bytes, and 3 to 6 measure times, in training mode and in the precision of a training step, without storing
    gradients. Other techniques do not act on the step, and no block is dropped. The cost is counted.

    Args:
        session: the run.
        stack: the blocks.
        batch: a batch of the run, on its device.
        batch_idx: its index.
        hand: a context in which calls of blocks go to the profiler.
        together: whether all ranks measure.

    Returns:
        The chain, and the bytes of the weight copies that autocast makes in the blocks. None if the step skips the batch on
        any rank.
    """
    chain, began = session.chain, time.perf_counter()
    profiler = Profiler(session.module, stack.blocks[: stack.active])
    with_index = takes_index(chain.original)
    while True:
        precision = session.trainer.precision_plugin.train_step_context()
        with hand(profiler), rng.fork(), silent(session.module), precision, profiler.around():
            output = session._evaluation(chain.original)(batch, *((batch_idx,) if with_index else ()))
        skipped = loss_of(output) is None
        if any(session.replicas.everyone(skipped)) if together else skipped:
            return None
        profiler.check_order(stack.path)
        chain.cost.forward_passes += 1
        with suppress(ValueError):  # batches without tensors have no samples to count
            chain.cost.forward_samples += num_samples(batch)
        if profiler.settled(together=session.trainer.world_size > 1):
            break
    chain.cost.seconds += time.perf_counter() - began
    return profiler.stages(stack.path)


def agreed(session: Session, stages: tuple[Stage, ...], casts: int) -> tuple[tuple[Stage, ...], int]:
    """Merge the measurements of all ranks: rank 0's seconds and the largest bytes. Call it on every rank."""
    ranks = session.replicas.everyone(([stage_state(stage) for stage in stages], casts))
    merged: list[Stage] = []
    for rows in zip(*(rows for rows, _ in ranks), strict=True):
        first = rows[0]
        merged.append(Stage(*first[:3], *(max(row[i] for row in rows) for i in range(3, 8)), *first[8:]))
    return tuple(merged), max(casts for _, casts in ranks)


def solve(
    stages: tuple[Stage, ...], casts: int, budget: int | float, *, num_blocks: int, bandwidth: float | None = None
) -> Plan:
    """Return the fastest plan for the chain.

    Args:
        stages: the chain of the blocks that run.
        casts: the bytes of weight copies that the blocks need in addition, which are part of the budget.
        budget: bytes (int), or a fraction (float) of what storing everything takes.
        num_blocks: the final length of the chain, >= its length. A fraction refers to it, with later blocks counted like the
            last one that runs.
        bandwidth: the bytes per second of copies to the host; None keeps everything on the device.

    Raises:
        ValueError: if no plan fits; the message has the smallest possible budget.
    """
    grown = (*stages, *[stages[-1]] * (num_blocks - len(stages)))
    everything = keep_all(grown).peak_bytes + casts * num_blocks // len(stages)
    num_bytes = budget if isinstance(budget, int) else int(budget * everything)
    least = (smallest_budget if bandwidth is None else smallest_budget_with_offload)(stages) + casts
    if num_bytes < least:
        given = (
            amount(num_bytes) if isinstance(budget, int) else f"{budget} of {amount(everything)} = {amount(num_bytes)}"
        )
        raise ValueError(
            f"Rematerialization(policy='optimal', memory_budget={budget!r}): {given} is too little, because"
            f" this batch needs at least {least} bytes ({amount(least)}, {least / everything:.3f} of storing everything). Raise"
            " memory_budget, or use smaller batches."
        )
    if bandwidth is None:
        return optimal(stages, num_bytes - casts)
    return optimal_with_offload(stages, num_bytes - casts, bandwidth)


def tell(plan: Plan, casts: int, path: str) -> None:
    """Log the plan and its predicted memory and time."""
    copies = f" (and {amount(casts)} of autocast's weight copies)" if casts else ""
    everything = keep_all(plan.stages)
    rank_zero_info(
        f"Rematerialization: the plan for the blocks of {path!r} needs {amount(plan.peak_bytes)}{copies} instead of"
        f" {amount(everything.peak_bytes)}, with {plan.total_forward_calls - len(plan.stages)} more forward calls per step and"
        f" {plan.seconds:.3g} s instead of {everything.seconds:.3g} s forward and backward (only the blocks are"
        f" counted).\n{plan.table()}"
    )


# -- as plain containers


def stage_state(stage: Stage) -> list[Any]:
    return list(vars(stage).values())


def item_state(item: Item) -> list[Any]:
    if isinstance(item, Keep):
        return [item.index, item.offload]
    return [item.start, item.end, [item_state(inner) for inner in item.inner], item.offload]


def item_from(state: Sequence[Any]) -> Item:
    if len(state) == 2:
        return Keep(state[0], state[1])
    return Segment(state[0], state[1], tuple(item_from(inner) for inner in state[2]), state[3])


def plan_state(plan: Plan) -> dict[str, Any]:
    """Return a plan as plain containers, which load under ``weights_only=True``."""
    return {
        "stages": [stage_state(stage) for stage in plan.stages],
        "items": [item_state(item) for item in plan.items],
        "budget_bytes": plan.budget_bytes,
        "bandwidth_bytes_per_second": plan.bandwidth_bytes_per_second,
    }


def plan_from(state: dict[str, Any]) -> Plan:
    """Rebuild the plan from :func:`plan_state`."""
    return Plan(
        tuple(Stage(*row) for row in state["stages"]),
        tuple(item_from(item) for item in state["items"]),
        state["budget_bytes"],
        state["bandwidth_bytes_per_second"],
    )
