"""The base of ReZero, SkipInit and LayerScale: a learnt scale at the end of each residual branch."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.record import swap_of
from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._architecture.technique import Architecture, Change
from lightning_eff._core._branches.ends import channels_of, tensors_that_end
from lightning_eff._core._branches.finding import branches
from lightning_eff._core._branches.probing import probed
from lightning_eff._core.technique import Control
from lightning_eff.model.initialization._given.names import by_hand, outputs_dim
from lightning_eff.model.initialization._once import refuse_pretrained
from lightning_eff.model.initialization._scales.scaled import Scaled, scaled

_ZEROS = "a branch whose last layer and scale are both zero has no gradient in either, and would stay zero"
_TWICE = "both put a scale at the end of each residual branch, and one is enough"
READERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)  # modules that read the weights of their parts
CONFLICTS: Mapping[str, str] = {
    "ZeroProjections": _ZEROS,
    "ZerO": _ZEROS,
    "ReZero": _TWICE,
    "SkipInit": _TWICE,
    "LayerScale": _TWICE,
    "Fixup": _TWICE,
}


def conflicts(who: str, *, zero: bool) -> dict[str, str]:
    """Return the conflicts of one of these techniques, whose scale starts at zero or not."""
    return {name: why for name, why in CONFLICTS.items() if name != who and (zero or why is not _ZEROS)}


class OfBranches(Architecture):
    """A technique that gives residual branches other parameters.

    Attributes:
        branches: the names of their weights; None finds them, and an empty list is plain training.
        force: whether to also change a module that was loaded.
    """

    change_at = Change.STRUCTURE
    branches: Any
    force: bool
    _count = 0

    @property
    @override
    def neutral(self) -> bool:
        return self.branches is not None and not self.branches

    @override
    def settings(self) -> dict[str, Any]:
        """Return the settings that determine the module's function, so all but ``force``."""
        return {name: value for name, value in super().settings().items() if name != "force"}

    def _check_random(self, root: nn.Module) -> None:
        if not self.force:
            refuse_pretrained(root, who=type(self).__name__, would="change what the module computes")

    def _is_read(self, root: nn.Module, path: str, plain: nn.Module) -> bool:
        """Return whether the module at ``path`` is part of one that reads its tensors instead of calling it.

        Raises:
            ValueError: if it is already scaled.
        """
        if isinstance(plain, Scaled):
            by = getattr(swap_of(plain), "by", "another technique")
            raise ValueError(f"{type(self).__name__}: {path} is already scaled, by {by}. Remove one of the two.")
        around = [root.get_submodule(path[:i]) for i, letter in enumerate(path) if letter == "."]
        return any(isinstance(m, READERS) for m in around)

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"branches": self._count}


class BranchScale(OfBranches):
    """Computes ``x + s F(x)`` for each residual branch F of a module, with a learnt s per branch."""

    control = Control(
        "the baseline for as many seconds with its learning rate decayed to zero: a step costs one product more per number"
        " of the layers that end a branch"
    )
    constraints = "modules with residual branches"

    def _take(self, branches: Sequence[str] | None, force: bool) -> None:
        """Keep the arguments that all have."""
        self.branches, self.force = branches, force

    def begins_at(self, branches: int, blocks: int) -> float:
        """Return the first value of s, for so many residual branches in so many blocks."""
        return 0.0

    #: Whether s has a number for each channel of the residual stream.
    by_channel: ClassVar[bool] = False

    # -- the change

    @override
    def change(self, surgeon: Surgeon) -> None:
        who, root = type(self).__name__, surgeon.root
        self._check_random(root)
        told: dict[str, int] = {}
        if self.branches is None:
            probe = probed(root, who=who, batch=surgeon.batch)
            every = branches(probe.graph)
            ends = [tensors_that_end(root, probe.graph, branch, every, who=who) for branch in every]
            found_by = probe.of
            for end in (end for branch in every for end in branch.last):
                dim = channels_of(probe.graph, end)
                if dim is not None:
                    told[end.weight] = dim
        else:
            ends, found_by = by_hand(root, self.branches, who=who), "branches="
        ends = apart(ends)
        value = self.begins_at(len(ends), count_blocks(ends))
        widths: list[int] = []
        dims: dict[str, int] = {}
        for names in ends:
            width, of_branch = channels(root, names, told, who=who) if self.by_channel else (1, dict.fromkeys(names, 0))
            widths.append(width)
            dims |= of_branch
        paths = {id(m): path for path, m in root.named_modules()}
        where = sites(root, ends)
        homes: dict[int, tuple[Scaled, str]] = {}

        def build(plain: nn.Module) -> nn.Module:
            path = paths[id(plain)]
            tensors = {key: (branch, dims[f"{path}.{key}"]) for key, branch in where[id(plain)].items()}
            read = self._is_read(root, path, plain)
            return scaled(plain, tensors, begins_at=value, sizes=widths, homes=homes, read_by_others=read)

        surgeon.swap(lambda path, m: id(m) in where, build, what="a layer in which a residual branch ends")
        self._count = len(ends)
        rank_zero_info(
            f"{who}: scaled {len(ends)} residual branches, found by {found_by}, by {value:g} at first: {listed(ends)}"
        )

    @override
    def summary(self) -> str:
        return f"scaled {self._count} residual branches" if self._count else "the module already had its scales"


