"""The groups of the catalogue."""

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
    "loading": "Data loading",
    "beside": "Not in the surveys",
}
