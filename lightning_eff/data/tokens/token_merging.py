"""Token merging (ToMe): from block to block the most similar tokens of an image become one (Bolya et al. 2022)."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._tokens.merging import MergingTokens
from lightning_eff._core.search_space import Integer, RunProfile, SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Stage, Step
from lightning_eff._core.technique import Control, Technique
from lightning_eff.data.tokens._patches import Layout, find_patches
from lightning_eff.data.tokens._share import Share

WHO = "TokenMerging"
_BOTH = "both choose the tokens that blocks compute"


def match(keys: Tensor, r: int, protected: Tensor) -> Tensor:
    """Bipartite soft matching: the group of each token, (B, n), with entries 0 .. n - r - 1, in the order of the sequence.

    Tokens at even places (A) and at odd ones (B) are told apart. Each ``a`` in A is matched with the ``b`` in B of the largest
    cosine ``k_a . k_b / (|k_a| |k_b|)``, and the ``r`` pairs with the largest of these are merged: ``a`` becomes part of ``b``,
    which several may do. Where cosines are equal the first are taken.

    Args:
        keys: k, (B, n, d).
        r: how many tokens become others' part; at most :func:`mergeable`.
        protected: tokens that are merged with none, (n,).
    """
    k = torch.nn.functional.normalize(keys.float(), dim=-1)
    cosines = k[:, ::2] @ k[:, 1::2].transpose(1, 2)
    cosines = cosines.masked_fill(protected[::2, None] | protected[None, 1::2], -torch.inf)
    best, partner = cosines.max(dim=-1)
    gone = best.argsort(dim=-1, descending=True, stable=True)[:, :r]  # of A
    stays = torch.ones(keys.shape[:2], dtype=torch.bool, device=keys.device).scatter(1, 2 * gone, False)
    # a token that stays is the group of its place among those that do; one that goes is of its partner's
    place = stays.cumsum(dim=1) - 1
    into = place.gather(1, 2 * partner.gather(1, gone) + 1)
    return place.scatter(1, 2 * gone, into)


def mergeable(protected: Tensor) -> int:
    """How many tokens may become others' part: those at even places, if there is one at an odd place to take them."""
    return int((~protected[::2]).sum()) if bool((~protected[1::2]).any()) else 0


def _pointless(profile: RunProfile) -> str | None:
    if profile.num_blocks < 2:
        return "no stack of at least two repeated blocks was found, between which tokens are merged"
    return None


