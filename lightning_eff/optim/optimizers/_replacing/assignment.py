"""Splits the module's parameter groups by optimizer and learning rate."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_eff._core._optim.combined import CombinedOptimizer
from lightning_eff.optim.optimizers._matrices import hidden_matrices
from lightning_eff.optim.optimizers._replacing.kinds import kinds_of, matches, unmatched


@dataclass(frozen=True)
class Share:
    """Parameters of one of the module's groups with one optimizer and one learning rate.

    Attributes:
        origin: index of the module's group.
        replaced: whether the other optimizer has them.
        rate: their learning rate from ``group_lr``; None uses their optimizer's.
        names: names of the parameters; "?" for a parameter of no module.
        parameters: the parameters in the order of the group.
        exempt: whether the module decays other groups but not this one.
    """

    origin: int
    replaced: bool
    rate: float | None
    names: tuple[str, ...]
    parameters: tuple[Tensor, ...]
    exempt: bool = False


def shares(
    module: nn.Module,
    optimizer: Optimizer,
    parameters: str | Sequence[str] | None,
    group_lr: Mapping[str, float],
) -> list[Share]:
    """Split each of the module's groups by optimizer and learning rate.

    Args:
        module: the complete module.
        optimizer: the module's optimizer.
        parameters: "matrices", "all", or patterns; None without another optimizer.
        group_lr: learning rates by kind or pattern; the first match counts.

    Raises:
        ValueError: if no hidden matrix is trained, or a pattern matches nothing.
    """
    name_of = {id(p): name for name, p in module.named_parameters()}
    matrices = hidden_matrices(module)
    kinds = kinds_of(module, matrices)
    held = [(k, name_of.get(id(p)), p) for k, group in enumerate(optimizer.param_groups) for p in group["params"]]
    known = [name for _, name, _ in held if name is not None]
    for argument, patterns in (("parameters", _patterns(parameters)), ("group_lr", list(group_lr))):
        for pattern in patterns:
            if not any(matches(pattern, name, kinds[name]) for name in known):
                raise unmatched(argument, pattern, kinds, known)
    train = [name for _, name, p in held if name is not None and p.requires_grad]
    if parameters == "matrices" and not any(kinds[name] == "matrix" for name in train):
        present = {kind: sum(kinds[name] == kind for name in train) for kind in sorted({kinds[name] for name in train})}
        frozen = f"; {len(known) - len(train)} others are frozen" if len(train) < len(known) else ""
        raise ValueError(
            f"ReplaceOptimizer(parameters='matrices'): {type(module).__name__} has no hidden matrix among the {len(held)}"
            f" parameters of its {type(optimizer).__name__} ({present}{frozen}). Hidden matrices are weights of linear layers"
            " or convolutions between the first and the last layer. Pass patterns of names such as"
            " parameters=['layers.*.weight'], or parameters='all'."
        )
    decays = [group.get("weight_decay", 0.0) for group in optimizer.param_groups]
    found: dict[tuple[int, bool, float | None], list[tuple[str, Tensor]]] = {}
    for k, name, p in held:
        kind = "vector" if name is None else kinds[name]
        replaced = parameters is not None and (
            parameters == "all"
            or (parameters == "matrices" and kind == "matrix")
            or any(matches(pattern, name, kind) for pattern in _patterns(parameters))
        )
        rate = next((rate for pattern, rate in group_lr.items() if matches(pattern, name, kind)), None)
        found.setdefault((k, replaced, rate), []).append((name or "?", p))
    return [
        Share(
            k,
            replaced,
            rate,
            tuple(name for name, _ in pairs),
            tuple(p for _, p in pairs),
            exempt=not decays[k] and any(decays),
        )
        for (k, replaced, rate), pairs in sorted(found.items(), key=lambda item: (item[0][1], item[0][0]))
    ]


def check_not_taken(
    module: nn.Module,
    whole: CombinedOptimizer,
    ours: Sequence[Optimizer],
    parameters: str | Sequence[str] | None,
    group_lr: Mapping[str, float],
) -> None:
    """Raise ``ValueError`` if another technique's optimizer steps all parameters of a pattern.

    Args:
        module: the complete module.
        whole: all optimizers that step as one.
        ours: the optimizers that the patterns are for.
        parameters: as in :func:`shares`.
        group_lr: as in :func:`shares`.
    """
    others = {id(p): type(part).__name__ for part in whole.parts if part not in ours for p in _parameters_of(part)}
    if not others:
        return
    kinds, own = kinds_of(module, hidden_matrices(module)), {id(p) for part in ours for p in _parameters_of(part)}
    for argument, patterns in (("parameters", _patterns(parameters)), ("group_lr", list(group_lr))):
        for pattern in patterns:
            meant = [(name, p) for name, p in module.named_parameters() if matches(pattern, name, kinds[name])]
            if any(id(p) in own for _, p in meant):
                continue
            name, who = next((name, others[id(p)]) for name, p in meant if id(p) in others)
            raise ValueError(
                f"ReplaceOptimizer({argument}={pattern!r}): another technique's {who} steps {name}, with its own learning rate."
                " Remove the pattern, and set the learning rate in that technique."
            )


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _patterns(parameters: str | Sequence[str] | None) -> list[str]:
    return [] if parameters is None or isinstance(parameters, str) else list(parameters)


def group_of(share: Share, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the module's ``group`` with only the parameters of ``share``."""
    found = {**group, "params": list(share.parameters)}
    if "param_names" in group:
        chosen = {id(p) for p in share.parameters}
        pairs = zip(group["params"], group["param_names"], strict=True)
        found["param_names"] = [name for p, name in pairs if id(p) in chosen]
    return found
