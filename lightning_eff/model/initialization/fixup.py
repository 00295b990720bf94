"""Fixup: residual networks without norms start as identities, with steps of equal effect at any depth (Zhang et al. 2019).

The rule is :func:`fixup_factor`; ``_scales.fixed.Fixed`` computes the scalars.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from typing_extensions import override

from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._arguments.kinds import Either, Flag, Text
from lightning_eff._core._branches.ends import alike_unused, biases_beside, tensors_that_end
from lightning_eff._core._branches.finding import branches, heads
from lightning_eff._core._branches.probing import Probe, probed
from lightning_eff._core._branches.tracing import traced
from lightning_eff._core._needs.offers import is_plain
from lightning_eff._core.search_space import Choice, SearchSpace, needs_blocks
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.initialization._given.attention import Branches, branches_given
from lightning_eff.model.initialization._given.names import by_hand
from lightning_eff.model.initialization._scales.branch_scale import OfBranches, apart, conflicts, listed
from lightning_eff.model.initialization._scales.fixed import fixed, takes_biases
from lightning_eff.model.initialization._scales.scaled import Scaled

WHO = "Fixup"


def fixup_factor(branches: int, maps: int) -> float:
    """Return L^(-1/(2m - 2)), for L residual branches, of which this one has m layers; 1 if the last is the only one."""
    return branches ** (-1.0 / (2 * maps - 2)) if maps > 1 else 1.0


class Fixup(OfBranches):
    """Initialize a deep residual network so that it trains without norms.

    The last layer of each residual branch, and the classifier, start at zero. The other layers of a branch are
    multiplied by L^(-1/(2m-2)), with L the number of branches and m the number of layers in a row in this one. Each
    branch gets a multiplier, 1 at first. Each of its layers gets two scalars, 0 at first: one is added to its input,
    the other to its output. So every block starts as the identity, the first loss is log C for C classes, and the
    effect of a step does not grow with depth.

    Use it for deep residual networks that you build without norms. Norms that the module has stay, because which ones
    to remove cannot be decided safely; a branch that ends in a norm starts at zero by the norm's weight.

    Branches are found before training starts, by a pass on made-up inputs, in a Trainer as in
    ``lightning_eff.apply``. The pass may not reach the classifier; in a Trainer, the loss of the first batch then
    shows it. A head that shares its weight with an embedding stays unchanged. Only linear layers and convolutions get
    scalars. Scalars and multipliers have no weight decay. The paper trains them with a tenth of the learning rate; set
    that in your optimizer.

    ``lightning_eff.export`` folds the multipliers into weights and the scalars into biases. It raises an error where a
    layer has no bias, or where a convolution pads with zeros. For such modules, train with ``biases=False``, or keep
    the module as it is.

    Logged: ``branches``, how many branches were set.

    Args:
        biases: whether layers get scalars.
        head: the name of the classifier's weight, True to find it, or False to leave the classifier unchanged.
        branches: the weights of each branch: names of weights or modules in their order, or patterns, of which the
            first matches of each form one branch, and so on, such as ``[["blocks.*.up", "blocks.*.down"]]``. None finds
            them, and ``[]`` is plain training.
        force: whether to also change a module that was loaded from a checkpoint, which changes its function.

    Raises:
        ValueError: for a value of the wrong kind. At setup or in ``apply``, if no residual branch is found, one ends in
            something that cannot be made zero or is used elsewhere too, or the module is pretrained and ``force`` is
            not set.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[Fixup()])

    References:
        Zhang et al. 2019, "Fixup Initialization: Residual Learning Without Normalization", arXiv:1901.09321.
    """

    saves = "norms and steps: residual networks of any depth train without norms"
    paper = "Zhang et al. 2019, arXiv:1901.09321"
    constraints = "modules with residual branches; no tensor parallelism"
    search_space = SearchSpace({"biases": Choice((True, False))}, needs_blocks)
    control = Control("the baseline, with its norms, for as many seconds with its learning rate decayed to zero")
    conflicts: ClassVar[Mapping[str, str]] = conflicts(WHO, zero=False) | {
        "ZeroProjections": "both start the last layer of each residual branch at zero",
        "ZerO": "both set the layers of residual branches, and the later one would undo the other",
        "TFixup": "both set the layers of residual branches, and the later one would undo the other",
        **dict.fromkeys(
            ("FP8Precision", "INT8Precision", "S2FP8Precision", "Wang2018FP8Precision"),
            "it does not recognise linear layers that have scalars",
        ),
    }

    _zeroed: tuple[str, ...] = ()  # the classifier's tensors
    _of_branches: tuple[str, ...] = ()
    _sought = False  # whether the first batch has yet to show the classifier

    def __init__(
        self,
        *,
        biases: bool = True,
        head: Annotated[str | bool, Either(Text("the name of a weight"), Flag())] = True,
        branches: Branches | None = None,
        force: bool = False,
    ) -> None:
        self.biases, self.head, self.branches, self.force = biases, head, branches, force

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
        for depth in sorted(set(inside.values())):  # an attention module before its output projection
            surgeon.swap(lambda path, m, at=depth: inside.get(id(m)) == at, build, what="a layer of a residual branch")
        self._count = len(ends)
        rank_zero_info(
            f"{WHO}: set the ends of {len(ends)} residual branches{f', found by {probe.of},' if probe else ''} to zero:"
            f" {listed(ends)}. Scaled: {listed([(f'{n} x {f:.3g}',) for n, f in begins.items() if f])}. Classifier:"
            f" {', '.join(begun) or 'not found yet' if self.head else 'unchanged'}."
        )

    def _heads(self, root: nn.Module, probe: Probe | None) -> list[str]:
        """Return the classifier's weight and bias; none if its weight is used elsewhere too."""
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
                f"{WHO}: {wrong[0]} was set to zero as the classifier's weight, but the loss is computed from {found[0]}. Name"
                f" the classifier: {WHO}(head={found[0]!r})."
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
            rank_zero_info(f"{WHO}: set the classifier to zero: {', '.join(names)}.")

    def _refuse_unknown(self, why: str) -> None:
        if not self._zeroed:
            raise ValueError(
                f"{WHO}(head=True): the classifier was not found ({why}). Name its weight, as in {WHO}(head='fc.weight'), or"
                " give head=False."
            )

    @override
    def summary(self) -> str:
        return f"started {self._count} residual branches at zero" if self._count else "the module was already changed"


def _found(root: nn.Module, probe: Probe) -> tuple[list[tuple[str, ...]], dict[str, float]]:
    """Return the tensors in which branches end, and the factor of each other weight of theirs."""
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
