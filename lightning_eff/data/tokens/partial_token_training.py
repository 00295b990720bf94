"""Turbo: train on a part of each video's tokens, to classify it and to paint the tokens left out (Han et al. 2022)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core._run.checks import is_checkpointed_reentrantly
from lightning_eff._core._tokens.entering import EnteringTokens
from lightning_eff._core._tokens.inputs import Kept
from lightning_eff._core._tokens.window import At
from lightning_eff._core.losses import loss_of
from lightning_eff._core.optimizers import evaluates_anew
from lightning_eff._core.search_space import Choice, SearchSpace, Survey, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control, Technique
from lightning_eff.data.tokens._decoder import Painter, make_painter, reconstruction_loss
from lightning_eff.data.tokens._draw import draw
from lightning_eff.data.tokens._patches import Layout, find_layout, handled, keep, no_patches
from lightning_eff.data.tokens._share import Share
from lightning_eff.data.tokens._tubes import Tubes, embeddings_of, find_tubes, tubes

WHO = "PartialTokenTraining"


def kept_tubes(count: int, ratio: float) -> int:
    """``round(r N)`` of N tubes, at least 1."""
    return max(round(ratio * count), 1)


@dataclass
class Pass:
    """What one pass of a training step did: lists that run along its calls of the blocks.

    Attributes:
        given: what the embedding was called with, (B, C, ...).
        kept: the places among a sample's tubes, as they stand among tokens, that were kept, (B, k), and of how many.
        left: what the last block made of all tokens that it got, (B, k + others, D).
    """

    given: list[Tensor] = field(default_factory=list)
    kept: list[tuple[Tensor, int]] = field(default_factory=list)
    left: list[Tensor] = field(default_factory=list)


class PartialTokenTraining(Technique):
    """Drop a random part of each video's tokens once, as they enter the network; classify by the rest, and paint the dropped.

    Of the N tubes of a video ``round(r N)`` are kept, other ones of each video at each step, as
    :class:`PatchDropout` keeps patches: they carry their positions, and tokens that come of no pixels (a class token) stay.
    To the module's own loss ``reconstruction_weight`` times a second one is added, MAE's: a small decoder gets what the last
    block made of the kept tubes, and mask tokens at the places of the dropped ones, and paints the pixels of these; the loss
    is the mean squared error to the pixels as the embedding gets them, each tube's less their mean and divided by their
    deviation. So what was dropped teaches the network too, at the price of the decoder.

    Tubes are those of the module's convolution that embeds them: an ``nn.Conv3d`` of frames, height and width, or, of single
    images, an ``nn.Conv2d``, whose stride is its kernel. Which token is which tube is found with the first batch, by trial.
    Where what comes after the blocks needs all tokens, or blocks go by the places of theirs (as TimeSformer's, which take
    space and time apart, windows, and factorised attention), that is refused there.

    The decoder is the technique's own, and no part of the module: checkpoints load into the plain one, and its parameters and
    AdamW's state are kept with the technique's. It is stepped as the module's optimizer is, by the gradients of the same
    backward pass, averaged over ranks, at a constant rate; clipping looks at the module's gradients alone.

    Validation, test and prediction see every token, and no decoder.

    Logged: ``kept``, the tubes of a video that the last step saw, ``share``, their share of all, and with a decoder
    ``reconstruction``, its loss in the last step.

    Args:
        ratio: the share ``r`` of the tubes that are kept, in (0, 1]; 1 is plain training.
        reconstruction_weight: of the second loss, >= 0; 0 makes no decoder.
        decoder_layers: how many, >= 1.
        decoder_width: of the decoder, even; None for half of the blocks', in whole heads of 32.
        decoder_lr: the rate of its AdamW, > 0.
        per_sample: keep other tubes of each video; where False, the same ones in all of a micro-batch, which needs no tables
            and masks of each video's own.
        embedding: dotted path of the convolution; None finds it.
        layers: the blocks, as a path, a pattern (``"block_*"``) or a list of paths; None finds the longest stack.

    Raises:
        ValueError: if an argument is out of its range; at setup, if there is no stack or no such convolution, or, with a
            decoder, blocks are checkpointed reentrantly or the optimizer evaluates the loss anew within its step; at the first
            batch, before any weight has changed, if it holds no videos or images, tokens are no tubes of them, a block or what
            comes after the blocks cannot do without some, or ``ratio`` keeps all of so few.

    Sources:
        Han et al. 2022, arXiv:2210.04889; the decoder and its loss: He et al. 2021, arXiv:2111.06377 (MAE), and its half
        width: Tong et al. 2022, arXiv:2203.12602 (VideoMAE).
    """

    saves: ClassVar[str] = "compute and activations of the dropped tubes in every block; costs a small decoder"
    paper: ClassVar[str] = "Han et al. 2022, arXiv:2210.04889"
    constraints: ClassVar[str] = (
        "automatic optimization; videos or images that a convolution cuts into tubes side by side; a stack of blocks on"
        " (B, T, D) with positions added before it or handed in; a head on class tokens or on the mean of all"
    )
    survey: ClassVar[Survey | None] = Survey("token masking (Turbo)", zhuang="2.2")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"ratio": Uniform(0.1, 0.75), "reconstruction_weight": Choice((0.0, 0.1, 1.0))}, no_patches
    )
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds with its learning rate decayed to zero; fewer frames throughout; and the same with"
        " reconstruction_weight=0, which tells whether the decoder pays for itself"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "RandomLTD": "both choose the tokens that blocks compute, and what one drops the other cannot draw from",
        **dict.fromkeys(
            ("PatchDropout", "TokenDropping", "TokenMerging", "SequencePacking"),
            "both choose the tokens that blocks compute",
        ),
        **dict.fromkeys(
            ("AttentionWindowWarmup", "NarrowAttention"),
            "of blocks on some of their tokens it cannot be told how far apart these stand",
        ),
    }

    def __init__(
        self,
        ratio: float = 0.25,
        *,
        reconstruction_weight: float = 1.0,
        decoder_layers: int = 1,
        decoder_width: int | None = None,
        decoder_lr: float = 1e-3,
        per_sample: bool = True,
        embedding: str | None = None,
        layers: str | Sequence[str] | None = None,
    ) -> None:
        if not 0.0 < ratio <= 1.0:
            raise ValueError(
                f"{WHO}({ratio=}): expected a share of the tubes in (0, 1], that which is kept. 0.25 computes a quarter of"
                " them; 1 is plain training."
            )
        if not 0.0 <= reconstruction_weight < math.inf:
            raise ValueError(f"{WHO}({reconstruction_weight=}): expected a finite number >= 0; 0 makes no decoder.")
        if isinstance(decoder_layers, bool) or not isinstance(decoder_layers, int) or decoder_layers < 1:
            raise ValueError(
                f"{WHO}({decoder_layers=}): expected an integer >= 1. reconstruction_weight=0 makes no decoder."
            )
        if decoder_width is not None and not (
            isinstance(decoder_width, int) and decoder_width > 0 and decoder_width % 2 == 0
        ):
            raise ValueError(f"{WHO}({decoder_width=}): expected an even integer > 0, or None.")
        if not 0.0 < decoder_lr < math.inf:
            raise ValueError(f"{WHO}({decoder_lr=}): expected a finite rate > 0, such as 0.001.")
        self.ratio = ratio
        self.reconstruction_weight = reconstruction_weight
        self.decoder_layers, self.decoder_width, self.decoder_lr = decoder_layers, decoder_width, decoder_lr
        self.per_sample = per_sample
        self.embedding = embedding
        self.layers = layers
        self._reset()

    def _reset(self) -> None:
        self._layout: Layout | None = None
        self._share = Share()  # of tubes
        self._where = ""
        self._tubes: Tubes | None = None
        self._painter: Painter | None = None
        self._saved: dict[str, Any] = {}  # of the decoder, until there is one
        self._pass: Pass | None = None
        self._last: float | Tensor = 0.0

    @property
    @override
    def neutral(self) -> bool:
        return self.ratio == 1.0

    # -- the run

    @override
    def attach(self, session: Session) -> None:
        self._reset()
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
                f"{WHO}: {name} holds no nn.Conv3d or nn.Conv2d whose stride is its kernel, without padding; expected one that"
                " embeds tubes of videos or patches of images. Set reconstruction_weight=0.0, which needs none, or take the"
                " technique out."
            )
        if self.embedding is not None and self.embedding not in found:
            raise ValueError(f"{WHO}(embedding={self.embedding!r}): expected one of {', '.join(map(repr, found))}.")
        if is_checkpointed_reentrantly(session.module.modules()):
            raise ValueError(
                f"{WHO}: blocks of {name} are checkpointed reentrantly, which hides from the decoder how their output was made;"
                " expected use_reentrant=False. Say so in gradient_checkpointing_enable, or set reconstruction_weight=0.0."
            )

    @override
    def on_optimizers(self, session: Session) -> None:
        anew = next((type(o).__name__ for o in session.optimizers if evaluates_anew(o)), None)
        if anew is not None and self.reconstruction_weight > 0.0:
            raise ValueError(
                f"{WHO}: the module's {anew} evaluates the loss anew within its step, and the decoder's steps would fall"
                " between; expected an optimizer that needs gradients alone, such as AdamW. Or set reconstruction_weight=0.0."
            )

    def _look(self, step: Step, batch: Any) -> None:
        generator = self.session.generator(WHO, "tubes")
        stack = self._tokens.stack
        self._layout = find_layout(step, batch, stack, generator, who=WHO)
        count = self._tokens.longest - self._layout.before - self._layout.after
        if kept_tubes(count, self.ratio) == count:
            raise ValueError(
                f"{WHO}(ratio={self.ratio:g}): {self._where} gets {count} tubes of a sample, of which all would be kept;"
                " expected one or more to be dropped. Lower ratio, or take the technique out."
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
            told = "; ".join(f"of {path!r}, {why}" for path, why in problems.items())
            raise ValueError(
                f"{WHO}: the tokens that {self._where} gets are no tubes of a convolution: {told}. Set"
                " reconstruction_weight=0.0, which needs to know no tubes, or take the technique out."
            )

    def _make_painter(self, found: Tubes, device: torch.device) -> None:
        """The same on all ranks, and as the checkpoint has it."""
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
            f"{WHO}: a decoder of {count:,} parameters paints tubes of {found.embedding.kernel_size} that {self._where} drops"
        )

    def _choose(self, at: At) -> Kept | None:
        assert self._layout is not None, "it was found with the first batch"
        size, tokens = at.hidden.shape[:2]
        count = tokens - self._layout.before - self._layout.after
        kept = kept_tubes(count, self.ratio)
        self._share.note(kept, count)
        if kept == count:  # of a smaller sample
            return None
        places = draw(count, kept, at.generator(), rows=size if self.per_sample else 1)
        if self._pass is not None and torch.is_grad_enabled():
            self._pass.kept.append((places, count))
        index = keep(places, self._layout, tokens)
        return Kept(index if self.per_sample else index[0])

    # -- what was dropped

    def _note_left(self, hidden: Tensor) -> None:
        if self._pass is not None and torch.is_grad_enabled():
            self._pass.left.append(hidden)

    def _note_given(self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._pass is not None and torch.is_grad_enabled():
            self._pass.given.append((*args, *kwargs.values())[0].detach())
        return run(*args, **kwargs)

    def _reconstruct(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        if self._tubes is None:  # no step has run the blocks yet
            return proceed(batch)
        self._pass = made = Pass()
        try:
            with handled(self._tubes.embedding, self._note_given):
                output = proceed(batch)
        finally:
            self._pass = None  # what gradient checkpointing runs again has been seen
        loss = loss_of(output)
        if loss is None or not made.kept:
            return output
        painted = self._painting(made)
        self._last = painted.detach()
        whole = loss + self.reconstruction_weight * painted.to(loss.dtype)
        return {**output, "loss": whole} if isinstance(output, Mapping) else whole

    def _painting(self, made: Pass) -> Tensor:
        """The loss of the decoder on what was dropped in a pass."""
        assert self._tubes is not None and self._painter is not None and self._layout is not None
        if not len(made.given) == len(made.kept) == len(made.left):
            raise ValueError(
                f"{WHO}: a training step called the embedding {len(made.given)} times, and the blocks {len(made.kept)} times on"
                f" fewer tokens, of which {len(made.left)} came to an end; expected as many of each. Set"
                " reconstruction_weight=0.0, or take the technique out."
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
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        self._share.end_batch()

    @override
    def detach(self, session: Session) -> None:
        self._tubes, self._pass = None, None

    # -- what it tells and keeps

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        painted = {"reconstruction": self._last} if self.reconstruction_weight > 0.0 else {}
        return {**self._share.report(), **painted}

    @override
    def summary(self) -> str:
        if not self._share.batches:
            return "no step taken"
        painted = f"; the dropped were painted with an error of {float(self._last):.3g}" if self._painter else ""
        return f"{self._share.mean:.1%} of tubes seen on average by {self._where}{painted}"

    @override
    def check_checkpoint(self, session: Session, state: dict[str, Any] | None) -> None:
        saved = (state or {}).get("decoder")
        here = [self.decoder_layers, self.decoder_width]
        if saved and self.reconstruction_weight > 0.0 and saved["settings"] != here:
            raise ValueError(
                f"{WHO}(decoder_layers={here[0]}, decoder_width={here[1]}): the checkpoint's decoder was made with"
                f" {saved['settings'][0]} and {saved['settings'][1]}; expected the same. Resume with these."
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
