"""The text that says which optimizer has which parameters."""

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from lightning_eff._core._optim.combined import CombinedOptimizer
from lightning_eff.optim.optimizers._matrices import hidden_matrices
from lightning_eff.optim.optimizers._replacing.kinds import kinds_of


def assignment_text(
    own: str, schedulers: list[str], combined: CombinedOptimizer, module: nn.Module, left: Sequence[Optimizer]
) -> str:
    """One line per group, and the matrices that stay with the module's optimizer."""
    names = {id(p): name for name, p in module.named_parameters()}
    lines = ["ReplaceOptimizer:"]
    of = {id(group): part for part in combined.parts for group in part.param_groups}
    total = sum(p.numel() for group in combined.param_groups for p in group["params"])
    for group, how in zip(combined.param_groups, combined.following, strict=True):
        who = type(of[id(group)]).__name__
        who += f" ({group['algorithm']})" if isinstance(group.get("algorithm"), str) else ""
        held = group["params"]
        origin = combined.origins.param_groups[how.origin]
        full = group.get("initial_lr", group.get("lr"))
        rate = "no learning rate" if full is None else f"learning rate {float(full):g}"
        was = (
            f" ({own} had {float(origin.get('initial_lr', origin['lr'])):g})"
            if not how.settings or how.ratio != 1
            else ""
        )
        matrices, weights = sum(p.ndim > 1 for p in held), sum(p.numel() for p in held)
        lines.append(
            f"  {who}, {rate}{was}{f' under {schedulers[0]}' if schedulers else ''}: {len(held)} tensors"
            f" ({matrices} matrices), {weights:,} weights, {weights / max(total, 1):.1%} of the parameters:"
            f" {_listed([names.get(id(p), '?') for p in held])}"
        )
    kinds = kinds_of(module, hidden_matrices(module)) if left else {}
    by_kind: dict[str, list[str]] = {}
    for p in (p for part in left for group in part.param_groups for p in group["params"] if p.ndim > 1):
        name = names.get(id(p), "?")
        by_kind.setdefault(kinds.get(name, "other"), []).append(name)
    lines += [f"  {own} keeps these matrices ({kind}): {_listed(found)}" for kind, found in by_kind.items()]
    return "\n".join(lines)


def _listed(names: Sequence[str], most: int = 12) -> str:
    """The names; those that differ only in numbers are listed once, with their count."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(".".join("*" if part.isdecimal() else part for part in name.split(".")), []).append(name)
    found = [f"{pattern} ({len(each)})" if len(each) > 1 else each[0] for pattern, each in alike.items()]
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")
