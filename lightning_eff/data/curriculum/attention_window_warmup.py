"""Attention-window warm-up: each token sees few others at first, and more as training goes on (Jordan et al. 2024)."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch import Callback
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._needs.needs import Need
from lightning_eff._core._samples.scoring import agree
from lightning_eff._core.batches import num_samples
from lightning_eff._core.losses import loss_of
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control, Technique
from lightning_eff.data.curriculum._attention_calls import WindowedAttention

WHO = "AttentionWindowWarmup"


def window_at(u: float, length: int, *, start: int, until: float, multiple_of: int) -> int:
    """``w(u) = m floor((start + (L - start) u / until) / m)``, at least ``start`` and at most L; L from ``until`` on."""
    if u >= until or length <= start:
        return length
    target = start + (length - start) * u / until
    return max(start, min(length, int(target) // multiple_of * multiple_of))


def _narrow_throughout(technique: "AttentionWindowWarmup") -> Mapping[str, Callback]:
    """The window at which it starts, for the whole run."""
    if technique.neutral:
        return {}
    kept = {name: getattr(technique, name) for name in ("start", "multiple_of", "evaluate")}
    return {f"a window of {technique.start} throughout": NarrowAttention(**kept)}


def _pointless(profile: RunProfile) -> str | None:
    if profile.sequence_length is None:
        return "samples are no sequences"
    if profile.sequence_length < 256:
        return f"in sequences of {profile.sequence_length} tokens attention costs little"
    return None


def _from_shares(cls: Any, values: Mapping[str, Any], profile: RunProfile) -> Any:
    """``start`` is a share of the length, down to a multiple of 16."""
    start = max(16, int(values["start"] * (profile.sequence_length or 0)) // 16 * 16)
    return cls(**{**values, "start": start, "multiple_of": 16})


class AttentionWindowWarmup(Technique):
    """Let each query see the keys of a window of w tokens alone, with w growing from ``start`` to the whole sequence.

    Sees keys at ``0 <= i - j < w`` in causal attention, at ``|i - j| < w`` in attention to both sides, itself included.
    At the share ``u`` of the budget ``w = start + (L - start) u / until``, down to a multiple of ``multiple_of``, for
    sequences of L tokens; from ``until`` on, and wherever w reaches L, the call is the plain one, bit for bit. Within
    an optimizer step w stays.

    It acts on the self-attention of the unchanged module: calls of ``F.scaled_dot_product_attention`` (Hugging Face's
    "sdpa" among them), ``nn.MultiheadAttention``, and softmax over scores (B, H, L, L) (Hugging Face's "eager"). Masks
    of the call, for padding, packing or biases, go along; a query that its mask leaves nothing within the window sees
    itself. A fused call on as many queries as keys is taken for self-attention; encoder-decoders of Hugging Face are
    refused.

    **What it saves.** Fused attention is computed in up to 16 chunks of queries, exactly, each with the keys that one
    of its queries sees and no others: ``c + w - 1`` of L (causal, c the chunk), or ``c + 2 (w - 1)``. A causal kernel
    that skips hidden blocks computes half of all by itself. On one core of a CPU, of (1, 4, 1024, 64), forward and
    backward, causal attention takes .5 of the plain call's time at w = 128, .7 at 256, and as much from about 512 on,
    since masks and chunks cost too; attention to both sides .6 at 128, .8 at 256 and more than the plain call's from
    400 on. Over a linear warm-up to the whole sequence this is little more than nothing, and attention is a part of a
    step alone; it pays with thousands of tokens, or with a window that grows late. nn.MultiheadAttention and softmax
    over scores are masked and save nothing at all. FlexAttention's block masks, compiled on a GPU, are what the
    record's time comes from; a module must be written for them, and such calls are not seen.

    It stands among the curricula, and not with what swaps layers: no parameter changes, what grows is how much of a
    sample a step uses, and it is over before the run is.

    Logged: ``window``, that of the last step's longest sequence.

    Args:
        start: tokens that a query sees at first, >= 1.
        until: fraction of the budget in [0, 1] from which on attention is whole; 0 is plain training.
        multiple_of: tokens, >= 1, of which windows between are multiples; a compiled kernel is tuned once for each.
        evaluate: what validation sees: ``"full"``, the plain module, as a checkpoint is used, or ``"present"``, the window
            that training has by then. ``"present"`` also holds in ``trainer.validate`` after a fit or with ``ckpt_path``.

    Raises:
        ValueError: if an argument is out of its range; at setup, if the module is an encoder-decoder of Hugging Face or
            compiled; at the first batch, on all ranks and before any weight has changed, if no attention is seen, or
            none is on more tokens than ``start``.

    Sources:
        Jordan et al. 2024, modded-nanogpt (the records of November 2024 and later), whose window grows by 64 or 128
        tokens to the run's end, causal, in FlexAttention.
    """

    saves: ClassVar[str] = "attention's products outside of the window, while it is narrow"
    paper: ClassVar[str] = "Jordan et al. 2024, github.com/KellerJordan/modded-nanogpt"
    constraints: ClassVar[str] = (
        "automatic optimization; self-attention by scaled_dot_product_attention, nn.MultiheadAttention or a softmax over"
        " its scores, not compiled; pays for long sequences only"
    )
    needs: ClassVar[Need] = Need.CALLS
    survey: ClassVar[Survey | None] = None
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"start": Choice((0.0625, 0.125, 0.25)), "until": Uniform(0.3, 1.0)}, _pointless, _from_shares
    )
    control: ClassVar[Control] = Control("the first window throughout, validated as the recipe is", _narrow_throughout)
    conflicts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("RandomLTD", "TokenDropping", "PatchDropout", "TokenMerging"),
            "of blocks on some of their tokens it cannot be told how far apart these stand",
        ),
        "SequencePacking": "the window would grow to the length of a row of several samples, and not of one",
        "RegionalCompilation": "attention inside of compiled blocks cannot be seen",
        **dict.fromkeys(
            ("ActivationCompression", "ACTPrecision"),
            "its attention runs again by the kernel of the plain call, which may take no mask",
        ),
    }
    needs_budget: ClassVar[bool] = True
    sparse_gradients: ClassVar[bool] = True
    _must_narrow: ClassVar[bool] = True  # a first window that holds all is refused

    def __init__(
        self,
        start: int = 64,
        *,
        until: float = 0.8,
        multiple_of: int = 64,
        evaluate: Literal["full", "present"] = "full",
    ) -> None:
        who = type(self).__name__
        for name, value in (("start", start), ("multiple_of", multiple_of)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{who}({name}={value!r}): expected an integer >= 1, a number of tokens.")
        if not 0.0 <= until <= 1.0:
            raise ValueError(
                f"{who}({until=}): expected a fraction of the budget in [0, 1], from which on attention is whole."
            )
        if evaluate not in ("full", "present"):
            raise ValueError(
                f"{who}({evaluate=}): expected 'full', the plain module, or 'present', the window of the moment."
            )
        self.start, self.until, self.multiple_of = start, until, multiple_of
        self.evaluate: Literal["full", "present"] = evaluate
        self._reset()

    def _reset(self) -> None:
        self._seen = False
        self._window = self._length = 0  # of the last step that looked
        self._steps = 0  # batches with a window below the length
        self._u = 0.0  # of the last batch, which validation goes by, also where it comes first in a resumed run

    @property
    @override
    def neutral(self) -> bool:
        return self.until == 0.0

    def window_of(self, length: int, u: float) -> int:
        """The window of sequences of ``length`` tokens at the share ``u`` of the budget."""
        return window_at(u, length, start=self.start, until=self.until, multiple_of=self.multiple_of)

    @override
    def on_open(self, session: Session) -> None:
        if self.evaluate == "present":  # after a fit, and from a checkpoint, the window that training had by then
            module = session.module
            session.patches.set(module, "validation_step", self._windowed(module.validation_step))

    @override
    def attach(self, session: Session) -> None:
        self._reset()
        session.chain.add(Stage.TRANSFORM, self._link)

    @override
    def on_model(self, session: Session) -> None:
        if not session.fitting:
            return
        for name, m in session.module.named_modules():
            at = f"the module {name!r} ({type(m).__name__})" if name else f"{type(m).__name__}"
            config: Any = getattr(m, "config", None)
            if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
                raise ValueError(
                    f"{type(self).__name__}: {at} is an encoder-decoder or has cross-attention, whose queries and keys may be"
                    " as many and yet of other tokens; expected self-attention alone. Take the technique out."
                )
            if getattr(m, "_compiled_call_impl", None) is not None or hasattr(m, "_orig_mod"):
                raise ValueError(
                    f"{type(self).__name__}: {at} is compiled, and attention in compiled code cannot be seen; expected a"
                    " module that is not. Train it uncompiled, or take the technique out."
                )

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        self._u = session.progress.u

    def _mode(self) -> WindowedAttention:
        u = self._u
        return WindowedAttention(lambda length: self.window_of(length, u))

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        if not self._seen:
            self._look(step, batch)
        if self._u >= self.until:
            self._window = self._length
            return proceed(batch)
        mode = self._mode()
        mode.__enter__()
        try:
            output = proceed(batch)
        except BaseException:
            mode.__exit__(None, None, None)
            raise
        if torch.is_grad_enabled():  # gradient checkpointing runs attention again in the backward pass
            self.session.when_step_ends(lambda: mode.__exit__(None, None, None))
            self._note(mode)
        else:
            mode.__exit__(None, None, None)
        return output

    def _note(self, mode: WindowedAttention) -> None:
        if mode.lengths:
            self._length = max(mode.lengths)
            self._window = self.window_of(self._length, self._u)
            self._steps += self._window < self._length

    def _look(self, step: Step, batch: Any) -> None:
        """See in the first batch, alike on all ranks, by a pass that leaves no trace, that there is something to do."""
        who, problem, mode = type(self).__name__, None, self._mode()

        def around(run: Proceed, batch: Any) -> Any:
            with mode:
                return run(batch)

        ready = loss_of(step.forward_only(batch, num_samples(batch), around, transform=False)) is not None
        self._length = max(mode.lengths, default=0)
        if not mode.lengths and ready:  # a step that is skipped tells nothing
            beside = f" ({mode.others} calls have queries of other tokens than their keys)" if mode.others else ""
            problem = ValueError(
                f"{who}: saw no self-attention in training_step{beside}; expected calls of"
                " F.scaled_dot_product_attention on as many queries as keys, nn.MultiheadAttention, or a softmax over scores"
                " (B, H, L, L), outside of compiled code. Hugging Face's models take attn_implementation='sdpa'. Or take the"
                " technique out."
            )
        elif ready and self._must_narrow and max(mode.lengths) <= self.start:
            problem = ValueError(
                f"{who}(start={self.start}): attention in the first batch is on {max(mode.lengths)} tokens, all of which the"
                " first window holds; expected more. Lower start, or take the technique out."
            )
        self._seen = all(agree(self.session, problem, ready))

    def _windowed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def validation_step(*args: Any, **kwargs: Any) -> Any:
            has_trained = self.session.fitting or self._seen
            if self._u >= self.until or not has_trained:
                return original(*args, **kwargs)
            with self._mode():
                return original(*args, **kwargs)

        validation_step.__wrapped__ = inspect.unwrap(original)  # pyright: ignore[reportAttributeAccessIssue]
        return validation_step

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"window": self._window}

    @override
    def summary(self) -> str:
        if not self._length:
            return "no step taken"
        end = "the whole" if self._window == self._length else f"a window of {self._window:,}"
        return f"{end} of {self._length:,} tokens seen in the end, after {self._steps:,} batches with less"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"seen": self._seen, "window": self._window, "length": self._length, "steps": self._steps, "u": self._u}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._seen, self._window = state_dict["seen"], state_dict["window"]
        self._length, self._steps, self._u = state_dict["length"], state_dict["steps"], state_dict["u"]


class NarrowAttention(AttentionWindowWarmup):
    """Train in the window with which :class:`AttentionWindowWarmup` starts, throughout: its control, and not exported.

    Args:
        start: the window, in tokens.
        multiple_of: as of the warm-up.
        evaluate: as of the warm-up.

    Raises:
        ValueError: as the warm-up does, but for a window that holds all.
    """

    saves: ClassVar[str] = "attention's products outside of the window, throughout"
    search_space: ClassVar[SearchSpace | None] = None
    control: ClassVar[Control] = Control("itself the control of AttentionWindowWarmup")
    needs_budget: ClassVar[bool] = False
    _must_narrow: ClassVar[bool] = False

    def __init__(self, *, start: int, multiple_of: int = 64, evaluate: Literal["full", "present"] = "full") -> None:
        super().__init__(start=start, until=1.0, multiple_of=multiple_of, evaluate=evaluate)
        self.until = float("inf")  # never reached, also where u = 1

    @override
    def window_of(self, length: int, u: float) -> int:
        return min(self.start, length)
