"""Loop progress that Lightning saves and cannot go on from, put into the form in which it can.

Lightning 2.6 resumes exactly from a checkpoint saved as a batch ended. Two other moments lose count: the end of an epoch,
if it resumes under ``max_steps`` (a batch of the finished epoch is trained again), and a run that ``max_steps`` stopped in
mid-epoch (the epoch counts as complete). Both are rewritten, in memory, as if saved when the last batch ended.
"""

from typing import Any


def mend_loops(checkpoint: dict[str, Any], *, by_steps: bool) -> None:
    """Rewrite the fit loop's progress in ``checkpoint``, in place, where resuming from it would lose count.

    Args:
        checkpoint: what Lightning saved.
        by_steps: the resuming trainer has ``max_steps``.
    """
    fit = checkpoint.get("loops", {}).get("fit_loop")
    if fit is None:
        return
    epoch, batch = fit["epoch_progress"], fit["epoch_loop.batch_progress"]
    now = batch["current"]
    ended_with_batch = now["ready"] == now["started"] == now["processed"] == now["completed"] > 0
    epoch_processed = epoch["current"]["processed"] == epoch["current"]["started"]
    if not (ended_with_batch and epoch_processed):
        return
    if batch["is_last_batch"] and not by_steps:
        return
    for counts in (batch["total"], batch["current"]):
        counts["completed"] -= 1
    for counts in (epoch["total"], epoch["current"]):
        counts["processed"] -= 1
        counts["completed"] = counts["processed"]
    loop = fit["epoch_loop.state_dict"]
    if "_batches_that_stepped" in loop:  # counted again when Lightning completes the batch
        loop["_batches_that_stepped"] -= 1
