"""Manifold Mixup: mixup of what a layer drawn for each batch has computed (Verma et al. 2019)."""

import functools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback
from torch import Generator, Tensor, nn
from typing_extensions import override

from lightning_eff._core._needs.needs import WITHIN, Reasons
from lightning_eff._core.batches import num_samples, select
from lightning_eff._core.blocks import BlockStack, refuse_compiled_around, split_output
from lightning_eff._core.losses import loss_of
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Step
from lightning_eff._core.technique import Control
from lightning_eff.data.augmentation._arguments import check_number, no_mixing
from lightning_eff.data.augmentation.mixing._convex import Convex
from lightning_eff.data.augmentation.mixing._hook import CHOOSERS, OutputHook, mixed_rows, standing_around

WHO = "ManifoldMixup"
_PLACES = "the tokens that it leaves of two images lie at different places, and have no mean"


def _pointless(profile: RunProfile) -> str | None:
    return no_mixing(profile) or (None if profile.num_blocks > 1 else "there are no blocks")


def _inputs_alone(technique: "ManifoldMixup") -> Mapping[str, Callback]:
    names = ("alpha", "prob", "until", "per_sample", "keys", "labels")
    settings = {name: getattr(technique, name) for name in names}
    return (
        {} if technique.neutral or technique.depths == [0] else {"inputs alone": ManifoldMixup(depths=[0], **settings)}
    )


