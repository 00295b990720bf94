"""WindowPattern: short and long attention windows by turns, which grow during training (Jordan et al. 2024).

The rule: a query at i sees keys j with ``0 <= i - j < w`` (causal) or ``|i - j| < w``, where ``w = s(u) W`` for the final
window W of its block and ``s(u) = start + (1 - start) min(1, u / until)``.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._arguments.kinds import Count, Fraction, Layers, Text
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.shortcuts._fed import chain
from lightning_eff.model.shortcuts._technique import DEPTH, Shortcuts
from lightning_eff.model.shortcuts._valued import attention_of_each
from lightning_eff.model.shortcuts._windowed import Windowed, window_of, windowed

WHO = "WindowPattern"
_OTHER = "it computes attention in another way, which has no window"
_DISTANCE = "in blocks that run on some of their tokens, the distance between tokens is unknown"


def scale_at(u: float, start: float, until: float) -> float:
    """Return ``s(u) = start + (1 - start) min(1, u / until)`` for the used fraction u of the budget."""
    return 1.0 if u >= until else start + (1.0 - start) * u / until


def _pointless(profile: RunProfile) -> str | None:
    if profile.sequence_length is None:
        return "samples are not sequences"
    if profile.sequence_length < 256:
        return f"attention costs little in sequences of {profile.sequence_length} tokens"
    return None


class WindowPattern(Shortcuts):
    """Limit attention to short windows in most blocks and long ones in the others, with a warm-up of both.

    The letters of ``pattern`` are repeated over the blocks: S is a block with the short window, L one with the long window. In
    training, windows grow from ``start`` times their final size to that size at ``until``. Evaluation always has the final
    windows. Masks for padding, packing or biases still apply, and a query whose mask leaves nothing within the window attends
    to itself. Caches of keys and values work.

    Use it to pretrain models on sequences of thousands of tokens. Attention is computed exactly in up to 16 chunks of
    queries, each with the keys in its reach, as ``AttentionWindowWarmup`` does; use that one if attention should be whole in
    the end. Windows near the length save nothing, because chunks and masks cost time too. ``nn.MultiheadAttention`` works,
    except with weights. **It changes the model**: checkpoints have a mark next to each attention, ``lightning_eff_mark``,
    so that the plain module does not load them. They load into ``lightning_eff.apply(plain, WindowPattern(...))``, and
    ``export`` refuses. It logs ``connections``, the number of attentions with a window, and ``window``, the short one now.

    Args:
        short: the final short window, in tokens.
        pattern: one letter per block, S or L, repeated over the blocks. "L" is plain training, if ``long`` is None and
            ``until`` 0.
        long: the final long window, in tokens. None is the whole sequence.
        until: the fraction of the budget at which windows have their final size. 0 is no warm-up.
        start: the first windows as a fraction of the final ones.
        multiple_of: the number of tokens that windows in the warm-up are multiples of, and their smallest size.
        layers: the blocks, as a dotted path, a pattern or a list of paths. None finds the longest stack.

    Raises:
        ValueError: for a value out of range. At setup or in ``apply``, if no stack of blocks is found, its blocks do not run
            once each on the output of the one before, or do not each have one self-attention by
            ``scaled_dot_product_attention`` or ``nn.MultiheadAttention`` without weights. With a warm-up, if the Trainer has no
            end.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[WindowPattern(256, pattern="SSSL", until=0.5)])

    References:
        Jordan et al. 2024, modded-nanogpt, github.com/KellerJordan/modded-nanogpt (records from December 2024 on).
        Beltagy et al. 2020, "Longformer: The Long-Document Transformer", arXiv:2004.05150.
    """

    saves = "attention outside the windows, in training and in evaluation"
    paper = "Jordan et al. 2024, github.com/KellerJordan/modded-nanogpt; Beltagy et al. 2020, arXiv:2004.05150"
    constraints = (
        "transformers whose self-attention is scaled_dot_product_attention or nn.MultiheadAttention, not compiled; pays only"
        " for long sequences"
    )
    search_space = SearchSpace({"short": Choice((128, 256, 512)), "until": Choice((0.0, 0.5))}, _pointless)
    control = Control("the baseline, with whole attention, for the same time with its learning rate decayed to zero")
    stays = "a plain attention has no window"
    conflicts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(DEPTH, "it leaves blocks out, and the pattern would no longer be that of the blocks that run"),
        **dict.fromkeys(
            ("RandomLTD", "TokenDropping", "PatchDropout", "TokenMerging", "PartialTokenTraining", "MaskGuidedTokens"),
            _DISTANCE,
        ),
        **dict.fromkeys(("Performer", "Linformer", "Fastformer", "Reformer", "GatedPositionalAttention"), _OTHER),
        **dict.fromkeys(("DOTAAttention", "ELSAAttention", "SangerAttention", "A3Attention"), _OTHER),
        **dict.fromkeys(("AttentionWindowWarmup", "NarrowAttention"), "it limits the same attention to another window"),
        **dict.fromkeys(
            ("ActivationCompression", "ACTPrecision"),
            "it runs attention again with the kernel of the plain call, which may not take a mask",
        ),
        "PrefixTuning": "its attention has keys without a token, which the window would count as tokens",
        "TransMix": "it reads the weights of whole attention",
        "RegionalCompilation": "compiled code hides the attention that gets a window",
        "SequencePacking": "the windows would be those of a packed row instead of a sample",
    }

    def __init__(
        self,
        short: Annotated[int, Count()] = 256,
        *,
        pattern: Annotated[str, Text("letters S and L, one per block")] = "SSSL",
        long: Annotated[int | None, Count()] = None,
        until: Annotated[float, Fraction()] = 0.0,
        start: Annotated[float, Fraction(above=0)] = 0.25,
        multiple_of: Annotated[int, Count()] = 16,
        layers: Layers | None = None,
    ) -> None:
        if set(pattern) - set("SL"):
            raise ValueError(
                f'{WHO}(pattern={pattern!r}): expected the letters S and L. Give one per block, such as "SSSL".'
            )
        self.short, self.pattern, self.long = short, pattern, long
        self.until, self.start, self.multiple_of, self.layers = until, start, multiple_of, layers
        self.needs_budget = until > 0  # pyright: ignore[reportAttributeAccessIssue] -- of this instance alone

    @property
    @override
    def neutral(self) -> bool:
        return "S" not in self.pattern and self.long is None and self.until == 0

    def _reset(self) -> None:
        self._windowed: list[Windowed] = []
        self._window = self.short

    @override
    def settings(self) -> dict[str, Any]:
        """The settings that decide the module's function in evaluation, so not those of the warm-up."""
        return {
            name: value for name, value in super().settings().items() if name in ("short", "pattern", "long", "layers")
        }

    @override
    def change(self, surgeon: Surgeon) -> None:
        root = surgeon.root
        found = chain(surgeon, self.layers, who=WHO)
        group = attention_of_each(surgeon, found, who=WHO)
        for _, path, place in group:
            queries, keys = place.call.query.shape[-2], place.tokens
            if queries != keys:
                raise ValueError(
                    f"{WHO}: {path} has {queries} queries and {keys} keys, so it is no self-attention. Name another stack by"
                    f" layers=, or remove {WHO}."
                )
        letters = {path: self.pattern[i % len(self.pattern)] for i, path, _ in group}
        finals = {
            id(root.get_submodule(path)): self.short if one == "S" else self.long for path, one in letters.items()
        }

        def build(plain: nn.Module) -> nn.Module:
            return windowed(plain, who=WHO, final=finals[id(plain)], multiple_of=self.multiple_of)

        surgeon.swap(lambda path, m: path in letters, build, what="a module that attends")
        self._count = len(letters)
        number = sum(one == "S" for one in letters.values())
        rank_zero_info(f"{WHO}: {number} of {self._count} attentions in {found} have a window of {self.short} tokens.")

    # -- the warm-up

    @override
    def on_model(self, session: Session) -> None:
        self._windowed = [m for m in session.module.modules() if isinstance(m, Windowed)]
        for m in self._windowed:
            m.multiple_of = self.multiple_of

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        scale = scale_at(session.progress.u, self.start, self.until)
        for m in self._windowed:
            m.scale = scale
        self._window = window_of(self.short, self.short, scale, self.multiple_of)

    @override
    def detach(self, session: Session) -> None:
        for m in self._windowed:
            m.scale = 1.0
        self._windowed = []
        super().detach(session)

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "window": self._window}

    @override
    def summary(self) -> str:
        return f"windows of {self._window:,} tokens in {self.pattern.count('S')} of {len(self.pattern)} blocks"
