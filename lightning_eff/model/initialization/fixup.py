"""Fixup: residual networks begin as their skips, and a step changes them alike at any depth (Zhang et al. 2019).

The rule is :func:`fixup_factor`; the scalars are those of ``_scales.fixed.Fixed``.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from typing_extensions import override

from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._branches.ends import alike_unused, biases_beside, tensors_that_end
from lightning_eff._core._branches.finding import branches, heads
from lightning_eff._core._branches.probing import Probe, probed
from lightning_eff._core._branches.tracing import traced
from lightning_eff._core._needs.offers import is_plain
from lightning_eff._core.search_space import Choice, SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.initialization._given.attention import branches_given, check_whole_branches
from lightning_eff.model.initialization._given.names import by_hand
from lightning_eff.model.initialization._scales.branch_scale import (
    OfBranches,
    apart,
    conflicts,
    listed,
    pointless,
)
from lightning_eff.model.initialization._scales.fixed import fixed, takes_biases
from lightning_eff.model.initialization._scales.scaled import Scaled

WHO = "Fixup"


def fixup_factor(branches: int, maps: int) -> float:
    """L^(-1/(2m - 2)), for L residual branches, of which this one has m maps; 1 where the last is the only one."""
    return branches ** (-1.0 / (2 * maps - 2)) if maps > 1 else 1.0


class Fixup(OfBranches):
    """Begin as a deep residual network without norms must for a step to change what it computes by no more than its rate says.

    The last map of each residual branch, and the classifier, begin at zero; the other maps of a branch at L^(-1/(2m-2)) of
    what the module made them, with L the number of branches and m the maps that follow upon each other in this one. Each
    branch gets a multiplier, at 1 first, and each of its maps a scalar that is added to its input and one that is added to its
    output, at 0 first. So every block begins as its skip, and the first loss is log C for C classes. The paper's networks
    have no norms: take them out of the module to have its gain; those that it has stay, and a branch that ends in a norm
    begins at zero by the norm's weight. They are not taken out here, for three reasons: which ones to take is not told by
    what is added to what, since a network's last norm and those of queries and keys stand for other things than the paper's;
    modules read the weights of their norms by name, as torch's encoder layers do; and ``export`` would owe the plain module
    weights of norms that were never trained, with which it computes something else.

    Branches are found before anything has run, by a pass over an input that is made up, in a Trainer as in
    ``lightning_eff.apply``. That pass may not reach the classifier. In a Trainer the first batch's loss tells which it
    is. A head that shares its weight with an embedding stays as it is. Scalars are for linear maps and convolutions;
    they and the multiplier do not decay. The paper gives them a tenth of the rate, which is the optimizer's affair.

    ``lightning_eff.export`` folds the multiplier into the last weight, and scalars into biases. That says why not where a map
    has no bias that could take them, and where a convolution pads with zeros, which its input's scalar does not change:
    then train with ``biases=False``, or keep the module.

    Logged: ``branches``, how many were set.

    Args:
        biases: whether maps get scalars.
        head: the name of the classifier's weight, True to look for it, or False to leave it alone.
        branches: for each branch the names of its weights, or of their modules, in their order, the last one at the end, or
            patterns of them, of which the first that each fits are one branch, and so on, e.g.
            ``[["blocks.*.up", "blocks.*.down"]]``; None looks for them, and ``[]`` is plain training.
        force: also act on a module that was loaded from a checkpoint, whose function it changes.

    Raises:
        ValueError: for other values; at setup or in ``apply``, where no residual branch is found, or where one ends in
            something that cannot be made zero or is used elsewhere too; for a pretrained module without ``force``.

    Sources:
        Zhang et al. 2019, arXiv:1901.09321.
    """

    saves: ClassVar[str] = "steps and norms: residual networks of any depth train without them"
    paper: ClassVar[str] = "Zhang et al. 2019, arXiv:1901.09321"
    constraints: ClassVar[str] = "modules with residual branches; no tensor parallelism"
    survey: ClassVar[Survey | None] = Survey("initialisation: Fixup", shen="4.3")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"biases": Choice((True, False))}, pointless)
    control: ClassVar[Control] = Control(
        "the baseline, with its norms, for as many seconds with its learning rate decayed to zero"
    )
    conflicts: ClassVar[Mapping[str, str]] = conflicts(WHO, zero=False) | {
        "ZeroProjections": "both let the last map of each residual branch begin at zero, of which one is enough",
        "ZerO": "both say what the maps of residual branches begin at, and the later one would undo the other",
        "TFixup": "both say what the maps of residual branches begin at, and the later one would undo the other",
        **dict.fromkeys(
            ("FP8Precision", "INT8Precision", "S2FP8Precision", "Wang2018FP8Precision"),
            "it finds no plain linear map in what has a scalar before and behind it",
        ),
    }

    _zeroed: tuple[str, ...] = ()  # the classifier's tensors
    _of_branches: tuple[str, ...] = ()
    _sought = False  # the first batch has yet to show the classifier

    def __init__(
        self,
        *,
        biases: bool = True,
        head: str | bool = True,
        branches: Sequence[Sequence[str]] | None = None,
        force: bool = False,
    ) -> None:
        if not isinstance(biases, bool):
            raise ValueError(f"{WHO}({biases=}): expected True or False.")
        if not isinstance(head, bool | str) or head == "":
            raise ValueError(f"{WHO}({head=}): expected the name of the classifier's weight, True or False.")
        self.biases, self.head = biases, head
        self.branches = check_whole_branches(branches, who=WHO)
        self._take_force(force)

    @override
    def change(self, surgeon: Surgeon) -> None:
        root = surgeon.root
        self._check_random(root)
        probe = probed(root, who=WHO, batch=surgeon.batch) if self.branches is None else None
        ends, begins = _found(root, probe) if probe is not None else _by_hand(root, self.branches or ())
        begun = self._heads(root, probe)
        self._zeroed, self._of_branches = tuple(begun), (*begins, *(name for names in ends for name in names))
        self._sought = self.head is True
        begins |= dict.fromkeys([name for names in ends for name in names] + begun, 0.0)
        paths = {id(m): path for path, m in root.named_modules()}
        owned: dict[int, dict[str, float]] = {}
        for name, factor in begins.items():
            path, _, key = name.rpartition(".")
            owned.setdefault(id(root.get_submodule(path)), {})[key] = factor
        branch_of = {name: branch for branch, names in enumerate(ends) for name in names}
        homes: dict[int, tuple[Scaled, str]] = {}

        def build(plain: nn.Module) -> nn.Module:
            path = paths[id(plain)]
            read = self._is_read(root, path, plain)
            own = owned[id(plain)]
            tensors = {key: (branch_of[f"{path}.{key}"], 0) for key in own if f"{path}.{key}" in branch_of}
            mine = self.biases and takes_biases(plain) and f"{path}.weight" not in begun
            return fixed(
                plain,
                tensors,
                begins=own,
                biases=mine,
                branches=len(ends),
                homes=homes,
                read_by_others=read,
            )

        inside = {
            key: sum(other != key and paths[key].startswith(f"{paths[other]}.") for other in owned) for key in owned
        }
        for depth in sorted(set(inside.values())):  # an attention module before its last map
            surgeon.swap(lambda path, m, at=depth: inside.get(id(m)) == at, build, what="a map of a residual branch")
        self._count = len(ends)
        rank_zero_info(
            f"{WHO}: {len(ends)} residual branches{f', found by {probe.of},' if probe else ''} begin at zero: {listed(ends)}."
            f" Others of theirs: {listed([(f'{n} x {f:.3g}',) for n, f in begins.items() if f])}. The classifier:"
            f" {', '.join(begun) or 'none is found yet' if self.head else 'none is set'}."
        )

    def _heads(self, root: nn.Module, probe: Probe | None) -> list[str]:
        """The classifier's weight and bias; none where its weight is used elsewhere too."""
        if isinstance(self.head, str):
            return [name for names in by_hand(root, [self.head], who=WHO, argument="head") for name in names]
        if not self.head or probe is None:
            return []
        alone = [weight for weight in probe.heads if len(probe.graph.uses(weight)) == 1]
        return [name for weight in alone for name in (weight, *biases_beside(root, weight))]

    # -- the classifier, as the first loss shows it

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        super().on_batch_start(session, batch, batch_idx)
        if not self._sought or session.trainer.ckpt_path is not None:
            return
        module = session.module
        can = module.automatic_optimization and is_plain(session.trainer.strategy)
        try:
            graph = traced(session, batch, batch_idx, who=WHO) if can else None
        except ValueError as e:
            self._refuse_unknown(str(e).removeprefix(f"{WHO}: "))
            graph = None
        if can and graph is None and not self._zeroed:
            return  # the next batch may have a loss
        self._sought = False
        if graph is None:
            self._refuse_unknown("the first step cannot be looked at under this strategy or in manual optimization")
            return
        found = [name for name in heads(graph) if name not in self._of_branches]
        wrong = [name for name in self._zeroed if name not in found and module.get_parameter(name).ndim > 1]
        if found and wrong:
            raise ValueError(
                f"{WHO}: {wrong[0]} was set to zero as the classifier's weight, and the loss of classes is taken of"
                f" {found[0]}. Name the classifier, {WHO}(head={found[0]!r})."
            )
        names = [
            name
            for weight in found
            if len(graph.uses(weight)) == 1
            for name in (weight, *biases_beside(module, weight))
            if name not in self._zeroed
        ]
        with torch.no_grad():
            for name in names:
                module.get_parameter(name).zero_()
        if names:
            self._zeroed = (*self._zeroed, *names)
            session.blocks_changed(self)
            rank_zero_info(f"{WHO}: the classifier begins at zero: {', '.join(names)}.")

    def _refuse_unknown(self, why: str) -> None:
        if not self._zeroed:
            raise ValueError(
                f"{WHO}(head=True): the classifier was not found ({why}). Name its weight, {WHO}(head='fc.weight'), or give"
                " head=False."
            )

    @override
    def summary(self) -> str:
        return f"{self._count} residual branches began at zero" if self._count else "the module was changed already"


def _found(root: nn.Module, probe: Probe) -> tuple[list[tuple[str, ...]], dict[str, float]]:
    """The tensors in which branches end, and the first multiple of each other weight of theirs."""
    every, parameters = branches(probe.graph), dict(root.named_parameters())
    together = [tensors_that_end(root, probe.graph, branch, every, who=WHO) for branch in every]
    last = {end.weight for branch in every for end in branch.last} | {name for names in together for name in names}
    begins: dict[str, float] = {}
    for branch in every:
        inner = [name for name in branch.inner if parameters[name].ndim > 1 and name not in last]
        for name in (*inner, *alike_unused(root, probe.graph, inner)):
            begins[name] = fixup_factor(len(every), branch.depth)
    return apart(together), begins


def _by_hand(root: nn.Module, given: Sequence[Sequence[str]]) -> tuple[list[tuple[str, ...]], dict[str, float]]:
    every = branches_given(root, given, who=WHO)
    ends = by_hand(root, [end.weight for branch in every for end in branch.last], who=WHO)
    inner = [(name, branch.depth) for branch in every for name in branch.inner]
    return apart(ends), {name: fixup_factor(len(every), depth) for name, depth in inner}
