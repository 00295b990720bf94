"""Attention-window warm-up: each token attends to few others at first, and to more later (Jordan et al. 2024)."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from lightning.pytorch import Callback
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Fraction
from lightning_eff._core._needs.needs import Need
from lightning_eff._core._samples.scoring import agree
from lightning_eff._core.batches import num_samples
from lightning_eff._core.losses import loss_of
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control, Technique
from lightning_eff.data.curriculum._attention_calls import WindowedAttention

WHO = "AttentionWindowWarmup"


def window_at(u: float, length: int, *, start: int, until: float, multiple_of: int) -> int:
    """Compute ``w(u) = m floor((start + (L - start) u / until) / m)`` in [start, L], and L from ``until`` on."""
    if u >= until or length <= start:
        return length
    target = start + (length - start) * u / until
    return max(start, min(length, int(target) // multiple_of * multiple_of))


def _narrow_throughout(technique: "AttentionWindowWarmup") -> Mapping[str, Callback]:
    """Train with the first window for the whole run."""
    if technique.neutral:
        return {}
    kept = {name: getattr(technique, name) for name in ("start", "multiple_of", "evaluate")}
    return {f"a window of {technique.start} throughout": NarrowAttention(**kept)}


def _pointless(profile: RunProfile) -> str | None:
    if profile.sequence_length is None:
        return "samples are not sequences"
    if profile.sequence_length < 256:
        return f"attention costs little in sequences of {profile.sequence_length} tokens"
    return None


def _from_shares(cls: Any, values: Mapping[str, Any], profile: RunProfile) -> Any:
    """Turn ``start`` from a fraction of the length into tokens, rounded down to a multiple of 16 (at least 16)."""
    start = max(16, int(values["start"] * (profile.sequence_length or 0)) // 16 * 16)
    return cls(**{**values, "start": start, "multiple_of": 16})


class AttentionWindowWarmup(Technique):
    """Limit attention to a window of tokens that grows from ``start`` to the whole sequence.

    A query at position i attends to keys at ``0 <= i - j < w`` in causal attention, and at ``|i - j| < w`` in bidirectional
    attention. At the used fraction ``u`` of the budget, ``w = start + (L - start) u / until`` for sequences of ``L`` tokens,
    rounded down to a multiple of ``multiple_of``. From ``until`` on, and wherever ``w`` reaches ``L``, attention is the plain
    call, bit for bit. The window stays the same within an optimizer step.

    It acts on the self-attention of the unchanged module: calls of ``F.scaled_dot_product_attention`` (including Hugging Face's
    "sdpa"), ``nn.MultiheadAttention``, and a softmax over scores (B, H, L, L) (Hugging Face's "eager"). The call's own masks
    for padding, packing or biases still apply. A query whose mask leaves nothing within the window attends to itself. A fused
    call with as many queries as keys is taken for self-attention, so encoder-decoders of Hugging Face are refused.

    Use it with thousands of tokens per sequence, or with a window that grows late; for less it saves little. Fused attention is
    computed exactly in up to 16 chunks of queries. A chunk of ``c`` queries uses only the keys that one of its queries sees:
    ``c + w - 1`` of ``L`` (causal) or ``c + 2 (w - 1)``. A causal kernel that skips hidden blocks already computes only
    half. On one CPU core with shape (1, 4, 1024, 64), forward and backward, causal attention takes 0.5 of the plain call's
    time at ``w = 128``, 0.7 at 256, and as much from about 512 on, because masks and chunks cost time too. Bidirectional
    attention takes 0.6 at 128, 0.8 at 256, and more than the plain call from 400 on. ``nn.MultiheadAttention`` and softmax
    over scores are only masked and save nothing. The speed of the modded-nanogpt record comes from FlexAttention's compiled
    block masks on a GPU, which a module must be written for. Calls of FlexAttention are not seen.

    It logs ``window`` (the window of the last step's longest sequence).

    Args:
        start: the number of tokens in the first window.
        until: the fraction of the budget from which on attention is whole. 0 is plain training.
        multiple_of: the number of tokens that windows in between are multiples of. A compiled kernel is tuned once per window.
        evaluate: the window in validation: ``"full"`` validates the plain module, as a checkpoint is used, and ``"present"``
            uses the window that training has by then, also in ``trainer.validate`` after a fit or with ``ckpt_path``.

    Raises:
        ValueError: for a value out of range. At setup, if the module is compiled or an encoder-decoder of Hugging Face. At the
            first batch, on all ranks and before any weight has changed, if no self-attention is found, or none has more tokens
            than ``start``.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[AttentionWindowWarmup(128, until=0.8)])

    References:
        Jordan et al. 2024, modded-nanogpt, github.com/KellerJordan/modded-nanogpt (records from November 2024 on), whose causal
        window grows by 64 or 128 tokens to the end of the run.
    """

    saves = "attention outside the window, while the window is small"
    paper = "Jordan et al. 2024, github.com/KellerJordan/modded-nanogpt"
    constraints = (
        "needs automatic optimization and self-attention by scaled_dot_product_attention, nn.MultiheadAttention or a softmax"
        " over its scores, not compiled; pays only for long sequences"
    )
    needs: ClassVar[Need] = Need.CALLS
    search_space = SearchSpace(
        {"start": Choice((0.0625, 0.125, 0.25)), "until": Uniform(0.3, 1.0)}, _pointless, _from_shares
    )
    control = Control("the first window throughout, validated as the recipe is", _narrow_throughout)
    conflicts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("RandomLTD", "TokenDropping", "PatchDropout", "TokenMerging"),
            "in blocks that run on some of their tokens, the distance between tokens is unknown",
        ),
        "SequencePacking": "the window would grow to the length of a packed row instead of a sample",
        "RegionalCompilation": "attention inside compiled blocks cannot be seen",
        **dict.fromkeys(
            ("ActivationCompression", "ACTPrecision"),
            "it runs attention again with the kernel of the plain call, which may not take a mask",
        ),
    }
    needs_budget: ClassVar[bool] = True
    sparse_gradients: ClassVar[bool] = True
    _must_narrow: ClassVar[bool] = True  # refuse a first window that covers the whole sequence
    neutral_at: ClassVar[Mapping[str, Any]] = {"until": 0.0}
    checkpointed = ("_seen", "_window", "_length", "_steps", "_u")
    stage = Stage.TRANSFORM

    def __init__(
        self,
        start: Annotated[int, Count()] = 64,
        *,
        until: Annotated[float, Fraction()] = 0.8,
        multiple_of: Annotated[int, Count()] = 64,
        evaluate: Literal["full", "present"] = "full",
    ) -> None:
        self.start, self.until, self.multiple_of = start, until, multiple_of
        self.evaluate: Literal["full", "present"] = evaluate

    def _reset(self) -> None:
        self._seen = False
        self._window = self._length = 0  # of the last step with attention
        self._steps = 0  # batches with a window below the length
        self._u = 0.0  # of the last batch, for validation, also if that comes first in a resumed run

    def window_of(self, length: int, u: float) -> int:
        """The window of sequences of ``length`` tokens at the used fraction ``u`` of the budget."""
        return window_at(u, length, start=self.start, until=self.until, multiple_of=self.multiple_of)

    @override
    def on_open(self, session: Session) -> None:
        if self.evaluate == "present":  # also after a fit and from a checkpoint
            module = session.module
            session.patches.set(module, "validation_step", self._windowed(module.validation_step))

    @override
    def on_model(self, session: Session) -> None:
        if not session.fitting:
            return
        for name, m in session.module.named_modules():
            at = f"the module {name!r} ({type(m).__name__})" if name else f"{type(m).__name__}"
            config: Any = getattr(m, "config", None)
            if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
                raise ValueError(
                    f"{type(self).__name__}: {at} is an encoder-decoder or has cross-attention, which looks like self-attention"
                    f" if there are as many queries as keys. Remove {type(self).__name__}."
                )
            if getattr(m, "_compiled_call_impl", None) is not None or hasattr(m, "_orig_mod"):
                raise ValueError(
                    f"{type(self).__name__}: {at} is compiled, and attention in compiled code cannot be seen. Train it without"
                    f" torch.compile, or remove {type(self).__name__}."
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
        """Check on the first batch that there is attention to limit, in a pass that leaves no trace, on all ranks."""
        who, problem, mode = type(self).__name__, None, self._mode()

        def around(run: Proceed, batch: Any) -> Any:
            with mode:
                return run(batch)

        ready = loss_of(step.forward_only(batch, num_samples(batch), around, transform=False)) is not None
        self._length = max(mode.lengths, default=0)
        if not mode.lengths and ready:  # a skipped step says nothing
            others = f" ({mode.others} calls have other queries than keys)" if mode.others else ""
            problem = ValueError(
                f"{who}: found no self-attention in training_step{others}: no F.scaled_dot_product_attention,"
                " nn.MultiheadAttention, or softmax over scores (B, H, L, L) outside compiled code. Load Hugging Face models"
                f" with attn_implementation='sdpa', or remove {who}."
            )
        elif ready and self._must_narrow and max(mode.lengths) <= self.start:
            problem = ValueError(
                f"{who}(start={self.start}): attention in the first batch has only {max(mode.lengths)} tokens, which all fit"
                f" into the first window. Use a smaller start, or remove {who}."
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
        end = f"{self._window:,} of {self._length:,} tokens at the end"
        return f"window of {end}, smaller than the sequence in {self._steps:,} batches"


class NarrowAttention(AttentionWindowWarmup):
    """Train with the first window of :class:`AttentionWindowWarmup` throughout, as its control. It is not exported.

    Args:
        start: the number of tokens in the window.
        multiple_of: as in the warm-up.
        evaluate: the window in validation, as in the warm-up.

    Raises:
        ValueError: as the warm-up does, except for a window that covers the whole sequence.
    """

    saves = "attention outside the window, throughout"
    search_space = None
    control = Control("itself the control of AttentionWindowWarmup")
    needs_budget: ClassVar[bool] = False
    _must_narrow: ClassVar[bool] = False

    def __init__(self, *, start: int, multiple_of: int = 64, evaluate: Literal["full", "present"] = "full") -> None:
        super().__init__(start=start, until=1.0, multiple_of=multiple_of, evaluate=evaluate)
        self.until = float("inf")  # never reached, not even at u = 1

    @override
    def window_of(self, length: int, u: float) -> int:
        return min(self.start, length)
