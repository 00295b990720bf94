"""What ReZero, SkipInit and LayerScale share: a learnt scale at the end of each residual branch."""

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
from lightning_eff._core.search_space import RunProfile
from lightning_eff.model.initialization._given.names import by_hand, check_branches, outputs_dim
from lightning_eff.model.initialization._once import refuse_pretrained
from lightning_eff.model.initialization._scales.scaled import Scaled, scaled

_ZEROS = "a branch whose last map and whose scale are both zero has no gradient in either, and would stay zero"
_TWICE = "both put a scale at the end of each residual branch, of which one is as good as two"
READERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)  # of the weights of their parts
CONFLICTS: Mapping[str, str] = {
    "ZeroProjections": _ZEROS,
    "ZerO": _ZEROS,
    "ReZero": _TWICE,
    "SkipInit": _TWICE,
    "LayerScale": _TWICE,
    "Fixup": _TWICE,
}


def conflicts(who: str, *, zero: bool) -> dict[str, str]:
    """What contradicts one of these techniques, whose scale is zero at first or not."""
    return {name: why for name, why in CONFLICTS.items() if name != who and (zero or why is not _ZEROS)}


def pointless(profile: RunProfile) -> str | None:
    """Why there is nothing to be scaled, in words."""
    return None if profile.num_blocks else "there is no stack of blocks with residual branches"


class OfBranches(Architecture):
    """A technique that gives residual branches other parameters.

    Attributes:
        branches: names of weights of theirs; None looks for them, and none is plain training.
        force: also act on a module that was loaded.
    """

    change_at: ClassVar[Change] = Change.STRUCTURE
    branches: Any
    force: bool
    _count = 0

    @property
    @override
    def neutral(self) -> bool:
        return self.branches is not None and not self.branches

    @override
    def settings(self) -> dict[str, Any]:
        """What the module's function goes by; whether it was loaded before is its own affair."""
        return {name: value for name, value in super().settings().items() if name != "force"}

    def _take_force(self, force: bool) -> None:
        if not isinstance(force, bool):
            raise ValueError(f"{type(self).__name__}({force=}): expected True or False.")
        self.force = force

    def _check_random(self, root: nn.Module) -> None:
        if not self.force:
            refuse_pretrained(root, who=type(self).__name__, would="change what the module computes")

    def _is_read(self, root: nn.Module, path: str, plain: nn.Module) -> bool:
        """Whether the module at ``path`` is a part of one that reads its tensors instead of calling it.

        Raises:
            ValueError: if it is scaled already.
        """
        if isinstance(plain, Scaled):
            by = getattr(swap_of(plain), "by", "another technique")
            raise ValueError(f"{type(self).__name__}: {path} is scaled already, by {by}; expected a plain module.")
        around = [root.get_submodule(path[:i]) for i, letter in enumerate(path) if letter == "."]
        return any(isinstance(m, READERS) for m in around)

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"branches": self._count}


class BranchScale(OfBranches):
    """``x + s F(x)`` for each residual branch F of a module, with one s a branch that is learnt."""

    branches: tuple[str, ...] | None

    def _take(self, branches: Sequence[str] | None, force: bool) -> None:
        """Check and keep the arguments that all have."""
        self.branches = check_branches(branches, who=type(self).__name__)
        self._take_force(force)

    def begins_at(self, branches: int, blocks: int) -> float:
        """The first value of s, for so many residual branches in so many blocks."""
        return 0.0

    #: Whether s has a number for each channel of the stream.
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

        surgeon.swap(lambda path, m: id(m) in where, build, what="a map in which a residual branch ends")
        self._count = len(ends)
        rank_zero_info(
            f"{who}: {len(ends)} residual branches, found by {found_by}, begin at {value:g} of themselves:"
            f" {listed(ends)}"
        )

    @override
    def summary(self) -> str:
        return f"{self._count} residual branches have scales" if self._count else "the module had its scales already"


def apart(ends: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Branches with a tensor in common, as those of a block that runs several times, become one."""
    found: list[dict[str, None]] = []
    for names in ends:
        met = [one for one in found if not one.keys().isdisjoint(names)]
        found = [one for one in found if one.keys().isdisjoint(names)]
        found.append({name: None for one in (*met, dict.fromkeys(names)) for name in one})
    return [tuple(one) for one in found]


def sites(root: nn.Module, ends: Sequence[tuple[str, ...]]) -> dict[int, dict[str, int]]:
    """By the module that has them, the tensors in which branches end, each with its branch."""
    found: dict[int, dict[str, int]] = {}
    for branch, names in enumerate(ends):
        for name in names:
            path, _, key = name.rpartition(".")
            found.setdefault(id(root.get_submodule(path)), {})[key] = branch
    return found


def channels(root: nn.Module, names: Sequence[str], told: Mapping[str, int], *, who: str) -> tuple[int, dict[str, int]]:
    """How many channels the stream has that a branch is added to, and which dimension of each of its tensors they are.

    Args:
        root: the module tree.
        names: the tensors.
        told: the dimensions that are known of some.
        who: the technique's name.

    Raises:
        ValueError: where neither a tensor's module, nor what is known, nor its shape tells.
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
            f"{who}: of the tensors in which a residual branch ends ({shapes}) it cannot be told which dimension is the"
            " stream's channels; expected those of linear maps, convolutions or norms, or one dimension of the stream's width."
            " Take the technique out; ReZero has one number for each branch, and asks for no dimension."
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
    """The tensors in which branches end, in words; those that differ in numbers alone as one, with how many there are."""
    found: dict[str, list[str]] = {}
    for names in ends:
        parts = [["*" if part.isdecimal() else part for part in name.split(".")] for name in names]
        found.setdefault(", ".join(dict.fromkeys(".".join(p) for p in parts)), []).append(", ".join(names))
    return "; ".join(f"{len(each)} of {alike}" if len(each) > 1 else each[0] for alike, each in found.items())


def count_blocks(ends: Sequence[tuple[str, ...]]) -> int:
    """How many blocks the branches lie in: by the first number in the path of each."""
    found: set[str] = set()
    for first, *_ in ends:
        parts = first.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts))
        found.add(".".join(parts[: at + 1]))
    return len(found)
