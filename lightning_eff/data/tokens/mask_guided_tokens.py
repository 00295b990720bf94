"""MG-ViT: blocks run on the patches that Grad-CAM finds to matter, and the others bypass them (Chen et al. 2022)."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._run.checks import is_checkpointed_reentrantly
from lightning_eff._core._tokens.checking import CannotTake, token_dim
from lightning_eff._core._tokens.inputs import Kept, mapped
from lightning_eff._core._tokens.window import At, Tokens
from lightning_eff._core.batches import num_samples
from lightning_eff._core.blocks import hidden_of
from lightning_eff._core.losses import loss_of
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step, looking
from lightning_eff._core.technique import Control, Technique
from lightning_eff.data.tokens._patches import Layout, find_patches, handled, keep
from lightning_eff.data.tokens._share import Share

WHO = "MaskGuidedTokens"
_LAST = 1_000_000  # of its stage: on the samples that others chose
_BOTH = "both choose the tokens that blocks compute"
_PLACES = "it goes by where tokens stand, or by how many there are"


def grad_cam(a: Tensor, g: Tensor) -> Tensor:
    """``L_i = sum_k alpha_k A_ik`` with ``alpha_k = (1/N) sum_i dy/dA_ik``; shape (B, N).

    Grad-CAM's ReLU is left out: it would make all patches alike that speak against the label, and only the order counts here.

    Args:
        a: activations ``A`` of the patches, (B, N, D).
        g: the gradient of what is looked for in them, ``dy/dA``, of the same shape.
    """
    alpha = g.float().mean(dim=1, keepdim=True)
    return (alpha * a.float()).sum(dim=-1)


def masked_in(cam: Tensor, count: int) -> Tensor:
    """The places of the ``count`` patches of the largest ``L_i``, ascending, (B, count); of equal ones the first."""
    return cam.argsort(dim=1, descending=True, stable=True)[:, :count].sort(dim=1).values


def kept_patches(count: int, share: float) -> int:
    """``round(keep N)`` of N patches, at least 1."""
    return max(round(share * count), 1)


def _pointless(profile: RunProfile) -> str | None:
    if profile.image_side is None:
        return "samples are no images"
    return (
        None
        if profile.num_blocks >= 3
        else "no stack of at least three blocks was found, most of which leave patches out"
    )


class MaskGuidedTokens(Technique):
    """Let all blocks but the last run on the patches of each image that Grad-CAM finds to matter for its label.

    Of N patches the ``round(keep * N)`` are kept for which ``L_i = sum_k alpha_k A_ik`` is largest, with the activations ``A``
    that the last block gets, and ``alpha`` their mean gradient over patches: of ``-loss`` here, where Grad-CAM takes the score
    of a class, since an unchanged ``training_step`` tells no scores. Blocks from ``full_first`` on are called on these and on
    tokens that come of no image, such as class tokens; the others bypass them bit for bit as they are, which is the paper's
    residual path, and rejoin in the last ``full_last`` blocks. Masks, positions and tables go along. With ``keep=1``, a mask of
    ones, it is the plain network. Validation, test and prediction see all patches.

    It is for fine-tuning a trained network on few images: the network must know what matters. Where it is begun from random
    weights, masks are noise. To find them takes a forward pass on all patches and a backward pass through the last block, at
    each step with ``reuse=0``: about what leaving out half of the patches saves. With ``reuse=n`` a mask is used in n further
    epochs of its sample, by the data set's index: that saves, where images stay as they are. A crop or a flip that is drawn
    anew makes the mask one of other patches. Where an image has another size than when its mask was found, the step sees all
    of its patches, and the mask is found anew the next time.

    Logged: ``kept``, the patches of an image that blocks ran on in the last step, ``share``, their share of all, and ``found``,
    for how many batches so far masks were looked for.

    Args:
        keep: the share of the patches that is kept, in (0, 1]; 1 is plain training.
        reuse: in how many further epochs a sample's mask is used again, >= 0.
        full_first: blocks at the front that run on all patches, >= 0.
        full_last: blocks at the end that run on all patches, >= 0.
        layers: the blocks, as a path, a pattern (``"block_*"``) or a list of paths; None finds the longest stack.

    Raises:
        ValueError: if an argument is out of its range; at setup, if there is no stack, none of its blocks would leave patches
            out, or blocks are checkpointed with ``use_reentrant=True``; at the first batch, before any weight has changed, if
            it holds no images, none of the blocks' tokens comes of them, a block cannot be given fewer, the loss does not
            come of what the last block gets, ``keep`` leaves none of so few out, or ``reuse`` is set and the loader tells no
            indices.

    Sources:
        Chen et al. 2022, arXiv:2205.09995: the mask by Grad-CAM and the residual path. Ours: ``-loss`` for a score, as many
        patches of each image, and the network's own gradient as it is being tuned. Their choice of samples is not built.
    """

    saves: ClassVar[str] = "compute and activations of patches that do not matter, in all blocks but the last"
    paper: ClassVar[str] = "Chen et al. 2022, arXiv:2205.09995"
    constraints: ClassVar[str] = (
        "automatic optimization; images; a stack of blocks on (B, T, D) with positions added before it or handed in;"
        " a trained network"
    )
    survey: ClassVar[Survey | None] = Survey("MG-ViT", shen="3.2")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"keep": Choice((0.25, 0.5, 0.75)), "reuse": Choice((0, 4))}, _pointless
    )
    control: ClassVar[Control] = Control("the baseline for as many seconds; and RandomLTD, which chooses blindly")
    conflicts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("RandomLTD", "PatchDropout", "TokenDropping", "TokenMerging", "PartialTokenTraining", "SequencePacking"),
            _BOTH,
        ),
        **dict.fromkeys(("Linformer", "GatedPositionalAttention", "AttentionWindowWarmup", "NarrowAttention"), _PLACES),
        **dict.fromkeys(
            ("AutoProg", "EfficientTrain", "FixRes", "ProgressiveResizing"),
            "masks are found in passes of its own, in which images of other sizes are not provided for",
        ),
        **dict.fromkeys(("A3Attention", "DOTAAttention", "SangerAttention"), "it chooses keys by how many there are"),
        **dict.fromkeys(
            ("EfficientSAM", "KSAM"), "its passes are on some of the samples, and each has a mask of its own"
        ),
    }

    def __init__(
        self,
        keep: float = 0.5,
        *,
        reuse: int = 0,
        full_first: int = 0,
        full_last: int = 1,
        layers: str | Sequence[str] | None = None,
    ) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep <= 1:
            raise ValueError(
                f"{WHO}({keep=}): expected a share of the patches in (0, 1], that which is kept. 0.5 halves the work of most"
                " blocks; 1 is plain training."
            )
        for name, value, what in (
            ("reuse", reuse, "epochs"),
            ("full_first", full_first, "blocks"),
            ("full_last", full_last, "blocks"),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{WHO}({name}={value!r}): expected an integer >= 0, a number of {what}.")
        self.keep, self.reuse, self.full_first, self.full_last, self.layers = keep, reuse, full_first, full_last, layers
        self._reset()

    def _reset(self) -> None:
        self._layout: Layout | None = None
        self._masks: Tensor | None = None  # of this micro-batch, the places of what is kept, (B, k)
        self._full = 0  # of how many tokens
        self._held: dict[int, tuple[int, int, Tensor]] = {}  # by index: the epoch, of how many tokens, places (k,)
        self._found = 0
        self._busy = False
        self._share = Share()  # of patches
        self._where = ""

    @property
    @override
    def neutral(self) -> bool:
        return self.keep == 1

    @override
    def attach(self, session: Session) -> None:
        self._reset()
        self._tokens = Tokens(
            session,
            WHO,
            self._choose,
            first=self.full_first,
            stop=-self.full_last or None,
            per_sample=True,
        )
        session.chain.add(Stage.CHOOSE, self._find, order=_LAST)
        session.chain.add(Stage.TRANSFORM, self._link)
        if self.reuse:
            session.loaders.told_to = session.loaders.told_to or WHO

    @override
    def on_model(self, session: Session) -> None:
        if not session.fitting:
            return
        if is_checkpointed_reentrantly(session.module.modules()):
            raise ValueError(
                f"{WHO}: the module's blocks are checkpointed with use_reentrant=True; expected use_reentrant=False, because"
                " masks come of gradients that are taken by torch.autograd.grad. Set that."
            )
        self._where = str(self._tokens.find(self.layers))

    # -- the masks

    def _find(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        self._masks = None
        if not self._tokens.stack.running():
            return proceed(batch)
        size = num_samples(batch)
        if not self._remembered(step, size):
            if self._layout is None:
                self._first(step, batch)
                if self._layout is None:
                    return proceed(batch)
            self._busy = True
            try:
                found = self._cam(step, batch, size)
            finally:
                self._busy = False
            if found is not None:
                self._note(step, *found)
        return proceed(batch)

    def _first(self, step: Step, batch: Any) -> None:
        """Find out which tokens are patches, on the batch as the other links change it, unless the step skips the batch."""
        given: list[Any] = []

        def around(run: Proceed, batch: Any) -> Any:
            given.append(batch)
            return run(batch)

        problem: ValueError | None = None
        self._busy = True
        try:
            output = step.forward_only(batch, num_samples(batch), around)
            if loss_of(output) is not None:
                generator = self.session.generator(WHO, "patches")
                self._layout = find_patches(step, given[0], self._tokens.stack, generator, who=WHO)
                self._check_indices(step, num_samples(batch))
        except CannotTake as error:
            problem = ValueError(
                f"{WHO}: block 0 of {self._where} cannot be given fewer of its tokens: {error}. Name another stack by"
                " layers=, or take the technique out."
            )
        except ValueError as error:
            problem = error
        finally:
            self._busy = False
        for rank, text in enumerate(self.session.replicas.everyone(None if problem is None else str(problem))):
            if text is not None and problem is None:
                raise ValueError(f"On rank {rank}: {text}")
        if problem is not None:
            raise problem

    def _check_indices(self, step: Step, size: int) -> None:
        if self.reuse and step.indices is None:
            raise ValueError(
                f"{WHO}(reuse={self.reuse}): it is not known which samples a batch holds, because"
                f" {self.session.loaders.why_unknown}. Pass a torch.utils.data.DataLoader over a dataset with __getitem__ and"
                " __len__, or set reuse=0."
            )
        if self.reuse and self._indices(step, size) is None:
            raise ValueError(
                f"{WHO}(reuse={self.reuse}): the loader tells {len(step.indices or [])} indices"
                f" for a batch of {size} samples; expected one integer for each, by which its mask is known again. Give the"
                " loader a map-style data set, a batch_size and a collate_fn that makes one sample of each index, or set"
                " reuse=0."
            )

    def _indices(self, step: Step, size: int) -> list[int] | None:
        known = step.indices
        if known is None or len(known) != size or not all(isinstance(i, int) for i in known):
            return None
        return known

    def _remembered(self, step: Step, size: int) -> bool:
        """Whether all masks of the batch are known, and not too old: then they are taken."""
        indices, now = self._indices(step, size), self.session.trainer.current_epoch
        if not self.reuse or indices is None:
            return False
        held = [self._held.get(i) for i in indices]
        if any(one is None or now - one[0] > self.reuse for one in held):
            return False
        known = [one for one in held if one is not None]
        if len({(tokens, len(places)) for _, tokens, places in known}) > 1:
            return False
        self._full, self._masks = known[0][1], torch.stack([places for _, _, places in known])
        return True

    def _cam(self, step: Step, batch: Any, size: int) -> tuple[Tensor, int] | None:
        """Each token's ``L_i``, (B, T), by a pass whose graph begins at the last block; None where the step skips the batch."""
        cut: list[Tensor] = []
        *before, last = self._tokens.stack.running()
        dims: list[int] = []

        def from_here(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden = hidden_of(args, kwargs)
            leaf = hidden.detach().requires_grad_()
            if not cut:
                cut.append(leaf)
                dims.append(token_dim(hidden, num_samples(step.given)))
            args, kwargs = mapped((args, kwargs), lambda _, value: leaf if value is hidden else value)
            with torch.enable_grad():
                return run(*args, **kwargs)

        def without(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            with torch.no_grad():
                return run(*args, **kwargs)

        scaler = getattr(self.session.trainer.precision_plugin, "scaler", None)
        factor = 1.0 if scaler is None else float(scaler.get_scale())
        with ExitStack() as stack:
            for block in before:
                stack.enter_context(handled(block, without))
            stack.enter_context(handled(last, from_here))
            found = step.gradients(batch, size, cut, factor=factor)
        if found is None:
            return None
        if not found or found[0] is None:
            raise ValueError(
                f"{WHO}: the loss does not come of what the last block of {self._where} gets, in a way that gradients take;"
                " expected one that does. Name the stack whose output the head reads by layers=, or take the technique out."
            )
        a, g = (t if dims[0] == 1 else t.transpose(0, 1) for t in (cut[0].detach(), -found[0]))
        layout, tokens = self._layout, a.shape[1]
        assert layout is not None
        patches = slice(layout.before, tokens - layout.after)
        return grad_cam(a[:, patches], g[:, patches]), tokens

    def _note(self, step: Step, cam: Tensor, tokens: int) -> None:
        layout = self._layout
        assert layout is not None
        count = cam.shape[1]
        kept = kept_patches(count, self.keep)
        if self._found == 0 and kept == count:
            raise ValueError(
                f"{WHO}(keep={self.keep:g}): {self._where} gets {count} patches of an image, of which none would be left out;"
                " expected one or more. Lower keep, or take the technique out."
            )
        self._found += 1
        self._full = tokens
        self._masks = masked_in(cam, kept).cpu()
        indices = self._indices(step, len(cam))
        if self.reuse and indices is not None:
            now = self.session.trainer.current_epoch
            self._held.update({i: (now, tokens, row.clone()) for i, row in zip(indices, self._masks, strict=True)})

    # -- the step

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        if self._busy or looking() or self._masks is None:
            return proceed(batch)
        return self._tokens.run(step, batch, proceed)

    def _choose(self, at: At) -> Kept | None:
        masks, layout = self._masks, self._layout
        if masks is None or layout is None or at.block >= self._tokens.stack.active - self.full_last:
            return None
        size, tokens = at.hidden.shape[:2]
        count = tokens - layout.before - layout.after
        if size != len(masks):
            raise ValueError(
                f"{WHO}: block {at.block} of {self._where} gets {size} samples of a batch of {len(masks)}; expected as many,"
                " since each has a mask of its own. Take the technique out, or what makes others of the samples."
            )
        if tokens != self._full:  # of another size than when the mask was found
            self._share.note(count, count)
            self._held = {}
            return None
        self._share.note(masks.shape[1], count)
        return Kept(keep(masks, layout, tokens))

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        self._share.end_batch()
        self._masks = None

    # -- what it tells and keeps

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**self._share.report(), "found": self._found}

    @override
    def summary(self) -> str:
        if not self._share.batches:
            return "no step taken"
        return (
            f"{self._share.mean:.1%} of patches seen on average by most of {self._where}, by masks that were looked for in"
            f" {self._found:,} of {self._share.batches:,} batches"
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        session = self._session or self._past
        own = [[i, epoch, tokens, places] for i, (epoch, tokens, places) in self._held.items()]
        return {
            "share": self._share.state_dict(),
            "found": self._found,
            "layout": None if self._layout is None else [self._layout.before, self._layout.after],
            "held": [own] if session is None or not self.reuse else session.gather(own),
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._share.load_state_dict(state_dict["share"])
        self._found, held, layout = state_dict["found"], state_dict["held"], state_dict["layout"]
        self._layout = None if layout is None else Layout(*layout)
        session = self._session
        own = held[session.rank] if session is not None and len(held) == session.replicas.count else []
        self._held = {i: (epoch, tokens, places) for i, epoch, tokens, places in own}
