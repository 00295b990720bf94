"""Figures about a module's parameters."""

from dataclasses import dataclass

from torch import nn

from lightning_eff.optim.optimizers._matrices import hidden_matrices


@dataclass(frozen=True)
class Model:
    """Figures about a module's parameters.

    Attributes:
        parameters: numbers that are trained.
        matrices: trained tensors of two dimensions or more.
        hidden: those that are hidden matrices.
        share: of the trained numbers, the fraction in these.
        pretrained: from where its weights were loaded; "" where that is not known.
    """

    parameters: int = 0
    matrices: int = 0
    hidden: int = 0
    share: float = 0.0
    pretrained: str = ""


def looked_at(module: nn.Module | None) -> Model:
    """The figures of a module; those of none without one."""
    if module is None:
        return Model()
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    hidden = [name for name in hidden_matrices(module) if name in trained]
    total = sum(p.numel() for p in trained.values())
    sources = (getattr(getattr(m, "config", None), "_name_or_path", "") for m in module.modules())
    return Model(
        parameters=total,
        matrices=sum(p.ndim > 1 for p in trained.values()),
        hidden=len(hidden),
        share=sum(trained[name].numel() for name in hidden) / max(total, 1),
        pretrained=next((source for source in sources if isinstance(source, str) and source), ""),
    )
