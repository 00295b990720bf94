"""Manifold Mixup: mixup of the hidden states at a random block (Verma et al. 2019)."""

import functools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch import Callback
from torch import Generator, Tensor, nn
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Each, Kind, Names
from lightning_eff._core._needs.needs import WITHIN, Reasons
from lightning_eff._core.batches import num_samples, select
from lightning_eff._core.blocks import BlockStack, refuse_compiled_around, split_output
from lightning_eff._core.losses import loss_of
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Step
from lightning_eff._core.technique import Control
from lightning_eff.data.augmentation._arguments import AlphaOrZero, Keys, Probability, Until, no_mixing
from lightning_eff.data.augmentation._mixing import with_settings
from lightning_eff.data.augmentation.mixing._convex import Convex
from lightning_eff.data.augmentation.mixing._hook import CHOOSERS, OutputHook, mixed_rows, standing_around

WHO = "ManifoldMixup"
_PLACES = "it keeps tokens at different positions in each image, so they cannot be averaged"


def _pointless(profile: RunProfile) -> str | None:
    return no_mixing(profile) or (None if profile.num_blocks > 1 else "there are no blocks")


def _inputs_alone(technique: "ManifoldMixup") -> Mapping[str, Callback]:
    if technique.neutral or technique.depths == [0]:
        return {}
    return {"inputs alone": with_settings(technique, depths=[0], layers=None)}


@dataclass(frozen=True, repr=False)
class Layers(Kind):
    """The dotted path of a stack of blocks, or a list of paths of modules."""

    @property
    @override
    def expected(self) -> str:
        return "a dotted path or a list of dotted paths"

    @override
    def __call__(self, value: Any) -> str | list[str]:
        return value if isinstance(value, str) else list(Names("paths", empty=False)(value))


