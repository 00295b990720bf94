"""Sequence packing: blocks compute padded batches without their padding, several samples per row (Krell et al. 2021)."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Either, Integer, Layers, Text
from lightning_eff._core._needs.needs import Part, Reasons
from lightning_eff._core.search_space import RunProfile, SearchSpace
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Stage
from lightning_eff._core.technique import Control, Technique
from lightning_eff.data.tokens._packing.blocks import PackedBlocks
from lightning_eff.data.tokens._packing.padding import Padding, find_padding

WHO = "SequencePacking"


def _pointless(profile: RunProfile) -> str | None:
    if profile.sequence_length is None:
        return "samples are not sequences"
    return None if profile.num_blocks else "found no stack of blocks"


_CHOOSES = "both choose the tokens that blocks compute"


class SequencePacking(Technique):
    """Skip padding in the blocks of a network by packing several samples into each row; loss and gradients stay the same.

    A batch of B samples of different lengths, padded to T, holds fewer than B T tokens. The blocks are called on fewer rows, in
    which samples stand one after the other: the longest first, each in the first row with room for it. Tokens attend only
    within their own sample. ``F.scaled_dot_product_attention`` within a block (Hugging Face's ``sdpa``,
    ``nn.MultiheadAttention``, and custom modules) is computed per sample. Masks that blocks receive (also Hugging Face's
    ``eager``) become block-diagonal. ``flex_attention``, compiled or not, gets a block mask for rows. Position ids and rotary
    tables are selected with their tokens. If an input has no sample dimension, such as a mask (T, T), all samples share a row.

    Only the blocks see packed rows. Embeddings, position tables, heads, losses and pooling see the padded batch, so any module
    with blocks on (B, T, D) works, and labels and shifts need no change. Behind the blocks, padded positions hold what entered
    the stack, which only a metric that reads padding notices. Padding may be on the right, on the left or between tokens.

    Use it where batches have much padding: the blocks' compute falls by the fraction of padding. Batches without padding, or
    that would not get smaller, are computed as usual. Losses and gradients differ only by rounding, but dropout draws other
    random numbers than on the padded batch. Validation, test and prediction are unchanged.

    The first batch with padding is checked before any weight changes: each block on a float64 copy with perturbed weights and
    inputs, and the module's loss, which must not depend on padding. Means over all positions, labels that count at padding,
    batch statistics, convolutions over tokens, recurrences, relative biases across rows and router losses are therefore
    supported or refused. Later batches are checked when they bring other inputs, longer rows or padding on the other side. In
    each step, masks must still hide padding, and no gradient may reach it.

    It logs ``tokens``, the slots that blocks computed in the last step, ``rows``, and ``share``, the fraction of the padded
    batch.

    Args:
        max_tokens: the largest number of tokens per row. A longer sample extends it. None leaves the fewest slots empty, and 0
            is plain training.
        mask: the name or position of the padding mask (B, T) in the batch. It is 1 at tokens, or, if ``pad`` is in its name,
            1 at padding. None is ``attention_mask``, or the only mask by its name.
        pad_token_id: the id of padding at either end of a sample, for batches without a mask. The ids are the first integer
            tensor (B, T), or the one that ``mask`` names.
        layers: the blocks, as a dotted path, a pattern (``"block_*"``) or a list of paths. None finds the longest stack.

    Raises:
        ValueError: for a value out of range. At setup, if there is no stack of blocks, or blocks are compiled. At the first
            batch, if no mask is found. At the first batch with padding, if a block cannot be packed, or the loss reads padding.
            In a later step, before weights change, if its padding has an effect.

    Example:
        >>> trainer = L.Trainer(max_epochs=3, callbacks=[SequencePacking()])

    References:
        Krell et al. 2021, "Efficient Sequence Packing without Cross-contamination", arXiv:2107.02027.
    """

    saves = "compute and activations of padding in every block, half of them at 50 % padding"
    paper = "Krell et al. 2021, arXiv:2107.02027"
    constraints = (
        "needs a padding mask in the batch and uncompiled blocks on (B, T, D) that mix tokens by scaled_dot_product_attention,"
        " flex_attention or masks passed to them; automatic optimization"
    )
    refuses: ClassVar[Reasons] = {Part.PIPELINE: ""}  # each rank packs whole micro-batches
    search_space = SearchSpace(pointless=_pointless)
    sparse_gradients: ClassVar[bool] = True
    control = Control(
        "the baseline for the same time, since loss and gradients differ only by rounding; and batches of samples with similar"
        " lengths, which have less padding"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "RandomLTD": _CHOOSES,
        "TokenDropping": _CHOOSES,
        "PatchDropout": _CHOOSES,
        "TokenMerging": _CHOOSES,
        "RegionalCompilation": "each batch has rows of other lengths, and attention in compiled code cannot be replaced",
    }
    neutral_at: ClassVar[Mapping[str, Any]] = {"max_tokens": 0}
    checkpointed = ("_tokens", "_rows", "_places", "_shares", "_batches")

    def __init__(
        self,
        max_tokens: Annotated[int, Count(at_least=0)] | None = None,
        *,
        mask: Annotated[str | int, Either(Text("a name"), Integer())] | None = None,
        pad_token_id: Annotated[int, Integer()] | None = None,
        layers: Layers | None = None,
    ) -> None:
        self.max_tokens = max_tokens
        self.mask = mask
        self.pad_token_id = pad_token_id
        self.layers = layers

    def _reset(self) -> None:
        self._tokens = self._rows = self._places = 0  # in the last step
        self._shares, self._batches = 0.0, 0
        self._where = ""

    @override
    def attach(self, session: Session) -> None:
        self._packed = PackedBlocks(session, WHO, self.max_tokens, self._find)
        session.chain.add(Stage.TRANSFORM, self._packed.link)

    def _find(self, batch: Any) -> Padding:
        return find_padding(batch, self.mask, self.pad_token_id, who=WHO)

    @override
    def on_model(self, session: Session) -> None:
        if session.fitting:
            self._where = str(self._packed.find(self.layers))

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        rows, self._places = self._packed.rows, self._packed.places
        self._rows = 0 if rows is None else rows.count
        self._tokens = self._places if rows is None else rows.count * rows.length
        self._shares += self._share()
        self._batches += 1

    def _share(self) -> float:
        return self._tokens / self._places if self._places else 1.0

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"tokens": self._tokens, "rows": self._rows, "share": self._share()}

    @override
    def summary(self) -> str:
        if not self._batches:
            return "made no step"
        return f"{self._where} computed {self._shares / self._batches:.1%} of the padded batches on average"
