"""Token merging (ToMe): the most similar tokens of an image merge in each block (Bolya et al. 2022)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Layers
from lightning_eff._core._tokens.merging import MergingTokens
from lightning_eff._core.search_space import Integer, SearchSpace, needs_blocks
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Stage, Step
from lightning_eff._core.technique import Control
from lightning_eff.data.tokens._patches import Layout, find_patches
from lightning_eff.data.tokens._share import ComputesFewerTokens, Share

WHO = "TokenMerging"
_BOTH = "both choose the tokens that blocks compute"


def match(keys: Tensor, r: int, protected: Tensor) -> Tensor:
    """Match tokens by bipartite soft matching; return each token's group (B, n), with entries 0 .. n - r - 1 in sequence order.

    Tokens at even places form A, tokens at odd places form B. Each ``a`` in A is matched with the ``b`` in B of the largest
    cosine ``k_a . k_b / (|k_a| |k_b|)``. The ``r`` pairs with the largest cosines are merged: ``a`` joins the group of ``b``,
    which several may do. Ties go to the first.

    Args:
        keys: k, (B, n, d).
        r: the number of tokens that join others, at most :func:`mergeable`.
        protected: the tokens that are never merged, (n,).
    """
    k = torch.nn.functional.normalize(keys.float(), dim=-1)
    cosines = k[:, ::2] @ k[:, 1::2].transpose(1, 2)
    cosines = cosines.masked_fill(protected[::2, None] | protected[None, 1::2], -torch.inf)
    best, partner = cosines.max(dim=-1)
    gone = best.argsort(dim=-1, descending=True, stable=True)[:, :r]  # places in A
    stays = torch.ones(keys.shape[:2], dtype=torch.bool, device=keys.device).scatter(1, 2 * gone, False)
    # a token that stays is a group, numbered among those that stay; one that joins has its partner's group
    place = stays.cumsum(dim=1) - 1
    into = place.gather(1, 2 * partner.gather(1, gone) + 1)
    return place.scatter(1, 2 * gone, into)


def mergeable(protected: Tensor) -> int:
    """Return how many tokens can join others: those at even places, if one at an odd place can take them."""
    return int((~protected[::2]).sum()) if bool((~protected[1::2]).any()) else 0


class TokenMerging(ComputesFewerTokens):
    """Merge the ``r`` most similar token pairs of an image in each block, so that what follows computes fewer tokens.

    Tokens merge between the attention and the MLP of a block, where their sum with the attention's result is. They are matched
    by that attention's keys. Each token at an even place is matched with the most similar one at an odd place, and the ``r``
    most similar pairs become their mean, weighted by the number of tokens that each represents. Attention in later blocks
    adds the logarithm of this number to its scores, so equal tokens lose nothing by merging. After the last block, every
    token gets the result of its group. The head therefore sees as many tokens as without merging, also for dense prediction.
    Tokens that do not come from the image, such as a class token and registers, are never merged. The first batch is used to
    find them.

    Use it for vision transformers, where neighbouring patches are similar. The attention of L blocks computes N, N - r, ...,
    ``N - (L - 1) r`` tokens, and their MLPs N - r, ..., ``N - L r``. The blocks' code is unchanged.

    Validation, test and prediction see all tokens by default, so their metrics are comparable with plain training, and the
    weights are those of a plain module. The paper also merges at inference: ``evaluate=True``. Nothing is random: the same
    weights and images merge the same way.

    It logs ``kept``, the tokens per image after the last merging of the last step, and ``share``, their fraction.

    Args:
        r: the number of tokens that merge into others in each block, at most half of them. The paper uses 8 for a ViT-L
            of 24 blocks and 16 for a ViT-B of 12, on 197 tokens. 0 is plain training.
        evaluate: whether to merge in validation, test and prediction too. Before the first training batch, such as in the
            sanity check, the tokens of an image are not known, and all are computed. Checkpoints hold what was found.
        layers: the blocks, as a dotted path, a pattern (``"block_*"``) or a list of paths. None finds the longest stack.

    Raises:
        ValueError: for a value out of range. At setup, if there is no stack of blocks, or it holds a block several times. At
            the first batch, before any weight changes, if there are no images, no token of the blocks comes from them, or
            too few remain to merge. Also if a block cannot merge: its attention is neither torch's
            ``scaled_dot_product_attention`` nor a softmax of a product, its result is not added to the block's input before
            an MLP, or it is causal or compiled, depends on token positions, or receives masks or tables of its tokens.

    Example:
        >>> trainer = L.Trainer(max_epochs=100, callbacks=[TokenMerging(8)])

    References:
        Bolya et al. 2022, "Token Merging: Your ViT But Faster", arXiv:2210.09461.
    """

    saves = "compute and activations of merged tokens, more in deeper blocks"
    paper = "Bolya et al. 2022, arXiv:2210.09461"
    constraints = (
        "needs images and uncompiled blocks on (B, T, D) with positions added before them, whose attention is torch's"
        " scaled_dot_product_attention or a softmax of a product; automatic optimization"
    )
    search_space = SearchSpace({"r": Integer(2, 16, log=True)}, needs_blocks)
    control = Control(
        "the baseline for the same time with a learning rate that decays to zero; and PatchDropout, which drops tokens"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("PatchDropout", "RandomLTD", "TokenDropping"), _BOTH),
        "RegionalCompilation": "compiled code hides the blocks' attention, which must use the sizes of merged tokens",
    }
    neutral_at: ClassVar[Mapping[str, Any]] = {"r": 0}

    def __init__(
        self, r: Annotated[int, Count(at_least=0)] = 8, *, evaluate: bool = False, layers: Layers | None = None
    ) -> None:
        self.r = r
        self.evaluate = evaluate
        self.layers = layers

    def _reset(self) -> None:
        self._layout: Layout | None = None
        self._share = Share()  # at the last block
        self._where = ""
        self._told = False

    @override
    def attach(self, session: Session) -> None:
        self._tokens = MergingTokens(session, WHO, self._merge, self._look)
        session.chain.add(Stage.TRANSFORM, self._tokens.link)

    @override
    def on_open(self, session: Session) -> None:
        if self.evaluate:
            session.views.append(self._view)

    @override
    def on_model(self, session: Session) -> None:
        if not session.fitting:  # nothing was attached
            self._tokens = MergingTokens(session, WHO, self._merge, self._look)
        if session.fitting or self.evaluate:
            self._where = str(self._tokens.find(self.layers))

    @contextmanager
    def _view(self, training: bool) -> Iterator[None]:
        if training:
            yield
        elif self._layout is None:
            if not self._told:
                rank_zero_info(f"{WHO}: evaluation sees all tokens until a training step has found those of an image.")
            self._told = True
            yield
        else:
            with self._tokens.in_evaluation():
                yield

    def _look(self, step: Step, batch: Any) -> None:
        stack = self._tokens.stack
        self._layout = find_patches(step, batch, stack, self.session.generator(WHO, "patches"), who=WHO)
        count = self._tokens.longest
        if not mergeable(self._protected(count)):
            raise ValueError(
                f"{WHO}(r={self.r}): {stack} gets {count} tokens per image,"
                f" {self._layout.before + self._layout.after} of them not patches, but merging needs four or more"
                f" patches. Remove {WHO}."
            )

    def _protected(self, tokens: int) -> Tensor:
        """Return which tokens are not patches, (n,), bool."""
        assert self._layout is not None, "it was found with the first batch"
        places = torch.arange(tokens)
        return (places < self._layout.before) | (places >= tokens - self._layout.after)

    def _merge(self, keys: Tensor) -> tuple[Tensor, int] | None:
        tokens = keys.shape[1]
        protected = self._protected(tokens)
        r = min(self.r, mergeable(protected))
        if not self._tokens.evaluating:
            self._share.note(tokens - r, self._tokens.full)
        return (match(keys, r, protected.to(keys.device, non_blocking=True)), tokens - r) if r else None

    @override
    def state_dict(self) -> dict[str, Any]:
        at = None if self._layout is None else (self._layout.before, self._layout.after)
        return {**super().state_dict(), "layout": at}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if (at := state_dict.get("layout")) is not None:
            self._layout = Layout(*at)

    @override
    def summary(self) -> str:
        if not self._share.kept:
            return "made no step"
        return f"{self._share.full} tokens per image merged to {self._share.kept} in the last block of {self._where}"