def apart(ends: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Join branches that have a tensor in common, such as those of a block that runs several times."""
    found: list[dict[str, None]] = []
    for names in ends:
        met = [one for one in found if not one.keys().isdisjoint(names)]
        found = [one for one in found if one.keys().isdisjoint(names)]
        found.append({name: None for one in (*met, dict.fromkeys(names)) for name in one})
    return [tuple(one) for one in found]


def sites(root: nn.Module, ends: Sequence[tuple[str, ...]]) -> dict[int, dict[str, int]]:
    """Return, by the id of their module, the tensors in which branches end, each with its branch."""
    found: dict[int, dict[str, int]] = {}
    for branch, names in enumerate(ends):
        for name in names:
            path, _, key = name.rpartition(".")
            found.setdefault(id(root.get_submodule(path)), {})[key] = branch
    return found


def channels(root: nn.Module, names: Sequence[str], told: Mapping[str, int], *, who: str) -> tuple[int, dict[str, int]]:
    """Return the number of channels of a branch's stream, and which dimension of each of its tensors they are.

    Args:
        root: the module tree.
        names: the tensors.
        told: the dimensions that are already known.
        who: the technique's name.

    Raises:
        ValueError: if neither a tensor's module, nor ``told``, nor its shape shows the dimension.
    """
    parameters, dims = dict(root.named_parameters()), dict[str, int]()
    for name in names:
        dim = _dim(root.get_submodule(name.rpartition(".")[0]), name, parameters[name])
        dim = told.get(name) if dim is None else dim
        if dim is not None:
            dims[name] = dim
    stream = [p.shape[0] for p in parameters.values() if p.ndim == 1]
    widths = {parameters[name].shape[dim] for name, dim in dims.items()} or {max(stream, key=stream.count, default=0)}
    for name in names:
        met = [d for d, size in enumerate(parameters[name].shape) if size in widths]
        if name not in dims and len(met) == 1:
            dims[name] = met[0]
    if len(dims) < len(names) or len(widths) > 1:
        shapes = ", ".join(f"{name} of shape {tuple(parameters[name].shape)}" for name in names)
        raise ValueError(
            f"{who}: it is unclear which dimension holds the channels of the tensors in which a residual branch ends"
            f" ({shapes}). Use ReZero, which has one number per branch and needs no dimension."
        )
    return widths.pop(), dims


def _dim(owner: nn.Module, name: str, tensor: Tensor) -> int | None:
    if tensor.ndim == 1:
        return 0
    dim = outputs_dim(owner)
    if dim is not None:
        return dim
    return tensor.ndim - 1 if "bias" in name.rpartition(".")[2] else None


def listed(ends: Sequence[tuple[str, ...]]) -> str:
    """Return the tensors in which branches end, in words; names that differ only in numbers are joined and counted."""
    found: dict[str, list[str]] = {}
    for names in ends:
        parts = [["*" if part.isdecimal() else part for part in name.split(".")] for name in names]
        found.setdefault(", ".join(dict.fromkeys(".".join(p) for p in parts)), []).append(", ".join(names))
    return "; ".join(f"{len(each)} of {alike}" if len(each) > 1 else each[0] for alike, each in found.items())


def count_blocks(ends: Sequence[tuple[str, ...]]) -> int:
    """Return the number of blocks that the branches lie in, by the first number in each path."""
    found: set[str] = set()
    for first, *_ in ends:
        parts = first.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts))
        found.add(".".join(parts[: at + 1]))
    return len(found)