class ManifoldMixup(Convex):
    """Train on mixtures of two samples' hidden states at a layer that is drawn for each micro-batch, and of their labels.

    Of ``depths`` one, ``k``, is drawn for each micro-batch, each as likely. With ``k = 0`` the inputs are mixed, as Mixup does,
    number for number; with ``k >= 1`` what the k-th block has computed: ``lambda h_i + (1 - lambda) h_j`` goes on, with
    ``lambda ~ Beta(alpha, alpha)``, and the loss is ``lambda L(y_i) + (1 - lambda) L(y_j)``, in the same forward pass. For
    cross-entropy and binary cross-entropy that is the loss on the mixed target, exactly. ``training_step`` goes on to take
    integer labels; roles are swapped where ``lambda`` is below one half, so it sees those of the larger share. A metric that it
    computes of them is told once.

    Blocks are those of the longest stack, or of ``layers``: a path, or a list of the paths of modules, whichever they are. Each
    must be called once in a step, and return a tensor (B, ...), or a tuple that begins with one: masks and other things that go
    with it stay those of the sample itself. Where other techniques let a block rest, ``k`` is drawn of those that run.

    It cannot stand beside what chooses among a batch's samples, or leaves tokens of each image at other places. Where several
    techniques mix, each batch is mixed by one of them.

    It regularises: it costs hardly any time, makes training fit more slowly, and the paper trains for more than 1,000 epochs.

    Logged: ``share``, the mean share of the other samples in the last micro-batch, ``milliseconds``, what it took of the host
    to make it ready, and ``depth``, the last ``k``; -1 where nothing was mixed.

    Args:
        alpha: of the Beta distribution, >= 0: 2 in the paper; 0 is plain training.
        depths: of which ``k`` is drawn: 0 for the inputs, ``k`` for the output of the k-th block, 1 for the first.
        layers: the stack of blocks, as a path or a pattern, or a list of paths of modules; None takes the longest stack.
        prob: the chance of a micro-batch to be mixed, in [0, 1]; 0 is plain training.
        until: the share of the budget in [0, 1] from which on batches are left alone; 0 is plain training.
        per_sample: draw ``lambda`` for each sample instead of once for the micro-batch.
        keys: names or positions of the inputs (B, ...) of floating point that are mixed for ``k = 0``. None takes the batch's
            images (B, C, H, W), or its only tensor of floating point with B rows.
        labels: names or positions of the labels in the batch; None looks for what the step's losses have as targets.

    Raises:
        ValueError: if an argument is out of its range; at setup, for ``until`` below 1 in a run without an end, or if there is
            no such stack or module, or fewer blocks than ``depths`` say; at the first batch, before any weight has changed, if
            a block is not called once on the batch's samples, or its output has no mean, if there are no inputs to mix for
            ``k = 0``, or if the step's loss on labels cannot be seen.

    Sources:
        Verma et al. 2019, arXiv:1806.05236.
    """

    saves: ClassVar[str] = "nothing of a step: it regularises, for a better end of long training"
    paper: ClassVar[str] = "Verma et al. 2019, arXiv:1806.05236"
    constraints: ClassVar[str] = (
        "automatic optimization; blocks called once on all samples; labels that are classes; a loss of torch.nn.functional"
    )
    refuses: ClassVar[Reasons] = WITHIN
    survey: ClassVar[Survey | None] = Survey("data augmentation (Manifold Mixup)", shen="3.1")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"alpha": Choice((0.2, 1.0, 2.0)), "until": Choice((0.8, 1.0))}, _pointless
    )
    control: ClassVar[Control] = Control(
        "no augmentation: the baseline for as many seconds; and depths=[0], which is Mixup",
        _inputs_alone,
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        **CHOOSERS,
        **dict.fromkeys(("PatchDropout", "PartialTokenTraining", "TokenMerging"), _PLACES),
        "SAF": "a mixture's scores would be held to those of another mixture some epochs before",
    }
    mend: ClassVar[str] = "Leave 0 out of depths, or take the technique out."

    def __init__(
        self,
        alpha: float = 2.0,
        *,
        depths: Sequence[int] = (0, 1, 2),
        layers: str | Sequence[str] | None = None,
        prob: float = 1.0,
        until: float = 1.0,
        per_sample: bool = False,
        keys: Sequence[str | int] | None = None,
        labels: Sequence[str | int] | None = None,
    ) -> None:
        check_number(
            alpha, who=WHO, name="alpha", low=0, high=float("inf"), what="of Beta(alpha, alpha); 0 is plain training"
        )
        whole = isinstance(depths, Sequence) and all(isinstance(k, int) and not isinstance(k, bool) for k in depths)
        if not whole or not depths or min(depths) < 0 or len(set(depths)) < len(depths):
            raise ValueError(
                f"{WHO}({depths=}): expected a list of different integers >= 0, such as [0, 1, 2]: 0 mixes inputs, k the output"
                " of the k-th block."
            )
        if not (layers is None or isinstance(layers, str) or (layers and all(isinstance(m, str) for m in layers))):
            raise ValueError(f"{WHO}({layers=}): expected a path, a list of paths of modules, or None.")
        super().__init__(prob=prob, until=until, keys=keys, labels=labels)
        self.alpha = alpha
        self.depths = list(depths)
        self.layers = layers if layers is None or isinstance(layers, str) else list(layers)
        self.per_sample = per_sample

    @override
    def _reset(self) -> None:
        super()._reset()
        self._depth = -1
        self._drawn: tuple[Tensor, Tensor] | None = None  # partners and shares, of hidden states alone
        self._stack: BlockStack | None = None
        self._modules: list[nn.Module] = []  # the first is that of depth 1

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
                    f"{WHO}(layers={self.layers}): {missing} name no submodules of {type(session.module).__name__}; expected"
                    f" dotted paths such as {', '.join(repr(path) for path, _ in session.module.named_children())}."
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
                f"{WHO}(depths={self.depths}): {where} are {len(self._modules)} blocks; expected depths up to that. Give"
                " others, or other blocks by layers=."
            )

    def _running(self) -> list[int]:
        """Those of the depths that this very step can mix at: other techniques may let blocks rest."""
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
        """Whether each block of ``depths`` is called once, on the batch's samples, and what it returns can be mixed."""
        size = len(next(iter(self._targets.labels(step, batch).values())))
        running = [k for k in self._running() if k > 0]
        if not running:
            return
        calls = self._outputs(step, batch, running)
        for k, outputs in calls.items():
            at = f"{WHO}: the block of depth {k}, a {type(self._modules[k - 1]).__name__},"
            if len(outputs) != 1:
                raise ValueError(
                    f"{at} was called {len(outputs)} times in a step; expected once. Take it out of depths, or name other"
                    " blocks by layers=."
                )
            shape = outputs[0]
            if isinstance(shape, str) or shape[:1] != (size,):
                raise ValueError(
                    f"{at} returned {shape if isinstance(shape, str) else tuple(shape)} for {size} samples; expected a tensor"
                    f" ({size}, ...) of floating point, or a tuple that begins with one. Take it out of depths, or name other"
                    " blocks by layers=."
                )
        # as many tokens as samples: which of the two comes first?
        doubtful = [k for k, shapes in calls.items() if shapes[0][1:2] == (size,)]
        if doubtful and size > 1:
            fewer = self._outputs(step, select(batch, torch.arange(size - 1), size), doubtful)
            turned = [k for k, shapes in fewer.items() if shapes[0][0] == size]
            if turned:
                raise ValueError(
                    f"{WHO}: the blocks of depths {turned} have their samples in another dimension than the first; expected"
                    " (B, ...). Let attention be batch_first, take them out of depths, or name other blocks by layers=."
                )

    def _outputs(self, step: Step, batch: Any, depths: Sequence[int]) -> dict[int, list[Any]]:
        """The shapes of what the blocks of these depths return in a forward pass, or what it is where it cannot be mixed."""
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
        """That of Mixup, so that both draw the same."""
        return self.session.generator("Mixup", step.global_step, step.batch_idx, self.session.rank)

    @override
    def mix(self, inputs: list[Tensor], partner: Tensor, generator: Generator) -> tuple[list[Tensor], Tensor]:
        depths = self._running()
        if not depths:  # none of the blocks runs in this step, and it is as it was
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
        """``proceed(batch)`` with hidden states mixed as was drawn, in what its backward pass runs again too."""
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
                f"{WHO}: the block of depth {self._depth}, a {type(block).__name__}, was called {hook.calls} times in a step;"
                " expected once, as in the first batch. Switch off what passes over blocks in training, or name others by"
                " layers=."
            )
        return output

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "depth": self._depth}
