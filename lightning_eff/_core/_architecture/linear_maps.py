"""The linear layers of a module, and which of them a technique may replace."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from lightning_eff._core._architecture.naming import meets, nearest
from lightning_eff._core._architecture.stand_ins import stands_in
from lightning_eff._core._stack.walking import modules_by_path


@dataclass(frozen=True)
class LinearMap:
    """A submodule that computes ``x W^T + b``.

    Attributes:
        path: its dotted path in the LightningModule.
        module: ``nn.Linear``, or Hugging Face's ``Conv1D``, whose parameter is ``W^T``.
        in_features: K, the size of ``x``.
        out_features: N, the size of the result.
        transposed: whether the parameter is (K, N) instead of (N, K).
    """

    path: str
    module: nn.Module
    in_features: int
    out_features: int
    transposed: bool

    def __str__(self) -> str:
        return f"{self.path} ({self.in_features} to {self.out_features})"


def linear_maps(module: nn.Module) -> list[LinearMap]:
    """Return all ``nn.Linear`` and Hugging Face ``Conv1D`` in ``module``, in order, each once."""
    found: list[LinearMap] = []
    for path, m in modules_by_path(module):
        if stands_in(m):
            continue  # its inner layers are listed
        if isinstance(m, nn.Linear):
            found.append(LinearMap(path, m, m.in_features, m.out_features, transposed=False))
        elif is_conv1d(m):
            k, n = m.weight.shape  # pyright: ignore[reportCallIssue, reportGeneralTypeIssues] -- Conv1D's own layout
            found.append(LinearMap(path, m, int(k), int(n), transposed=True))
    return found


def is_conv1d(m: nn.Module) -> bool:
    """Return whether ``m`` is transformers' ``Conv1D``, a linear layer with a weight of shape (in, out), or a copy of it."""
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
    """Return why this layer cannot be replaced, or None."""
    if isinstance(m.module, NonDynamicallyQuantizableLinear):
        return "its weight is used by nn.MultiheadAttention, which does not call it"
    if isinstance(m.module, nn.Linear) and type(m.module).forward is not nn.Linear.forward:
        return "a subclass of nn.Linear with its own forward"
    return None


def choose(module: nn.Module, names: Sequence[str] | None, *, who: str) -> tuple[list[LinearMap], dict[str, str]]:
    """Return the linear layers that a technique acts on, and the skipped ones with the reason.

    Args:
        module: the module tree.
        names: patterns of dotted paths or of their last part, such as ``"q_proj"`` or ``"layers.*.mlp.*"``. None selects all
            but those that share a weight with another module.
        who: the technique's name.

    Returns:
        The layers, in the module's order. And the reasons by the names of skipped layers and of parameters that hold several
        layers.

    Raises:
        ValueError: if a pattern matches nothing, a matched layer cannot be replaced, or none is left.
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
            reason = f"it shares its weight with {' and '.join(p for p in shared[id(m.module.weight)] if p != m.path)}"
        if met and reason is not None:
            raise ValueError(f"{who}: {m} cannot be replaced: {reason}. Remove it from the names.")
        if reason is None and (met or names is None):
            chosen.append(m)
        elif reason is not None and names is None:
            left[str(m)] = reason
    for name in names or ():
        if not any(meets(m.path, name) for m in maps):
            near = ", ".join(nearest(name, [m.path for m in maps]))
            similar = f" Nearest: {near}." if near else ""
            raise ValueError(
                f"{who}: no linear layer of {type(module).__name__} is named {name!r}; expected a dotted path, its last part"
                f" or a pattern. The linear layers are {every}.{similar}{alone}"
            )
    if not chosen:
        reasons = "".join(f" {name}: {reason}." for name, reason in left.items())
        raise ValueError(
            f"{who}: {type(module).__name__} has no linear layer to act on (nn.Linear, or Hugging Face's Conv1D)."
            f"{reasons}{alone}"
        )
    return chosen, {**left, **stacks}


def stacked(module: nn.Module) -> dict[str, str]:
    """Return the parameters that hold several linear layers, such as a mixture's experts, with why they are skipped."""
    found: dict[str, str] = {}
    for path, m in modules_by_path(module):
        if type(m).__module__.startswith("torch."):  # convolutions and the like
            continue
        for name, p in m.named_parameters(prefix=path, recurse=False):
            if p.ndim == 3 and min(p.shape) > 1:
                found[name] = (
                    f"{p.shape[0]} linear layers in one parameter of {type(m).__name__}, without modules to replace"
                )
    return found


def _shared(module: nn.Module) -> dict[int, list[str]]:
    """Return the paths of the modules that register a parameter, by its id, if there are several."""
    users: dict[int, list[str]] = {}
    for path, m in modules_by_path(module):
        for key in {id(p) for p in m._parameters.values() if p is not None}:
            users.setdefault(key, []).append(path)
    return {key: paths for key, paths in users.items() if len(paths) > 1}
