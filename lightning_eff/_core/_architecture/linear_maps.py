"""The linear maps of a module: which there are, and which of them a technique may put something in the place of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from lightning_eff._core._architecture.naming import meets, nearest
from lightning_eff._core._architecture.stand_ins import stands_in


@dataclass(frozen=True)
class LinearMap:
    """A submodule that computes ``x W^T + b``.

    Attributes:
        path: dotted, in the LightningModule.
        module: ``nn.Linear``, or Hugging Face's ``Conv1D``, whose parameter is ``W^T``.
        in_features: K, of ``x``.
        out_features: N, of the result.
        transposed: the parameter is (K, N) and not (N, K).
    """

    path: str
    module: nn.Module
    in_features: int
    out_features: int
    transposed: bool

    def __str__(self) -> str:
        return f"{self.path} ({self.in_features} to {self.out_features})"


def linear_maps(module: nn.Module) -> list[LinearMap]:
    """All ``nn.Linear`` and Hugging Face ``Conv1D`` in ``module``, in its own order, each once."""
    found: list[LinearMap] = []
    for path, m in module.named_modules():
        if stands_in(m):
            continue  # the layers that it is made of are listed
        if isinstance(m, nn.Linear):
            found.append(LinearMap(path, m, m.in_features, m.out_features, transposed=False))
        elif is_conv1d(m):
            k, n = m.weight.shape  # pyright: ignore[reportCallIssue, reportGeneralTypeIssues] -- Conv1D's own layout
            found.append(LinearMap(path, m, int(k), int(n), transposed=True))
    return found


def is_conv1d(m: nn.Module) -> bool:
    """Whether ``m`` is transformers' ``Conv1D``, GPT-2's linear map with a weight of shape (in, out), or a copy of it."""
    named = any(c.__name__ == "Conv1D" for c in type(m).__mro__)
    return named and isinstance(getattr(m, "nf", None), int) and hasattr(m, "nx")


def forward_with(m: nn.Module, plain: type[nn.Module], values: Mapping[str, Any], args: Any, kwargs: Any) -> Any:
    """Call ``plain.forward`` of ``m`` with ``values``, by name, in place of its parameters."""
    held: dict[str, Any] = m._parameters
    before, nf = {name: held[name] for name in values}, m.__dict__.get("nf")
    held.update(values)
    if is_conv1d(m):
        m.__dict__["nf"] = held["weight"].shape[1]
    try:
        return plain.forward(m, *args, **kwargs)
    finally:
        held.update(before)
        if is_conv1d(m):
            m.__dict__["nf"] = nf


def unfit(m: LinearMap) -> str | None:
    """Why this map's ``forward`` is not the place to act, or None where it is."""
    if isinstance(m.module, NonDynamicallyQuantizableLinear):
        return "its weight is used by nn.MultiheadAttention, which does not call it"
    if isinstance(m.module, nn.Linear) and type(m.module).forward is not nn.Linear.forward:
        return "a subclass of nn.Linear with a forward of its own"
    return None


def choose(module: nn.Module, names: Sequence[str] | None, *, who: str) -> tuple[list[LinearMap], dict[str, str]]:
    """The linear maps that a technique shall act on, and what is left alone with the reason.

    Args:
        module: the module tree.
        names: patterns of dotted paths or of their last part, such as ``"q_proj"`` or ``"layers.*.mlp.*"``; None takes all
            but those that share a weight with another module.
        who: the technique's name.

    Returns:
        The maps, in the module's order, and reasons by the names of other maps and of stacks of maps in one parameter.

    Raises:
        ValueError: if a pattern meets none, a map that it meets cannot be acted on, or none is left, with what there is.
    """
    maps = linear_maps(module)
    stacks = stacked(module)
    every = ", ".join(dict.fromkeys(m.path.rpartition(".")[2] for m in maps)) or "none"
    alone = "".join(f" {name}: {reason}." for name, reason in stacks.items())
    shared = _shared(module)
    chosen: list[LinearMap] = []
    left: dict[str, str] = {}
    for m in maps:
        met = names is not None and any(meets(m.path, name) for name in names)
        reason = unfit(m)
        if reason is None and not met and id(m.module.weight) in shared:
            reason = f"its weight is that of {' and '.join(p for p in shared[id(m.module.weight)] if p != m.path)} too"
        if met and reason is not None:
            raise ValueError(f"{who}: {m} cannot be acted on: {reason}. Leave it out of the names.")
        if reason is None and (met or names is None):
            chosen.append(m)
        elif reason is not None and names is None:
            left[str(m)] = reason
    for name in names or ():
        if not any(meets(m.path, name) for m in maps):
            near = ", ".join(nearest(name, [m.path for m in maps]))
            similar = f" Nearest: {near}." if near else ""
            raise ValueError(
                f"{who}: no linear map of {type(module).__name__} is named {name!r}; expected a dotted path, its last part"
                f" or a pattern of one. There are {every}.{similar}{alone}"
            )
    if not chosen:
        reasons = "".join(f" {name}: {reason}." for name, reason in left.items())
        raise ValueError(
            f"{who}: {type(module).__name__} has no linear map to act on (nn.Linear, or Hugging Face's Conv1D).{reasons}{alone}"
        )
    return chosen, {**left, **stacks}


def stacked(module: nn.Module) -> dict[str, str]:
    """Parameters that are several linear maps in one, as of a mixture's experts, with why they are left alone."""
    found: dict[str, str] = {}
    for path, m in module.named_modules():
        if type(m).__module__.startswith("torch."):  # convolutions and the like
            continue
        for name, p in m.named_parameters(prefix=path, recurse=False):
            if p.ndim == 3 and min(p.shape) > 1:
                found[name] = (
                    f"{p.shape[0]} maps in one parameter of {type(m).__name__}, no modules that could be swapped"
                )
    return found


def _shared(module: nn.Module) -> dict[int, list[str]]:
    """Paths of the modules that register a parameter, by its id, where there are several."""
    users: dict[int, list[str]] = {}
    for path, m in module.named_modules():
        for p in m.parameters(recurse=False):
            users.setdefault(id(p), []).append(path)
    return {key: paths for key, paths in users.items() if len(paths) > 1}