class TokenMerging(Technique):
    """Merge the ``r`` most similar pairs of an image's tokens between each two blocks: late blocks run on far fewer.

    Between a block and the next, tokens are matched by the keys of the attention that they come from: of those at even places
    each with the most similar at an odd one, of which the ``r`` most similar pairs become their mean, weighted by how many
    tokens each stands for. In attention a token counts as many times, too: the logarithm of its size is added to its scores.
    So of tokens that are alike nothing is lost. After the last block each token takes over what its group has become: heads
    on class tokens, on means and on all patches (dense prediction) see as many tokens as without. Tokens that come of no
    image, such as a class token and registers, are never merged: they are found by a trial with other images.

    In the paper a block merges between its attention and its MLP. Here blocks' code is unchanged, and tokens are merged
    between blocks, by the same keys: of L blocks L - 1 run on fewer tokens, the last on ``N - (L - 1) r``.

    **Validation, test and prediction see all tokens**, as with all techniques that leave out or merge: what they tell is then
    comparable with plain training, and the weights are those of a plain module. (The paper also merges at inference, with or
    without training so; that is for whoever deploys the weights.) Nothing is drawn: the same weights and images merge the same.

    Logged: ``kept``, how many tokens of an image the last block ran on in the last step, and ``share``, of how many.

    Args:
        r: tokens that are merged into others between two blocks, >= 0; at most half of those that there are. 0 is plain
            training. The paper's are 8 for a ViT-L of 24 blocks and 16 for a ViT-B of 12, on 197 tokens.
        layers: the blocks, as a path, a pattern (``"block_*"``) or a list of paths; None finds the longest stack.

    Raises:
        ValueError: if ``r`` is out of its range; at setup, if there is no stack, or it holds a block several times; at the
            first batch, before any weight has changed, if it holds no images, none of the blocks' tokens comes of them, too few
            are left to merge, or a block cannot: sizes do not come into its attention (which must be torch's
            ``scaled_dot_product_attention``, or a softmax of a product of its own), it is causal or compiled, goes by where
            tokens stand, or is handed masks or tables of its tokens.

    Sources:
        Bolya et al. 2022, arXiv:2210.09461.
    """

    saves: ClassVar[str] = "compute and activations of merged tokens, the more the deeper the block"
    paper: ClassVar[str] = "Bolya et al. 2022, arXiv:2210.09461"
    constraints: ClassVar[str] = (
        "automatic optimization; images; uncompiled blocks on (B, T, D) with positions added before them, whose attention is"
        " torch's scaled_dot_product_attention or a softmax of a product; training alone: evaluation sees all tokens"
    )
    survey: ClassVar[Survey | None] = Survey("token merging (ToMe)", shen="4.1")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"r": Integer(2, 16, log=True)}, _pointless)
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds with its learning rate decayed to zero; and PatchDropout, which leaves tokens out"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("PatchDropout", "RandomLTD", "TokenDropping"), _BOTH),
        "RegionalCompilation": "compiled code hides the blocks' attention, into which the sizes of merged tokens must come",
    }

    def __init__(self, r: int = 8, *, layers: str | Sequence[str] | None = None) -> None:
        if isinstance(r, bool) or not isinstance(r, int) or r < 0:
            raise ValueError(
                f"{WHO}({r=}): expected an integer >= 0, how many tokens are merged between two blocks. 8 is the paper's for 24"
                " blocks on 197 tokens; 0 is plain training."
            )
        self.r = r
        self.layers = layers
        self._reset()

    def _reset(self) -> None:
        self._layout: Layout | None = None
        self._share = Share()  # at the last block
        self._where = ""

    @property
    @override
    def neutral(self) -> bool:
        return self.r == 0

    @override
    def attach(self, session: Session) -> None:
        self._reset()
        self._tokens = MergingTokens(session, WHO, self._merge, self._look)
        session.chain.add(Stage.TRANSFORM, self._tokens.link)

    @override
    def on_model(self, session: Session) -> None:
        if session.fitting:
            self._where = str(self._tokens.find(self.layers))

    def _look(self, step: Step, batch: Any) -> None:
        stack = self._tokens.stack
        self._layout = find_patches(step, batch, stack, self.session.generator(WHO, "patches"), who=WHO)
        count = self._tokens.longest
        if len(stack) < 2 or not mergeable(self._protected(count)):
            raise ValueError(
                f"{WHO}(r={self.r}): {stack} gets {count} tokens of an image, of which"
                f" {self._layout.before + self._layout.after} come of none; expected two blocks or more, and four patches or"
                " more to merge between them. Take the technique out."
            )

    def _protected(self, tokens: int) -> Tensor:
        """Tokens that come of no image, (n,): those that are merged stand between them."""
        assert self._layout is not None, "it was found with the first batch"
        places = torch.arange(tokens)
        return (places < self._layout.before) | (places >= tokens - self._layout.after)

    def _merge(self, keys: Tensor) -> tuple[Tensor, int] | None:
        tokens = keys.shape[1]
        protected = self._protected(tokens)
        r = min(self.r, mergeable(protected))
        self._share.note(tokens - r, self._tokens.full)
        return (match(keys, r, protected.to(keys.device, non_blocking=True)), tokens - r) if r else None

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**self._share.report()}

    @override
    def summary(self) -> str:
        if not self._share.kept:
            return "no step taken"
        return f"{self._share.full} tokens of an image merged to {self._share.kept} at the last block of {self._where}"

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._share.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._share.load_state_dict(state_dict)
