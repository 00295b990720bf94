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
#: The group of techniques that no row names, by folder. The first folder that contains the technique counts.
FOLDERS = {
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
    """A technique of the surveys.

    Attributes:
        name: its name in the surveys.
        source: the authors who described it, and the year.
        by: the public classes that implement it. It counts as built as soon as one of them is exported.
        how: the setting to use, or the part of PyTorch or Lightning that implements it.
        absent: the reason why it is left out for good, or an empty text.
    """

    name: str
    source: str
    by: tuple[str, ...] = ()
    how: str = ""
    absent: str = ""
