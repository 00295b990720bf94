"""Sequence packing: the blocks compute padded batches without their padding, several samples in a row (Krell et al. 2021)."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_eff._core.search_space import RunProfile, SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Stage
from lightning_eff._core.technique import Control, Technique
from lightning_eff.data.tokens._packing.blocks import PackedBlocks
from lightning_eff.data.tokens._packing.padding import Padding, find_padding

WHO = "SequencePacking"


def _pointless(profile: RunProfile) -> str | None:
    if profile.sequence_length is None:
        return "samples are no sequences"
    return None if profile.num_blocks else "no stack of blocks was found"


_CHOOSES = "both say which tokens blocks are called on"


class SequencePacking(Technique):
    """Let the blocks of a network compute the tokens of a padded batch alone; loss and gradients stay those of the padded one.

    A batch of B samples of different lengths, padded to T places, holds fewer tokens than B T. Here the blocks of the stack
    are called on few rows, in which samples stand one behind the other: the longest first, each in the first row that has room
    for it. Every sample's tokens see one another and nobody else's. ``F.scaled_dot_product_attention`` within a block
    (Hugging Face's ``sdpa``, ``nn.MultiheadAttention``, and modules that call it, with ``is_causal`` or with masks of their
    own) is computed for each sample; a mask that blocks are handed (Hugging Face's ``eager``, too) becomes block-diagonal.
    ``flex_attention`` (Hugging Face's, too, and compiled by itself) is given a block mask of rows, in which block masks and
    functions of scores are asked for the places that tokens have in the padded batch, or for slots, where a block makes them
    of what it was handed in rows. Position ids and rotary tables go along with their tokens. Where an input knows no samples,
    such as a mask (T, T), all samples stand in one row.

    It is the blocks that are called so, and not the module: what is around them (embeddings, position tables, heads, losses,
    poolings) sees a padded batch as ever, so that it works for whatever takes and returns (B, T, D), and ``labels``, shifts
    and means over tokens need not be known. At padding, which has no effect on training, it finds what entered the stack
    there; a metric that reads padding reads that. Which places are padding is told by a mask in the batch (Hugging Face's
    ``attention_mask``), right or left of the tokens or among them.

    Whether this is the same network is tried with the first batch with padding, before any weight has changed: each block on
    a copy in float64, with weights and inputs moved at random; and the module's loss, which must be the same whatever stands
    at padding. So a mean over all places, a loss that does not ignore labels at padding, batch statistics, convolutions over
    tokens, recurrences, relative biases across rows and routers' losses are right or refused. What a later batch may bring is
    looked at when it comes: other inputs, longer rows, padding on the other side are tried; in each step masks must still hide
    padding, and no gradient may come back to it. A batch without padding, or whose rows would hold no fewer slots, is computed
    plainly. Dropout draws other random numbers than on the padded batch; without it, losses and gradients differ by the
    rounding of sums alone. Validation, test and prediction are plain.

    The saving is the share of padding in all that the blocks compute, and nothing around them.

    Logged: ``tokens``, the slots that blocks computed in the last step; ``rows``; and ``share``, of the padded batch's places.

    Args:
        max_tokens: tokens of a row, at most, >= 1; fewer than the batch's longest sample has are as many as that. None for
            what leaves the fewest slots over, between that and T; 0 is plain training.
        mask: name or position in the batch of the mask (B, T), one at tokens and zero at padding, or, if ``pad`` is in its
            name, one at padding; None for ``attention_mask``, or the only one by its name.
        pad_token_id: of padding at either end of a sample, where the batch has no mask; the ids are the first integer tensor
            (B, T), or the one that ``mask`` names.
        layers: the blocks, as a path, a pattern (``"block_*"``) or a list of paths; None finds the longest stack.

    Raises:
        ValueError: if an argument is out of its range; at setup, if there is no stack, or blocks are compiled; at the first
            batch, if no mask is found; at the first with padding, if a block cannot be called so, or the loss reads padding,
            with the reason; in a later step, before weights change, if its padding has an effect.

    Sources:
        Krell et al. 2021, arXiv:2107.02027 (packing without cross-contamination).
    """

    saves: ClassVar[str] = "compute and activations of padding in every block: half of them at 50 % padding"
    paper: ClassVar[str] = "Krell et al. 2021, arXiv:2107.02027"
    constraints: ClassVar[str] = (
        "automatic optimization; a mask of padding in the batch; a stack of blocks on (B, T, D) that mix tokens by"
        " scaled_dot_product_attention, flex_attention or masks that they are handed, and are not compiled"
    )
    survey: ClassVar[Survey | None] = None
    search_space: ClassVar[SearchSpace | None] = SearchSpace(pointless=_pointless)
    sparse_gradients: ClassVar[bool] = True
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds: loss and gradients are the same but for rounding, so what counts is time; and"
        " batches of samples of like length, which have less padding to begin with"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "RandomLTD": _CHOOSES,
        "TokenDropping": _CHOOSES,
        "PatchDropout": _CHOOSES,
        "TokenMerging": _CHOOSES,
        "RegionalCompilation": "each batch has rows of other lengths, and attention within compiled code cannot be met",
    }

    def __init__(
        self,
        max_tokens: int | None = None,
        *,
        mask: str | int | None = None,
        pad_token_id: int | None = None,
        layers: str | Sequence[str] | None = None,
    ) -> None:
        if max_tokens is not None and (
            isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 0
        ):
            raise ValueError(
                f"{WHO}({max_tokens=}): expected an integer >= 1, tokens of a row at most, None for the"
                " fewest slots, or 0 for plain training."
            )
        if pad_token_id is not None and (isinstance(pad_token_id, bool) or not isinstance(pad_token_id, int)):
            raise ValueError(f"{WHO}({pad_token_id=}): expected an integer, the id of padding, or None.")
        self.max_tokens = max_tokens
        self.mask = mask
        self.pad_token_id = pad_token_id
        self.layers = layers
        self._reset()

    def _reset(self) -> None:
        self._tokens = self._rows = self._places = 0  # of the last step
        self._shares, self._batches = 0.0, 0
        self._where = ""

    @property
    @override
    def neutral(self) -> bool:
        return self.max_tokens == 0

    @override
    def attach(self, session: Session) -> None:
        self._reset()
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
            return "no step taken"
        return f"{self._shares / self._batches:.1%} of the padded batches' places computed on average in {self._where}"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "tokens": self._tokens,
            "rows": self._rows,
            "places": self._places,
            "shares": self._shares,
            "batches": self._batches,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._tokens, self._rows = state_dict["tokens"], state_dict["rows"]
        self._places = state_dict["places"]
        self._shares, self._batches = state_dict["shares"], state_dict["batches"]
