"""A row of the catalogue, and the groups of rows."""

from dataclasses import dataclass

#: The groups in the surveys' order, each with its title.
GROUPS = {
    "augmentation": "Data augmentation",
    "selection": "Sampling and selection",
    "curriculum": "Curricula",
    "tokens": "Token removal",
    "growth": "Growing and dropping layers",
    "layers": "Layers",
    "initialization": "Initialisation",
    "sparsity": "Sparsity and partial backpropagation",
    "optimizers": "Optimizers",
    "budget": "Batch, schedule, averaging, budget",
    "communication": "Communication",
    "memory": "Memory",
    "precision": "Low precision",
    "parallelism": "Parallelism and systems",
    "adapters": "Parameter-efficient tuning",
    "beside": "Not in the surveys",
}
#: Where a technique stands that no row names: the first part of its module's path that fits, the longest first.
ROOMS = {
    "data.augmentation": "augmentation",
    "data.selection": "selection",
    "data.curriculum": "curriculum",
    "data.tokens": "tokens",
    "data": "selection",
    "model.growth": "growth",
    "model.initialization": "initialization",
    "model.sparsity": "sparsity",
    "model.adapters": "adapters",
    "model": "layers",
    "optim.averaging": "budget",
    "optim": "optimizers",
    "budget": "budget",
    "memory": "memory",
    "precision": "precision",
    "strategies": "parallelism",
}


@dataclass(frozen=True)
class Row:
    """What the surveys name.

    Attributes:
        name: what they call it.
        source: who described it, and when.
        by: the public classes that do it here, or will; it is built as soon as one of them is exported.
        how: the setting that does it, where a class alone does not say it, or what of PyTorch and Lightning does it.
        absent: why it is left out for good; empty where it is not.
    """

    name: str
    source: str
    by: tuple[str, ...] = ()
    how: str = ""
    absent: str = ""
