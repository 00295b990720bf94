"""QKNorm: queries and keys of one length before attention (Henry et al. 2020; Dehghani et al. 2023).

The rule is ``q / sqrt(mean(q^2) + eps) g`` for each head's queries, and likewise for keys, which
``_attention.normed.normed_heads`` computes.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from typing_extensions import override

from lightning_eff._core._architecture.naming import check_met, check_names
from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._architecture.technique import Architecture, Change
from lightning_eff._core._branches.attention import Attention, Part
from lightning_eff._core.search_space import RunProfile, SearchSpace, Survey
from lightning_eff._core.technique import Control
from lightning_eff.model.layers._attention.normed import EPS, NormedHeads, runs
from lightning_eff.model.layers._attention.parts import attended, handed, is_named

WHO = "QKNorm"
#: How far the mean squares of queries may differ that are said to be of one length.
ALIKE = 1e-2


def _pointless(profile: RunProfile) -> str | None:
    return None if profile.sequence_length is not None or profile.image_side is not None else "samples are no sequences"


class QKNorm(Architecture):
    """Divide each head's queries and keys by their root mean square before attention, and give them a gain that is learnt.

    Logits of attention are then at most sqrt(D) at first, for heads of D features, so that attention does not collapse onto
    single tokens with large rates. There are two gains of D numbers for each attention, one for all heads, which begin at
    one and do not decay, as in Qwen3 and OLMo 2. Norms stand behind the maps, and so before rotary embeddings, which keep
    lengths.

    Which outputs of which maps are queries and keys is told by gradients, in a pass over an input that is made up, also where
    one map makes queries, keys and values. After the change a second pass must show that attention is handed queries and
    keys of one length, or the technique refuses: heads of which features do not lie side by side are not normed by halves.

    **Another model**, which costs two norms an attention, and saves steps where logits grow; it is no speed-up by itself. Its
    checkpoints load into ``lightning_eff.apply(plain, QKNorm())`` alone, and ``export`` refuses.

    Logged: ``attentions``, how many.

    Args:
        names: dotted paths of maps that make queries or keys, their last parts or patterns, such as ``["layers.3.*"]``: the
            attentions that one of them is of; None takes all, ``[]`` is plain training.

    Raises:
        ValueError: for other values; at setup or in ``apply``, where no attention is found, for a name that means no map of
            one, with the nearest ones, for queries or keys that are normed already or are made by no map that can be
            replaced, and where attention is written otherwise than by ``scaled_dot_product_attention``.

    Sources:
        Henry et al. 2020, arXiv:2010.04245; Dehghani et al. 2023, arXiv:2302.05442 (ViT-22B); Qwen3, arXiv:2505.09388.
    """

    saves: ClassVar[str] = "steps, where attention's logits would grow at large rates; costs two norms an attention"
    paper: ClassVar[str] = "Henry et al. 2020, arXiv:2010.04245; Dehghani et al. 2023, arXiv:2302.05442"
    constraints: ClassVar[str] = "attention by scaled_dot_product_attention"
    survey: ClassVar[Survey | None] = None
    search_space: ClassVar[SearchSpace | None] = SearchSpace({}, _pointless)
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds with its learning rate decayed to zero, and the best rate of each"
    )
    conflicts: ClassVar[Mapping[str, str]] = {}
    change_at: ClassVar[Change] = Change.ADAPT
    stays: ClassVar[str] = "queries and keys are normed, which no weights of the plain map do"
    _count = 0

    def __init__(self, names: Sequence[str] | None = None) -> None:
        self.names = check_names(names, who=WHO, what="maps of queries or keys", example="layers.3.*")

    @property
    @override
    def neutral(self) -> bool:
        return self.names == []

    # -- the change

    @override
    def change(self, surgeon: Surgeon) -> None:
        root = surgeon.root
        every = attended(root, who=WHO, batch=surgeon.batch)
        weights = {p.weight for one in every for p in (*one.query, *one.key)}
        if self.names is not None:
            paths = [w.removesuffix(".weight") for w in weights]
            check_met(self.names, paths, who=WHO, what="maps of queries or keys", root=type(root).__name__)
        makers = {w: root.get_submodule(w.rpartition(".")[0]) for w in weights}
        masks: dict[str, dict[str, Tensor]] = {}
        widths: dict[str, int] = {}
        chosen = [one for one in every if any(is_named(p.weight, self.names) for p in (*one.query, *one.key))]
        for one in chosen:
            reason = _unfit(one) or next(
                (
                    f"{p.weight}: {why}"
                    for p in (*one.query, *one.key)
                    if (why := _unwrappable(makers[p.weight], p.weight))
                ),
                None,
            )
            if reason is not None:
                raise ValueError(
                    f"{WHO}: an attention of {type(root).__name__} cannot be normed: {reason}."
                    " Name others, or take it out."
                )
            for role, parts in (("query", one.query), ("key", one.key)):
                for p in parts:
                    _check_heads(p, one.width or 0)
                    masks.setdefault(p.weight, {})[role] = p.outputs
                    widths[p.weight] = one.width or 0
        ids = {id(makers[w]): w for w in masks}
        surgeon.swap(
            lambda path, m: id(m) in ids,
            lambda m: NormedHeads(m, masks[ids[id(m)]], widths[ids[id(m)]]),
            what="a map of queries or keys",
        )
        self._check_lengths(root, surgeon.batch, len(chosen))
        self._count = len(chosen)
        rank_zero_info(
            f"{WHO}: queries and keys of {self._count} attentions are normed, in {', '.join(sorted(masks)[:4])}."
        )

    def _check_lengths(self, root: nn.Module, batch: Any, expected: int) -> None:
        """That attention is now handed heads of one length: features of a head may lie otherwise than was thought."""
        made = [m for m in root.modules() if isinstance(m, NormedHeads)]
        try:
            for m in made:
                m.eps = 1e-30  # lengths may be small at first
            with handed() as seen:
                attended(root, who=WHO, batch=batch)
        finally:
            for m in made:
                m.eps = EPS
        alike = sum(all(_of_one_length(x) for x in pair) for pair in seen.calls)
        if alike < expected or (self.names is None and alike < len(seen.calls)):
            raise ValueError(
                f"{WHO}: of {expected} attentions of {type(root).__name__}, {alike} are handed queries and keys of one length"
                f" after the change, in {len(seen.calls)} calls of scaled_dot_product_attention; expected all. Attention that"
                " is written otherwise is not seen: set attn_implementation='sdpa' of a Hugging Face model, or take it out."
            )

    # -- what is told

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"attentions": self._count}

    @override
    def summary(self) -> str:
        return f"queries and keys of {self._count} attentions are normed" if self._count else "they were normed already"


def _unwrappable(maker: nn.Module, weight: str) -> str | None:
    """Why what has a weight is not called to make queries or keys, or None: it may be a map of any make."""
    if not weight.endswith(".weight") or isinstance(maker, NonDynamicallyQuantizableLinear):
        return f"its weight is a part of {type(maker).__name__}, and of no map that is called"
    return None


def _of_one_length(x: Tensor) -> bool:
    """Whether heads, of shape (..., D), are of one mean square, but for those that are nothing at all."""
    squares = x.float().square().mean(-1)
    longest = squares.max()
    return bool(longest > 0) and bool(((squares >= (1.0 - ALIKE) * longest) | (squares <= ALIKE * longest)).all())


def _unfit(one: Attention) -> str | None:
    where = ", ".join(p.weight for p in (*one.query, *one.key)) or "what no map makes"
    if one.normed:
        return f"a norm stands behind {where} already"
    if not one.query or not one.key:
        return f"its queries or keys are made of {where}"
    return f"how wide heads are is not told of {where}" if one.width is None else None


def _check_heads(part: Part, width: int) -> None:
    for start, stop in runs(part.outputs):
        if (stop - start) % width:
            raise ValueError(
                f"{WHO}: outputs {start} to {stop} of {part.weight} are queries or keys of heads of {width}, which they are no"
                " multiple of; expected a head's features side by side. Leave it out of the names, or take the technique out."
            )
