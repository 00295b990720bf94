"""What is said of a module some of whose blocks were never trained, since it is another one without the technique."""

from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.utilities import rank_zero_warn


def note(who: str, trained: int, length: int, where: str) -> str:
    """The state of affairs, for people.

    Args:
        who: the technique's name.
        trained: how many blocks at the front were trained.
        length: how many there are.
        where: the blocks, e.g. "12 blocks of 'model.layers'".
    """
    return (
        f"{who}: the first {trained} of the {where or f'{length} blocks'} were trained, and the others have their first"
        f" weights. Loaded without {who} in the Trainer, the module runs all {length}, and is another one than was trained"
        " and validated"
    )


def warn_at_the_end(short: str, *, finish: bool = True) -> None:
    """Warn that a fit left such a module; ``short`` is its :func:`note`, ``finish`` whether there is such an argument."""
    mend = " or train with finish='identity', which leaves a plain module that is right." if finish else " or train on."
    rank_zero_warn(
        f"The fit ended before all blocks ran. {short}. Evaluate it with this callback in the Trainer, go on from a"
        f" checkpoint, load the weights into a module built with as many blocks as were trained,{mend}"
    )


def warn_in_a_checkpoint(short: str, key: str, *, finish: bool = True) -> None:
    """Warn, the first time in a run, that a checkpoint holds such a module."""
    mend = ", or train with finish='identity', with which checkpoints are right everywhere" if finish else ""
    rank_zero_warn(
        f"A checkpoint is saved in mid-growth. {short}. Resume from it or evaluate it with this callback in the Trainer{mend}."
        f" The checkpoint says so under ['callbacks'][{key!r}]['note']. Later checkpoints are not warned of.",
        category=PossibleUserWarning,
    )
