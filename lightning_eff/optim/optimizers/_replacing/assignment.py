"""Who steps which parameter at which rate: the module's groups taken apart."""

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
    """Parameters that were in one group of the module's, and have one optimizer and one rate now.

    Attributes:
        origin: index of the module's group.
        replaced: whether the other optimizer has them.
        rate: their own one, from ``group_lr``; None for that of their optimizer.
        names: of the parameters; "?" for one that is not the module's.
        parameters: in the order of the group.
        exempt: the module decays other groups and not this one.
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
    """The module's groups, each in as many shares as it has parameters of different fates.

    Args:
        module: complete.
        optimizer: the module's.
        parameters: "matrices", "all", or patterns; None where no other optimizer is put in.
        group_lr: rates by kind or pattern; the first that matches counts.

    Raises:
        ValueError: where there is no hidden matrix that trains, or a pattern matches nothing.
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
            f" parameters of its {type(optimizer).__name__} ({present}{frozen}); expected weights of linear maps or"
            " convolutions in repeated blocks, or between the first and the last. Name what you mean,"
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
    """Raise ``ValueError`` for a pattern all of whose parameters another technique gave an optimizer of their own.

    Args:
        module: complete.
        whole: all optimizers that step as one.
        ours: those of them that the patterns are for.
        parameters: as in :func:`shares`.
        group_lr: likewise.
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
                f"ReplaceOptimizer({argument}={pattern!r}): {name}, which it means, is stepped by the {who} that another"
                " technique brings for it, at a rate of its own; expected a parameter that is left to the module's optimizer."
                " Leave the pattern out, and give that technique the rate."
            )


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _patterns(parameters: str | Sequence[str] | None) -> list[str]:
    return [] if parameters is None or isinstance(parameters, str) else list(parameters)


def group_of(share: Share, group: Mapping[str, Any]) -> dict[str, Any]:
    """The module's ``group`` with the parameters of ``share`` alone."""
    found = {**group, "params": list(share.parameters)}
    if "param_names" in group:
        chosen = {id(p) for p in share.parameters}
        pairs = zip(group["params"], group["param_names"], strict=True)
        found["param_names"] = [name for p, name in pairs if id(p) in chosen]
    return found
