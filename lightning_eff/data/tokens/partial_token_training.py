"""Turbo: train on a part of each video's tokens, and reconstruct the dropped ones (Han et al. 2022)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Fraction, Layers, Number, Text
from lightning_eff._core._run.checks import is_checkpointed_reentrantly
from lightning_eff._core._tokens.entering import EnteringTokens
from lightning_eff._core._tokens.inputs import Kept
from lightning_eff._core._tokens.window import At
from lightning_eff._core.losses import loss_of
from lightning_eff._core.optimizers import evaluates_anew
from lightning_eff._core.search_space import Choice, SearchSpace, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control
from lightning_eff.data.tokens._decoder import Painter, make_painter, reconstruction_loss
from lightning_eff.data.tokens._draw import draw
from lightning_eff.data.tokens._patches import Layout, find_layout, handled, keep, no_patches
from lightning_eff.data.tokens._share import ComputesFewerTokens, Share
from lightning_eff.data.tokens._tubes import Tubes, embeddings_of, find_tubes, tubes

WHO = "PartialTokenTraining"


def kept_tubes(count: int, ratio: float) -> int:
    """Return ``round(r N)`` of N tubes, at least 1."""
    return max(round(ratio * count), 1)


@dataclass
class Pass:
    """The record of one pass of a training step; the lists have one entry per call of the blocks.

    Attributes:
        given: the inputs of the embedding, (B, C, ...).
        kept: the kept places among a sample's tubes, in token order, (B, k), and the number of tubes.
        left: the outputs of the last block, (B, k + others, D).
    """

    given: list[Tensor] = field(default_factory=list)
    kept: list[tuple[Tensor, int]] = field(default_factory=list)
    left: list[Tensor] = field(default_factory=list)


class PartialTokenTraining(ComputesFewerTokens):
    """Train on a random subset of each video's tokens, and reconstruct the dropped ones with a small decoder.

    Of the N tubes of a video, ``round(r N)`` are kept, drawn anew for each video and step, as :class:`PatchDropout` keeps
    patches: tubes keep their positions, and tokens that do not come from pixels, such as a class token, stay. The loss of the
    module is extended by ``reconstruction_weight`` times that of MAE. A small decoder gets the last block's output for the kept
    tubes, and mask tokens for the dropped ones, whose pixels it predicts. Its loss is the mean squared error to each tube's
    pixels, normalized by their mean and standard deviation. The dropped tokens therefore train the network as well, at the cost
    of the decoder.

    Use it for video transformers, where most tokens are redundant: 0.25 computes a quarter of the tokens in every block.
    Validation, test and prediction see every token and run no decoder.

    Tubes are those of the convolution that embeds them: an ``nn.Conv3d`` over frames, height and width, or an ``nn.Conv2d`` for
    images, with a stride equal to its kernel. The first batch is used to match tokens and tubes. It is refused if the head
    needs all tokens, or if blocks depend on token positions (separate attention over space and time as in TimeSformer,
    windows).

    The decoder belongs to the technique, not to the module. Checkpoints load into the plain module, and the decoder's weights
    and AdamW state are stored with the technique. It steps with the module's optimizer, on gradients of the same backward pass,
    averaged over ranks, with a constant learning rate. Gradient clipping covers only the module.

    It logs ``kept``, the tubes per video in the last step, ``share``, their fraction, and, with a decoder, ``reconstruction``,
    its loss in the last step.

    Args:
        ratio: the fraction of the tubes to keep. 0.25 computes a quarter of them, and 1 is plain training.
        reconstruction_weight: the weight of the decoder's loss. 0 trains without a decoder.
        decoder_layers: the number of layers of the decoder.
        decoder_width: the width of the decoder, an even number. None is half of the blocks' width, in whole heads of 32.
        decoder_lr: the learning rate of the decoder's AdamW.
        per_sample: whether each video of a micro-batch gets its own draw. False uses the same places in all videos, which
            needs no tables and masks per video.
        embedding: the dotted path of the convolution. None finds it.
        layers: the blocks, as a dotted path, a pattern (``"block_*"``) or a list of paths. None finds the longest stack.

    Raises:
        ValueError: for a value out of range. At setup, if there is no stack of blocks or no such convolution. With a decoder,
            at setup, if blocks are checkpointed reentrantly or the optimizer evaluates the loss again within its step. At the
            first batch, before any weight changes, if there are no videos or images, tokens do not match tubes, a block or
            the head cannot work on fewer tokens, or ``ratio`` would keep all of them.

    Example:
        >>> trainer = L.Trainer(max_epochs=50, callbacks=[PartialTokenTraining(0.25)])

    References:
        Han et al. 2022, "Turbo Training with Token Dropout", arXiv:2210.04889. The decoder and its loss: He et al. 2021,
        arXiv:2111.06377 (MAE). Its width: Tong et al. 2022, arXiv:2203.12602 (VideoMAE).
    """

    saves = "compute and activations of the dropped tokens in every block, less a small decoder"
    paper = "Han et al. 2022, arXiv:2210.04889"
    constraints = (
        "needs videos or images embedded by a convolution without overlap, a stack of blocks on (B, T, D) with positions"
        " added before it or passed to it, and a head on class tokens or on the mean of all; automatic optimization"
    )
    search_space = SearchSpace(
        {"ratio": Uniform(0.1, 0.75), "reconstruction_weight": Choice((0.0, 0.1, 1.0))}, no_patches
    )
    control = Control(
        "the baseline for the same time with a learning rate that decays to zero; fewer frames throughout; and"
        " reconstruction_weight=0, which shows whether the decoder pays off"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "RandomLTD": "both choose the tokens that blocks compute",
        **dict.fromkeys(
            ("PatchDropout", "TokenDropping", "TokenMerging", "SequencePacking"),
            "both choose the tokens that blocks compute",
        ),
        **dict.fromkeys(
            ("AttentionWindowWarmup", "NarrowAttention"),
            "it needs the distances between tokens, which are unknown if some are dropped",
        ),
    }
    neutral_at: ClassVar[Mapping[str, Any]] = {"ratio": 1.0}

    def __init__(
        self,
        ratio: Annotated[float, Fraction(above=0)] = 0.25,
        *,
        reconstruction_weight: Annotated[float, Number(at_least=0)] = 1.0,
        decoder_layers: Annotated[int, Count()] = 1,
        decoder_width: Annotated[int, Count(at_least=2, even=True)] | None = None,
        decoder_lr: Annotated[float, Number(above=0)] = 1e-3,
        per_sample: bool = True,
        embedding: Annotated[str, Text("a dotted path of a module")] | None = None,
        layers: Layers | None = None,
    ) -> None:
        self.ratio = ratio
        self.reconstruction_weight = reconstruction_weight
        self.decoder_layers, self.decoder_width, self.decoder_lr = decoder_layers, decoder_width, decoder_lr
        self.per_sample = per_sample
        self.embedding = embedding
        self.layers = layers

    def _reset(self) -> None:
        self._layout: Layout | None = None
        self._share = Share()  # of the tubes
        self._where = ""
        self._tubes: Tubes | None = None
        self._painter: Painter | None = None
        self._saved: dict[str, Any] = {}  # the decoder's state, until there is one
        self._pass: Pass | None = None
        self._last: float | Tensor = 0.0

    # -- the run

    @override
    def attach(self, session: Session) -> None:
        self._tokens = EnteringTokens(
            session, WHO, self._choose, per_sample=self.per_sample, alike="set per_sample=False", also=self._look
        )
        session.chain.add(Stage.TRANSFORM, self._tokens.link)
        if self.reconstruction_weight > 0.0:
            self._tokens.on_left = self._note_left
            session.chain.add(Stage.REWEIGHT, self._reconstruct)

    @override
    def on_model(self, session: Session) -> None:
        if not session.fitting:
            return
        self._where = str(self._tokens.find(self.layers))
        if self.reconstruction_weight == 0.0:
            return
        name, found = type(session.module).__name__, embeddings_of(session.module)
        if not found:
            raise ValueError(
                f"{WHO}: {name} holds no nn.Conv3d or nn.Conv2d whose stride is its kernel, without padding, to embed tubes of"
                f" videos or patches of images. Set reconstruction_weight=0.0, which needs none, or remove {WHO}."
            )
        if self.embedding is not None and self.embedding not in found:
            raise ValueError(
                f"{WHO}(embedding={self.embedding!r}): this is not a convolution that embeds tubes. Use one of"
                f" {', '.join(map(repr, list(found)[:5]))}."
            )
        if is_checkpointed_reentrantly(session.module.modules()):
            raise ValueError(
                f"{WHO}: blocks of {name} are checkpointed reentrantly, which hides their graph from the decoder. Set"
                " use_reentrant=False in gradient_checkpointing_enable, or reconstruction_weight=0.0."
            )

    @override
    def on_optimizers(self, session: Session) -> None:
        anew = next((type(o).__name__ for o in session.optimizers if evaluates_anew(o)), None)
        if anew is not None and self.reconstruction_weight > 0.0:
            raise ValueError(
                f"{WHO}: the module's {anew} evaluates the loss again within its step, which the decoder's steps would disturb."
                " Use an optimizer that needs only gradients, such as AdamW, or set reconstruction_weight=0.0."
            )

    def _look(self, step: Step, batch: Any) -> None:
        generator = self.session.generator(WHO, "tubes")
        stack = self._tokens.stack
        self._layout = find_layout(step, batch, stack, generator, who=WHO)
        count = self._tokens.longest - self._layout.before - self._layout.after
        if kept_tubes(count, self.ratio) == count:
            raise ValueError(
                f"{WHO}(ratio={self.ratio:g}): {self._where} gets {count} tubes per sample and would keep all of them. Lower"
                f" ratio, or remove {WHO}."
            )
        problems: dict[str, str] = {}
        found_in = embeddings_of(step.module) if self.reconstruction_weight > 0.0 else {}
        for path, embedding in found_in.items():
            if self.embedding not in (None, path):
                continue
            found = find_tubes(step, batch, stack, self._layout, embedding, generator)
            if not isinstance(found, str):
                self._make_painter(found, step.module.device)
                return
            problems[path] = found
        if problems:
            reasons = "; ".join(f"{path!r}: {why}" for path, why in problems.items())
            raise ValueError(
                f"{WHO}: the tokens that {self._where} gets do not match the tubes of a convolution ({reasons}). Set"
                f" reconstruction_weight=0.0, which needs no tubes, or remove {WHO}."
            )

    def _make_painter(self, found: Tubes, device: torch.device) -> None:
        """Create the decoder, equal on all ranks, with the state of a checkpoint."""
        self._tubes = found
        self._painter = make_painter(
            found.dim,
            found.pixels,
            width=self.decoder_width,
            depth=self.decoder_layers,
            lr=self.decoder_lr,
            seed=self.session.seed,
            device=device,
        )
        if self._saved:
            ranks, rank = self._saved["gradients"], self.session.rank
            own = ranks[rank] if len(ranks) == self.session.replicas.count else []
            self._painter.load_state_dict(self._saved, own)
            self._saved = {}
        count = sum(p.numel() for p in self._painter.decoder.parameters())
        rank_zero_info(
            f"{WHO}: a decoder with {count:,} parameters reconstructs the dropped tubes of {found.embedding.kernel_size}"
        )

    def _choose(self, at: At) -> Kept | None:
        assert self._layout is not None, "the first batch finds it"
        size, tokens = at.hidden.shape[:2]
        count = tokens - self._layout.before - self._layout.after
        kept = kept_tubes(count, self.ratio)
        self._share.note(kept, count)
        if kept == count:  # a smaller sample
            return None
        places = draw(count, kept, at.generator(), rows=size if self.per_sample else 1)
        if self._pass is not None and torch.is_grad_enabled():
            self._pass.kept.append((places, count))
        index = keep(places, self._layout, tokens)
        return Kept(index if self.per_sample else index[0])

    # -- reconstruction

    def _note_left(self, hidden: Tensor) -> None:
        if self._pass is not None and torch.is_grad_enabled():
            self._pass.left.append(hidden)

    def _note_given(self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._pass is not None and torch.is_grad_enabled():
            self._pass.given.append((*args, *kwargs.values())[0].detach())
        return run(*args, **kwargs)

    def _reconstruct(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        if self._tubes is None:  # no step has run the blocks so far
            return proceed(batch)
        self._pass = made = Pass()
        try:
            with handled(self._tubes.embedding, self._note_given):
                output = proceed(batch)
        finally:
            self._pass = None  # recomputation by gradient checkpointing does not count
        loss = loss_of(output)
        if loss is None or not made.kept:
            return output
        painted = self._painting(made)
        self._last = painted.detach()
        whole = loss + self.reconstruction_weight * painted.to(loss.dtype)
        return {**output, "loss": whole} if isinstance(output, Mapping) else whole

    def _painting(self, made: Pass) -> Tensor:
        """Return the decoder's loss on the tubes that a pass dropped."""
        assert self._tubes is not None and self._painter is not None and self._layout is not None
        if not len(made.given) == len(made.kept) == len(made.left):
            raise ValueError(
                f"{WHO}: a training step called the embedding {len(made.given)} times, but the blocks {len(made.kept)} times on"
                f" fewer tokens, with {len(made.left)} outputs. Set reconstruction_weight=0.0, or remove {WHO}."
            )
        losses: list[Tensor] = []
        for given, (places, count), left in zip(made.given, made.kept, made.left, strict=True):
            size, rows = len(left), len(places)
            dropped = torch.ones(rows, count, dtype=torch.bool).scatter(1, places, False).nonzero()[:, 1].view(rows, -1)
            numbers = self._tubes.numbers(given)
            seen, missing = (numbers[which].expand(size, -1).to(left.device) for which in (places, dropped))
            pixels = tubes(given, self._tubes.embedding.kernel_size)
            pixels = pixels.gather(1, missing.unsqueeze(-1).expand(-1, -1, pixels.shape[-1]))
            hidden = left[:, self._layout.before :][:, : places.shape[1]]
            losses.append(reconstruction_loss(self._painter.decoder(hidden.float(), seen, missing), pixels))
        return torch.stack(losses).mean()

    # -- the decoder's steps

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._painter is not None:
            self._painter.step(trainer)

    @override
    def detach(self, session: Session) -> None:
        self._tubes, self._pass = None, None

    # -- reports and checkpoints

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        painted = {"reconstruction": self._last} if self.reconstruction_weight > 0.0 else {}
        return {**self._share.report(), **painted}

    @override
    def summary(self) -> str:
        if not self._share.batches:
            return "made no step"
        painted = f"; the last reconstruction error was {float(self._last):.3g}" if self._painter else ""
        return f"{self._where} computed {self._share.mean:.1%} of the tubes on average{painted}"

    @override
    def check_checkpoint(self, session: Session, state: dict[str, Any] | None) -> None:
        saved = (state or {}).get("decoder")
        here = [self.decoder_layers, self.decoder_width]
        if saved and self.reconstruction_weight > 0.0 and saved["settings"] != here:
            raise ValueError(
                f"{WHO}(decoder_layers={here[0]}, decoder_width={here[1]}): the checkpoint's decoder has"
                f" other settings. Resume with decoder_layers={saved['settings'][0]}, decoder_width={saved['settings'][1]}."
            )

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**self._share.state_dict(), "last": float(self._last), "decoder": self._decoder_state()}

    def _decoder_state(self) -> dict[str, Any]:
        if self._painter is None:
            return self._saved
        own = self._painter.gradients()
        return {
            **self._painter.state_dict(),
            "settings": [self.decoder_layers, self.decoder_width],
            "gradients": [own] if self._session is None else self._session.gather(own),
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._share.load_state_dict(state_dict)
        self._last = state_dict["last"]
        self._saved = state_dict["decoder"]
