"""MG-ViT: most blocks compute only the patches that matter according to Grad-CAM (Chen et al. 2022)."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Fraction, Layers
from lightning_eff._core._run.checks import is_checkpointed_reentrantly
from lightning_eff._core._tokens.checking import CannotTake, token_dim
from lightning_eff._core._tokens.inputs import Kept, mapped
from lightning_eff._core._tokens.window import At, Tokens
from lightning_eff._core.batches import num_samples
from lightning_eff._core.blocks import hidden_of
from lightning_eff._core.losses import loss_of
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step, looking
from lightning_eff._core.technique import Control
from lightning_eff.data.tokens._patches import Layout, find_patches, handled, keep
from lightning_eff.data.tokens._share import ComputesFewerTokens, Share

WHO = "MaskGuidedTokens"
_LAST = 1_000_000  # the last of its stage, after the techniques that choose samples
_BOTH = "both choose the tokens that blocks compute"
_PLACES = "it depends on the positions or the number of tokens"


def grad_cam(a: Tensor, g: Tensor) -> Tensor:
    """Return ``L_i = sum_k alpha_k A_ik`` with ``alpha_k = (1/N) sum_i dy/dA_ik``, shape (B, N).

    Grad-CAM's ReLU is omitted: it would make all patches equal that speak against the label, and only the order matters here.

    Args:
        a: activations ``A`` of the patches, (B, N, D).
        g: the gradient ``dy/dA`` of the target quantity, same shape.
    """
    alpha = g.float().mean(dim=1, keepdim=True)
    return (alpha * a.float()).sum(dim=-1)


def masked_in(cam: Tensor, count: int) -> Tensor:
    """Return the places of the ``count`` patches with the largest ``L_i`` in order, (B, count); ties go to the first."""
    return cam.argsort(dim=1, descending=True, stable=True)[:, :count].sort(dim=1).values


def kept_patches(count: int, share: float) -> int:
    """Return ``round(keep N)`` of N patches, at least 1."""
    return max(round(share * count), 1)


def _pointless(profile: RunProfile) -> str | None:
    if profile.image_side is None:
        return "samples are not images"
    return None if profile.num_blocks >= 3 else "found no stack of three or more blocks"


class MaskGuidedTokens(ComputesFewerTokens):
    """Fine-tune a vision transformer on the patches of each image that matter for its label, found by Grad-CAM.

    Of N patches, the ``round(keep * N)`` with the largest ``L_i = sum_k alpha_k A_ik`` are kept. ``A`` is the input of the last
    block, and ``alpha`` the mean over patches of the gradient of ``-loss`` in it. (Grad-CAM uses a class score, which an
    unchanged ``training_step`` does not expose.) The blocks from ``full_first`` on compute these patches and the tokens that
    do not come from the image, such as class tokens. The others bypass them unchanged, the paper's residual path, and return in
    the last ``full_last`` blocks. Masks, positions and tables are selected with the tokens. Validation, test and prediction see
    all patches.

    Use it to fine-tune a trained network on few images. From random weights, the masks are noise. Finding masks takes a forward
    pass on all patches and a backward pass through the last block. With ``reuse=0`` this happens at each step, and costs about
    what dropping half of the patches saves. With ``reuse=n``, a mask serves n further epochs of its sample, by the dataset's
    index. This pays off if images stay the same; after a random crop or flip, the mask belongs to other patches. An image whose
    size changed is computed in full, and gets a new mask the next time.

    It logs ``kept``, the patches per image in the last step, ``share``, their fraction, and ``found``, the number of batches in
    which masks were computed.

    Args:
        keep: the fraction of the patches to keep. 1 is plain training.
        reuse: the number of further epochs in which a sample's mask is used again.
        full_first: the number of blocks at the front that compute all patches.
        full_last: the number of blocks at the end that compute all patches.
        layers: the blocks, as a dotted path, a pattern (``"block_*"``) or a list of paths. None finds the longest stack.

    Raises:
        ValueError: for a value out of range. At setup, if there is no stack of blocks, no block would drop patches, or blocks
            are checkpointed with ``use_reentrant=True``. At the first batch, before any weight changes, if there are no
            images, no token of the blocks comes from them, a block cannot work on fewer tokens, the loss does not depend on
            the input of the last block, ``keep`` would drop no patch, or ``reuse`` is set and the loader has no indices.

    Example:
        >>> trainer = L.Trainer(max_epochs=20, callbacks=[MaskGuidedTokens(0.5, reuse=4)])

    References:
        Chen et al. 2022, arXiv:2205.09995: the Grad-CAM mask and the residual path. Different here: ``-loss`` instead of a
        score, the same number of patches in each image, and the gradient of the network that is being trained. Their choice of
        samples is not implemented.
    """

    saves = "compute and activations of unimportant patches, in all blocks but the last"
    paper = "Chen et al. 2022, arXiv:2205.09995"
    constraints = (
        "needs images, a trained network, and a stack of blocks on (B, T, D) with positions added before it or passed to it;"
        " automatic optimization"
    )
    search_space = SearchSpace({"keep": Choice((0.25, 0.5, 0.75)), "reuse": Choice((0, 4))}, _pointless)
    control = Control("the baseline for the same time; and RandomLTD, which chooses at random")
    conflicts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("RandomLTD", "PatchDropout", "TokenDropping", "TokenMerging", "PartialTokenTraining", "SequencePacking"),
            _BOTH,
        ),
        **dict.fromkeys(("Linformer", "GatedPositionalAttention", "AttentionWindowWarmup", "NarrowAttention"), _PLACES),
        **dict.fromkeys(
            ("AutoProg", "EfficientTrain", "FixRes", "ProgressiveResizing"),
            "it finds masks in extra passes, which do not support changing image sizes",
        ),
        **dict.fromkeys(("A3Attention", "DOTAAttention", "SangerAttention"), "it chooses keys by their number"),
        **dict.fromkeys(
            ("EfficientSAM", "KSAM"), "its passes use a subset of the samples, and each sample has its own mask"
        ),
    }
    neutral_at: ClassVar[Mapping[str, Any]] = {"keep": 1}

    def __init__(
        self,
        keep: Annotated[float, Fraction(above=0)] = 0.5,
        *,
        reuse: Annotated[int, Count(at_least=0)] = 0,
        full_first: Annotated[int, Count(at_least=0)] = 0,
        full_last: Annotated[int, Count(at_least=0)] = 1,
        layers: Layers | None = None,
    ) -> None:
        self.keep, self.reuse, self.full_first, self.full_last, self.layers = keep, reuse, full_first, full_last, layers

    def _reset(self) -> None:
        self._layout: Layout | None = None
        self._masks: Tensor | None = None  # the kept places of this micro-batch, (B, k)
        self._full = 0  # the number of tokens for these masks
        self._held: dict[int, tuple[int, int, Tensor]] = {}  # by index: the epoch, the number of tokens, places (k,)
        self._found = 0
        self._busy = False
        self._share = Share()  # of the patches
        self._where = ""

    @override
    def attach(self, session: Session) -> None:
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
                f"{WHO}: the module's blocks are checkpointed with use_reentrant=True, which torch.autograd.grad does not"
                " support. Set use_reentrant=False."
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
        """Find the patches among the tokens, on the batch that other techniques changed, unless the step skips it."""
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
                f"{WHO}: block 0 of {self._where} cannot be given fewer of its tokens: {error}. Name another stack with"
                f" layers=, or remove {WHO}."
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
                f"{WHO}(reuse={self.reuse}): the samples of a batch are unknown, because"
                f" {self.session.loaders.why_unknown}. Pass a torch.utils.data.DataLoader over a dataset with __getitem__ and"
                " __len__, or set reuse=0."
            )
        if self.reuse and self._indices(step, size) is None:
            raise ValueError(
                f"{WHO}(reuse={self.reuse}): the loader gives {len(step.indices or [])} indices for a batch of {size} samples,"
                " but each mask belongs to one index. Use a map-style dataset, a batch_size and a collate_fn that makes one"
                " sample per index, or set reuse=0."
            )

    def _indices(self, step: Step, size: int) -> list[int] | None:
        known = step.indices
        if known is None or len(known) != size or not all(isinstance(i, int) for i in known):
            return None
        return known

    def _remembered(self, step: Step, size: int) -> bool:
        """Use stored masks if all those of the batch are known and not too old; return whether they are."""
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
        """Compute each token's ``L_i``, (B, T), in a pass whose graph begins at the last block; None for a skipped batch."""
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
                f"{WHO}: the loss has no gradient in the input of the last block of {self._where}. Name the stack whose output"
                f" the head reads with layers=, or remove {WHO}."
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
                f"{WHO}(keep={self.keep:g}): {self._where} gets {count} patches per image and would keep all of them. Lower"
                f" keep, or remove {WHO}."
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
                f"{WHO}: block {at.block} of {self._where} gets {size} samples, but the batch has {len(masks)}, with a mask"
                f" each. Remove {WHO}, or the technique that changes the number of samples."
            )
        if tokens != self._full:  # the image had another size when its mask was found
            self._share.note(count, count)
            self._held = {}
            return None
        self._share.note(masks.shape[1], count)
        return Kept(keep(masks, layout, tokens))

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        self._share.end_batch()
        self._masks = None

    # -- reports and checkpoints

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**self._share.report(), "found": self._found}

    @override
    def summary(self) -> str:
        if not self._share.batches:
            return "made no step"
        return (
            f"most of {self._where} computed {self._share.mean:.1%} of the patches on average, with masks computed in"
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
