"""Gated positional attention: vision transformers begin as convolutions do, and learn how far not to (d'Ascoli et al. 2021).

The rule stands in ``_gated.rule``; what runs it in unchanged modules in ``_gated.mixing``.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._architecture.technique import Architecture, Change
from lightning_eff._core._needs.needs import Need, Part, Reasons
from lightning_eff._core.search_space import Choice, SearchSpace, Survey
from lightning_eff._core.technique import Control
from lightning_eff.model.initialization._gated.finding import find
from lightning_eff.model.initialization._gated.gated import gated
from lightning_eff.model.initialization._maps import listed
from lightning_eff.model.initialization._once import refuse_pretrained

WHO = "GatedPositionalAttention"
_PLACES = "of some of the patches it cannot be told where they stand, and positions are of the whole grid"


def gated_layers(layers: int) -> int:
    """``floor(5 L / 6)`` of L layers, at least 1: 10 of 12, as the source has."""
    return max(5 * layers // 6, 1)


class GatedPositionalAttention(Architecture):
    """Let the first layers of a vision transformer attend to places as well, each head to its own at first, by a learnt gate.

    Attention of head h from patch i to patch j becomes

        A_h = (1 - s(lambda_h)) softmax_j(Q_i K_j^T / sqrt(d)) + s(lambda_h) softmax_j(v_h^T r_ij),

    with s the sigmoid, ``r_ij = (dx, dy, dx^2 + dy^2)`` from i to j in patches, and lambda (H,) and v (H, 3) learnt for each
    layer. lambda is 1 at first; v lets head h look at a place D_h, ``v_h^T r = -alpha |(dx, dy) - D_h|^2 + const``, and these
    places are a square grid around the patch itself, as taps of a convolution are; of a number of heads that is no square
    the places of the next larger grid that are nearest to its middle. With alpha large and s near 1, heads are shifts.

    The module stays as it is, its calls of attention are mixed with positions: ``F.scaled_dot_product_attention``
    (Hugging Face's "sdpa" among them), ``nn.MultiheadAttention``, and softmax of scores (Hugging Face's "eager"). Where they
    are, how many heads they have, and which tokens are patches is found by a pass on images that are made up. Other tokens,
    such as a class token, have no place: they attend and are attended to by content alone. The source puts its class token in
    behind the gated layers, which an unchanged module does not. It also begins value maps at the identity, which this does not.

    Images of another size have a grid of the same proportions. Positions cost a product of (N, N) weights with the values in
    each layer. ``lightning_eff.export`` refuses: gates do not fold away.

    Logged: ``layers``, how many are gated; ``gate``, the mean of s(lambda) over their heads.

    Args:
        gated: how many of the layers that attend to patches, from the first on; None for 10 of 12; 0 is plain training.
        locality: alpha, above 0.
        force: also act on a module that was loaded from a checkpoint, whose function it changes.

    Raises:
        ValueError: for other values; at setup or in ``apply``, where nothing attends to the patches of an image, with what was
            found, or fewer layers do than ``gated``; for a pretrained module without ``force``.

    Source:
        d'Ascoli et al. 2021, "ConViT", arXiv:2103.10697.
    """

    saves: ClassVar[str] = "steps and samples: vision transformers need not learn first that near patches matter"
    paper: ClassVar[str] = "d'Ascoli et al. 2021, arXiv:2103.10697"
    constraints: ClassVar[str] = "image transformers on all patches of a grid, not compiled"
    survey: ClassVar[Survey | None] = Survey("initialisation: gated positional self-attention (ConViT)", shen="4.3")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"locality": Choice((0.5, 1.0, 2.0))},
        pointless=lambda profile: None if profile.image_side else "samples are no images",
    )
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds with its learning rate decayed to zero, since a step costs more"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("RandomLTD", "TokenDropping", "PatchDropout", "TokenMerging", "PartialTokenTraining"), _PLACES
        ),
        **dict.fromkeys(
            ("ProgressiveStacking", "ShallowToDeep", "CompoundGrowth", "AutoProg"),
            "blocks are to be copies of each other, and some have gates and places",
        ),
        "AttentionWindowWarmup": "positions would see past the window",
        "RegionalCompilation": "attention inside of compiled blocks cannot be seen",
    }
    change_at: ClassVar[Change] = Change.ADAPT
    stays: ClassVar[str] = "attention without gates and places does not compute what it does with them"
    needs: ClassVar[Need] = Need.WHOLE
    refuses: ClassVar[Reasons] = {**Architecture.refuses, Part.SHARD: "", Part.PIPELINE: ""}

    def __init__(self, *, gated: int | None = None, locality: float = 1.0, force: bool = False) -> None:
        if gated is not None and (isinstance(gated, bool) or not isinstance(gated, int) or gated < 0):
            raise ValueError(
                f"{WHO}(gated={gated!r}): expected how many layers are gated, from the first on, or None for 10 of 12;"
                " 0 is plain training."
            )
        if not 0.0 < locality < float("inf"):
            raise ValueError(f"{WHO}({locality=}): expected a number above 0. 1 is the source's.")
        if not isinstance(force, bool):
            raise ValueError(f"{WHO}({force=}): expected True or False.")
        self.gated, self.locality, self.force = gated, locality, force
        self._gates: list[Tensor] = []

    @property
    @override
    def neutral(self) -> bool:
        return self.gated == 0

    @override
    def settings(self) -> dict[str, Any]:
        """What the module's function goes by; whether it was loaded before is its own affair."""
        return {name: value for name, value in super().settings().items() if name != "force"}

    @override
    def change(self, surgeon: Surgeon) -> None:
        root = surgeon.root
        if not self.force:
            refuse_pretrained(root, who=WHO, would="change what the module computes")
        found = find(root, who=WHO, batch=surgeon.batch)
        count = gated_layers(len(found.attending)) if self.gated is None else self.gated
        if count > len(found.attending):
            raise ValueError(
                f"{WHO}(gated={count}): {len(found.attending)} layers of {type(root).__name__} attend to patches:"
                f" {listed([*found.attending])}; expected at most as many."
            )
        chosen = dict(list(found.attending.items())[:count])
        heads = {id(root.get_submodule(path)): number for path, number in chosen.items()}

        def build(plain: nn.Module) -> nn.Module:
            return gated(plain, heads=heads[id(plain)], grid=found.grid, locality=self.locality)

        surgeon.swap(lambda path, m: path in chosen, build, what="a module that attends to patches")
        self._gates = [root.get_submodule(path).get_parameter("locality_gate") for path in chosen]
        grid = found.grid
        others = grid.before + grid.after
        rank_zero_info(
            f"{WHO}: {count} of {len(found.attending)} layers, found by {found.of}, attend to places on {grid.height} x"
            f" {grid.width} patches, {others} other token{'s' * (others != 1)} by content alone: {listed([*chosen])}"
        )

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        if not self._gates:
            return {"layers": 0}
        means = [gate.detach().float().sigmoid().mean() for gate in self._gates]
        return {"layers": len(means), "gate": sum(means, means[0].new_zeros(())) / len(means)}

    @override
    def summary(self) -> str:
        if not self._gates:
            return "the module was gated already"
        return f"{len(self._gates)} layers attend to places by {float(self.report()['gate']):.0%} on average"

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_gates": [gate.detach().clone() for gate in self._gates]}