class ManifoldMixup(Convex):
    """Mix the hidden states of two samples at a random block, and the losses on their labels.

    For each micro-batch one depth ``k`` is drawn uniformly from ``depths``. ``k = 0`` mixes the inputs, exactly as
    :class:`Mixup` does. ``k >= 1`` mixes the output of the k-th block, ``lambda h_i + (1 - lambda) h_j`` with ``lambda ~
    Beta(alpha, alpha)``. The loss is ``lambda L(y_i) + (1 - lambda) L(y_j)``, computed in the same forward pass. For
    cross-entropy and binary cross-entropy this equals the loss on the mixed target. ``training_step`` still receives integer
    labels, those with the larger weight.

    Use it when you train for many epochs (the paper: more than 1,000) and the model overfits. It costs hardly any time, and the
    training loss falls more slowly.

    The blocks are those of the longest stack, or those of ``layers``. Each must be called once per step and return a tensor
    (B, ...), or a tuple that begins with one. Other outputs, such as masks, are not mixed. If another technique skips blocks,
    ``k`` is drawn from those that run. Metrics that ``training_step`` computes from the labels are too low, and a warning says
    so.

    It cannot be combined with techniques that choose samples, or that drop different tokens in each image. If several
    techniques mix, they take turns, one per batch.

    It logs ``share``, the mean weight of the other samples in the last micro-batch. ``depth`` is the last ``k`` (-1 if nothing
    was mixed), and ``milliseconds`` is the host time of the preparation.

    Args:
        alpha: the parameter of the Beta distribution of the mixing weight. The paper uses 2. 0 is plain training.
        depths: the depths to draw from. 0 is the input, 1 the output of the first block.
        layers: the blocks. Give the dotted path of their stack, or a list of paths of modules. None takes the longest stack.
        prob: the probability that a micro-batch is mixed. 0 is plain training.
        until: the fraction of the budget after which batches are left unchanged. 0 is plain training.
        per_sample: whether each sample has its own ``lambda``. By default there is one per micro-batch.
        keys: the names or positions of the inputs that are mixed for ``k = 0``, floating point, shape (B, ...). None takes the
            batch's images (B, C, H, W), or its only floating-point tensor with B rows.
        labels: the names or positions of the labels in the batch. None takes the tensors that are targets of the step's losses.

    Raises:
        ValueError: for a value out of range. At setup, if ``until`` is below 1 and the run has no end, if ``layers`` is not
            found, or if there are fewer blocks than ``depths`` need. At the first batch, before any weight changes, if a block
            is not called once on all samples, or if its output cannot be averaged. Also if there are no inputs to mix for ``k =
            0``, or if no loss call on the labels is visible.

    Example:
        >>> trainer = L.Trainer(max_epochs=200, callbacks=[ManifoldMixup(alpha=2.0, depths=[0, 1, 2])])

    References:
        Verma et al. 2019, "Manifold Mixup: Better Representations by Interpolating Hidden States", arXiv:1806.05236.
    """

    paper = "Verma et al. 2019, arXiv:1806.05236"
    constraints = (
        "needs automatic optimization, blocks that are called once on all samples, labels that are classes and a loss of"
        " torch.nn.functional"
    )
    refuses: ClassVar[Reasons] = WITHIN
    search_space = SearchSpace({"alpha": Choice((0.2, 1.0, 2.0)), "until": Choice((0.8, 1.0))}, _pointless)
    control = Control(
        "the baseline without augmentation, trained for the same time, and depths=[0], which is Mixup",
        _inputs_alone,
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        **CHOOSERS,
        **dict.fromkeys(("PatchDropout", "PartialTokenTraining", "TokenMerging"), _PLACES),
        **Convex.conflicts,
    }
    mend: ClassVar[str] = "Leave 0 out of depths, or remove ManifoldMixup."

    def __init__(
        self,
        alpha: AlphaOrZero = 2.0,
        *,
        depths: Annotated[Sequence[int], Each(Count(at_least=0))] = (0, 1, 2),
        layers: Annotated[str | Sequence[str] | None, Layers()] = None,
        prob: Probability = 1.0,
        until: Until = 1.0,
        per_sample: bool = False,
        keys: Keys = None,
        labels: Keys = None,
    ) -> None:
        if len(set(depths)) < len(depths):
            raise ValueError(
                f"{WHO}(depths={list(depths)}): a depth is given twice. Give each depth once, such as [0, 1, 2]."
            )
        super().__init__(alpha=alpha, prob=prob, until=until, per_sample=per_sample, keys=keys, labels=labels)
        self.depths = list(depths)
        self.layers = layers if isinstance(layers, str | None) else list(layers)

    @override
    def _reset(self) -> None:
        super()._reset()
        self._depth = -1
        self._drawn: tuple[Tensor, Tensor] | None = None  # partners and shares, if hidden states are mixed
        self._stack: BlockStack | None = None
        self._modules: list[nn.Module] = []  # the first has depth 1

    @override
    def detach(self, session: Session) -> None:
        self._drawn, self._stack, self._modules = None, None, []

    # -- the blocks

    @override
    def on_model(self, session: Session) -> None:
        if not session.fitting or max(self.depths) == 0:
            return
        if isinstance(self.layers, list):
            named = dict(session.module.named_modules())
            missing = [path for path in self.layers if path not in named or not path]
            if missing:
                raise ValueError(
                    f"{WHO}(layers={self.layers}): {missing} are no submodules of {type(session.module).__name__}. Give dotted"
                    f" paths, such as {', '.join([repr(path) for path, _ in session.module.named_children()][:5])}."
                )
            where = str(self.layers)
            self._modules = [*map(named.__getitem__, self.layers)]
            for path in self.layers:
                refuse_compiled_around(session.module, path, who=WHO)
        else:
            self._stack = session.stack(self.layers, who=WHO)
            self._modules, where = self._stack.blocks, str(self._stack)
            refuse_compiled_around(session.module, self._stack.path, who=WHO)
        if max(self.depths) > len(self._modules):
            raise ValueError(
                f"{WHO}(depths={self.depths}): {where} has only {len(self._modules)} blocks. Give smaller depths, or other"
                " blocks with layers=."
            )

    def _running(self) -> list[int]:
        """Return the depths that can be mixed in this step. Other techniques may skip blocks."""
        running = None if self._stack is None else {id(block) for block in self._stack.running()}
        return [k for k in self.depths if k == 0 or running is None or id(self._modules[k - 1]) in running]

    @override
    def inputs(self, batch: Any, labels: dict[str, Tensor]) -> list[Tensor]:
        return super().inputs(batch, labels) if 0 in self.depths else []

    @property
    @override
    def mixes_inputs(self) -> bool:
        return 0 in self.depths

    @override
    def entrances(self, module: nn.Module) -> list[nn.Module]:
        return [self._modules[k - 1] for k in self.depths if k > 0]

    @override
    def look(self, step: Step, batch: Any) -> None:
        """Check that each block of ``depths`` is called once on all samples, and that its output can be mixed."""
        size = len(next(iter(self._targets.labels(step, batch).values())))
        running = [k for k in self._running() if k > 0]
        if not running:
            return
        mend = "Leave it out of depths, or name other blocks with layers=."
        calls = self._outputs(step, batch, running)
        for k, outputs in calls.items():
            at = f"{WHO}: the block of depth {k}, a {type(self._modules[k - 1]).__name__},"
            if len(outputs) != 1:
                raise ValueError(f"{at} was called {len(outputs)} times in a step. {mend}")
            shape = outputs[0]
            if isinstance(shape, str) or shape[:1] != (size,):
                raise ValueError(
                    f"{at} returned {shape if isinstance(shape, str) else tuple(shape)} for {size} samples, and not a"
                    f" floating-point tensor ({size}, ...) or a tuple that begins with one. {mend}"
                )
        # with as many tokens as samples, a smaller batch shows which dimension is that of samples
        doubtful = [k for k, shapes in calls.items() if shapes[0][1:2] == (size,)]
        if doubtful and size > 1:
            fewer = self._outputs(step, select(batch, torch.arange(size - 1), size), doubtful)
            turned = [k for k, shapes in fewer.items() if shapes[0][0] == size]
            if turned:
                raise ValueError(
                    f"{WHO}: the blocks of depths {turned} do not have the samples in their first dimension. Use"
                    " batch_first=True, leave them out of depths, or name other blocks with layers=."
                )

    def _outputs(self, step: Step, batch: Any, depths: Sequence[int]) -> dict[int, list[Any]]:
        """Return the shapes of the outputs of these blocks in a forward pass, or a description of what cannot be mixed."""
        found: dict[int, list[Any]] = {k: [] for k in depths}

        def note(shapes: list[Any], output: Any) -> None:
            try:
                hidden, _ = split_output(output)
            except TypeError:
                shapes.append(f"a {type(output).__name__}")
                return
            shapes.append(hidden.shape if hidden.is_floating_point() else f"numbers of {str(hidden.dtype)[6:]}")

        with ExitStack() as hooks:
            for k, shapes in found.items():
                hooks.callback(OutputHook(self._modules[k - 1], functools.partial(note, shapes)).on().off)
            step.forward_only(batch, num_samples(batch), transform=False)
        return found

    # -- the mixtures

    @override
    def generator(self, step: Step) -> Generator:
        """Return the generator of Mixup, so that both draw the same."""
        return self.session.generator("Mixup", step.global_step, step.batch_idx, self.session.rank)

    @override
    def mix(self, inputs: list[Tensor], partner: Tensor, generator: Generator) -> tuple[list[Tensor], Tensor]:
        depths = self._running()
        if not depths:  # no block of depths runs in this step
            return inputs, torch.ones(len(partner))
        self._depth = depths[int(torch.randint(len(depths), (), generator=generator))]
        if self._depth == 0:
            return super().mix(inputs, partner, generator)
        share = self.shares(len(partner), generator)
        self._drawn = partner, share
        return inputs, share.expand(len(partner))

    @override
    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        self._depth, self._drawn = -1, None
        return super()._link(step, batch, lambda given: self._mixed_within(step, given, proceed))

    def _mixed_within(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        """Return ``proceed(batch)`` with hidden states mixed, also in what the backward pass recomputes."""
        if self._drawn is None:
            return proceed(batch)
        partner, share = self._drawn
        block = self._modules[self._depth - 1]

        def mixed(output: Any) -> Any:
            hidden, rest = split_output(output)
            made = mixed_rows(hidden, partner, share, step.versions, who=f"{WHO}: depth {self._depth}")
            return made if rest is None else (made, *rest)

        hook = OutputHook(block, mixed)
        output = standing_around(step, self.session, [hook], batch, proceed)
        if hook.calls != 1 and loss_of(output) is not None:
            raise ValueError(
                f"{WHO}: the block of depth {self._depth}, a {type(block).__name__}, was called {hook.calls} times in this"
                " step, but once in the first one. Switch off what skips blocks in training, or name other blocks with layers=."
            )
        return output

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "depth": self._depth}
