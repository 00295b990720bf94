"""QKNorm: normalise queries and keys before attention (Henry et al. 2020; Dehghani et al. 2023).

The rule is ``q / sqrt(mean(q^2) + eps) g`` for each head's queries, and likewise for keys; ``_attention.normed.normed_heads``
computes it.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from typing_extensions import override

from lightning_eff._core._architecture.naming import check_met
from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._architecture.technique import Architecture, Change
from lightning_eff._core._branches.attention import Attention, Part
from lightning_eff._core.search_space import SearchSpace, needs_attention
from lightning_eff._core.technique import Control
from lightning_eff.model.layers._attention.normed import EPS, NormedHeads, runs
from lightning_eff.model.layers._attention.parts import attended, handed, is_meant
from lightning_eff.model.layers._shared.arguments import Paths
from lightning_eff.model.layers._shared.choosing import ByName

WHO = "QKNorm"
#: How far the mean squares of normalised queries may differ.
ALIKE = 1e-2


class QKNorm(ByName, Architecture):
    """Normalise each head's queries and keys by their root mean square before attention, with a learned gain.

    For heads of D features, attention logits start at no more than sqrt(D), so that attention does not collapse onto single
    tokens at high learning rates. Each attention has two gains of D numbers, shared by its heads. They start at one and are
    not decayed, as in Qwen3 and OLMo 2. The norms come directly after the linear layers, and so before rotary embeddings,
    which preserve lengths.

    Gradients in a forward and backward pass on a made-up input show which outputs of which layers are queries and keys, also
    if one layer computes queries, keys and values. After the change, a second pass verifies that attention receives
    normalised queries and keys. If a head's features are not adjacent, this fails and the technique refuses.

    Use it if attention logits grow; it is no speed-up by itself. **It changes the model**, and costs two norms per attention.
    Its checkpoints load only into ``lightning_eff.apply(plain, QKNorm())``, and ``export`` refuses. It logs ``attentions``,
    the number of attentions.

    Args:
        names: dotted paths of the linear layers that compute queries or keys, their last parts, or patterns, such as
            ``["layers.3.*"]``. It changes each attention that uses one of them. None takes all, ``[]`` is plain training.

    Raises:
        ValueError: for a wrong value. At setup or in ``apply``, if there is no attention, a name matches no layer of one,
            queries or keys are normalised already or not computed by a replaceable layer, or attention does not use
            ``scaled_dot_product_attention``.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[QKNorm()])

    References:
        Henry et al. 2020, "Query-Key Normalization for Transformers", arXiv:2010.04245.
        Dehghani et al. 2023, "Scaling Vision Transformers to 22 Billion Parameters", arXiv:2302.05442.
        Qwen Team 2025, "Qwen3 Technical Report", arXiv:2505.09388.
    """

    saves = "steps, if attention logits would grow at high learning rates; costs two norms per attention"
    paper = "Henry et al. 2020, arXiv:2010.04245; Dehghani et al. 2023, arXiv:2302.05442"
    constraints = "attention by scaled_dot_product_attention"
    search_space = SearchSpace({}, needs_attention)
    control = Control(
        "the baseline for the same time with its learning rate decayed to zero, and the best learning rate of each"
    )
    conflicts: ClassVar[Mapping[str, str]] = {}
    change_at = Change.ADAPT
    stays = "queries and keys are normalised, which the plain weights cannot do"
    _count = 0

    def __init__(self, names: Paths = None) -> None:
        self._take_names(names)

    # -- the change

    @override
    def change(self, surgeon: Surgeon) -> None:
        root = surgeon.root
        every = attended(root, who=WHO, batch=surgeon.batch)
        weights = {p.weight for one in every for p in (*one.query, *one.key)}
        if self.names is not None:
            paths = [w.removesuffix(".weight") for w in weights]
            check_met(self.names, paths, who=WHO, what="layers of queries or keys", root=type(root).__name__)
        makers = {w: root.get_submodule(w.rpartition(".")[0]) for w in weights}
        masks: dict[str, dict[str, Tensor]] = {}
        widths: dict[str, int] = {}
        chosen = [one for one in every if any(is_meant(p.weight, self.names) for p in (*one.query, *one.key))]
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
                    f"{WHO}: cannot normalise an attention of {type(root).__name__}: {reason}. Name other layers, or remove the"
                    " callback."
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
            what="a layer of queries or keys",
        )
        self._check_lengths(root, surgeon.batch, len(chosen))
        self._count = len(chosen)
        rank_zero_info(
            f"{WHO}: normalises queries and keys of {self._count} attentions, in {', '.join(sorted(masks)[:4])}."
        )

    def _check_lengths(self, root: nn.Module, batch: Any, expected: int) -> None:
        """Verify that attention receives normalised heads: the features of a head may not be adjacent."""
        made = [m for m in root.modules() if isinstance(m, NormedHeads)]
        try:
            for m in made:
                m.eps = 1e-30  # lengths may be small at the start
            with handed() as seen:
                attended(root, who=WHO, batch=batch)
        finally:
            for m in made:
                m.eps = EPS
        alike = sum(all(_of_one_length(x) for x in pair) for pair in seen.calls)
        if alike < expected or (self.names is None and alike < len(seen.calls)):
            raise ValueError(
                f"{WHO}: after the change, {alike} of {expected} attentions of {type(root).__name__} receive normalised queries"
                f" and keys, in {len(seen.calls)} calls of scaled_dot_product_attention. Set attn_implementation='sdpa' in a"
                " Hugging Face model, or remove the callback."
            )

    # -- reports

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"attentions": self._count}

    @override
    def summary(self) -> str:
        return (
            f"normalised queries and keys of {self._count} attentions"
            if self._count
            else "they were normalised already"
        )


def _unwrappable(maker: nn.Module, weight: str) -> str | None:
    """Why the owner of a weight is not called to compute queries or keys, or None; it may be a layer of any class."""
    if not weight.endswith(".weight") or isinstance(maker, NonDynamicallyQuantizableLinear):
        return f"its weight belongs to {type(maker).__name__}, not to a layer that is called"
    return None


def _of_one_length(x: Tensor) -> bool:
    """Whether heads, of shape (..., D), have the same mean square, except for heads of zeros."""
    squares = x.float().square().mean(-1)
    longest = squares.max()
    return bool(longest > 0) and bool(((squares >= (1.0 - ALIKE) * longest) | (squares <= ALIKE * longest)).all())


def _unfit(one: Attention) -> str | None:
    where = ", ".join(p.weight for p in (*one.query, *one.key)) or "no linear layer"
    if one.normed:
        return f"a norm follows {where} already"
    if not one.query or not one.key:
        return f"its queries or keys come from {where}"
    return f"the width of the heads of {where} is unknown" if one.width is None else None


def _check_heads(part: Part, width: int) -> None:
    for start, stop in runs(part.outputs):
        if (stop - start) % width:
            raise ValueError(
                f"{WHO}: outputs {start} to {stop} of {part.weight} are queries or keys, not a multiple of the heads' {width}"
                " features. Leave it out of `names`, or remove the callback."
            )
