"""Gated positional attention: vision transformers start like convolutions and learn to look elsewhere (d'Ascoli et al.
2021).

``_gated.rule`` holds the rule; ``_gated.mixing`` runs it in unchanged modules.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._architecture.technique import Architecture, Change
from lightning_eff._core._arguments.kinds import Alias, Count, Number
from lightning_eff._core._needs.needs import Need, Part, Reasons
from lightning_eff._core.search_space import Choice, SearchSpace, needs_images
from lightning_eff._core.technique import Control
from lightning_eff.model.initialization._gated.finding import find
from lightning_eff.model.initialization._gated.gated import gated
from lightning_eff.model.initialization._maps import listed
from lightning_eff.model.initialization._once import refuse_pretrained

WHO = "GatedPositionalAttention"
_PLACES = "it removes or merges patches, and positions need the whole grid"


def gated_layers(layers: int) -> int:
    """Return ``floor(5 L / 6)`` of L layers, at least 1: 10 of 12, as in the paper."""
    return max(5 * layers // 6, 1)


class GatedPositionalAttention(Architecture):
    """Let the first layers of a vision transformer also attend by position, starting like a convolution, with a learnt
    gate.

    Attention of head h from patch i to patch j becomes

        A_h = (1 - s(lambda_h)) softmax_j(Q_i K_j^T / sqrt(d)) + s(lambda_h) softmax_j(v_h^T r_ij),

    with s the sigmoid, ``r_ij = (dx, dy, dx^2 + dy^2)`` the offset from i to j in patches, and lambda (H,) and v (H, 3)
    learnt for each layer. lambda starts at 1. v starts so that each head looks at its own place around the patch, like
    a tap of a convolution: ``v_h^T r = -alpha |(dx, dy) - D_h|^2 + const``. The places D_h form a square grid; if the
    number of heads is not a square, they are the central places of the next larger grid.

    Use it to train vision transformers on little data. Each gated layer costs one more product of (N, N) weights with
    the values.

    The module's calls of attention are changed: ``F.scaled_dot_product_attention`` (Hugging Face's "sdpa" among them),
    ``nn.MultiheadAttention``, and softmax of scores (Hugging Face's "eager"). A pass on made-up images finds these
    calls, their number of heads, and which tokens are patches. Other tokens, such as a class token, attend and are
    attended to by content alone. Images of another size use a grid of the same proportions. Two things differ from the
    paper: it adds the class token behind the gated layers, and it starts value projections at the identity.
    ``lightning_eff.export`` refuses such a module, because gates cannot be folded into weights.

    Logged: ``layers``, the number of gated layers; ``gate``, the mean of s(lambda) over their heads.

    Args:
        gated: the number of gated layers, from the first one on. None is 10 of 12, and 0 is plain training. Also
            accepted as ``local_up_to_layer``.
        locality: the locality strength alpha. 1 is the paper's. Also accepted as ``locality_strength``.
        force: whether to also change a module that was loaded from a checkpoint, which changes its function.

    Raises:
        ValueError: for a value out of range. At setup or in ``apply``, if nothing attends to the patches of an image,
            fewer layers do than ``gated``, or the module is pretrained and ``force`` is not set.

    Example:
        >>> trainer = L.Trainer(max_epochs=100, callbacks=[GatedPositionalAttention()])

    References:
        d'Ascoli et al. 2021, "ConViT: Improving Vision Transformers with Soft Convolutional Inductive Biases",
        arXiv:2103.10697.
    """

    saves = "steps and samples: vision transformers need not learn that nearby patches matter"
    paper = "d'Ascoli et al. 2021, arXiv:2103.10697"
    constraints = "vision transformers that attend to all patches of a grid, not compiled"
    search_space = SearchSpace(
        {"locality": Choice((0.5, 1.0, 2.0))},
        needs_images,
    )
    control = Control(
        "the baseline for as many seconds with its learning rate decayed to zero, since a step costs more"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("RandomLTD", "TokenDropping", "PatchDropout", "TokenMerging", "PartialTokenTraining"), _PLACES
        ),
        **dict.fromkeys(
            ("ProgressiveStacking", "ShallowToDeep", "CompoundGrowth", "AutoProg"),
            "its blocks must be copies of each other, but only some have gates",
        ),
        "AttentionWindowWarmup": "positions would reach beyond the window",
        "Fastformer": "its attention compares no queries with keys, whose weights gates would mix with those of positions",
        "RegionalCompilation": "attention inside compiled blocks cannot be changed",
    }
    change_at = Change.ADAPT
    stays = "attention without gates computes something else"
    needs: ClassVar[Need] = Need.WHOLE
    refuses: ClassVar[Reasons] = {**Architecture.refuses, Part.SHARD: "", Part.PIPELINE: ""}
    neutral_at: ClassVar[Mapping[str, Any]] = {"gated": 0}

    def __init__(
        self,
        *,
        gated: Annotated[int | None, Count(at_least=0), Alias("local_up_to_layer")] = None,
        locality: Annotated[float, Number(above=0), Alias("locality_strength")] = 1.0,
        force: bool = False,
    ) -> None:
        self.gated, self.locality, self.force = gated, locality, force
        self._gates: list[Tensor] = []

    @override
    def settings(self) -> dict[str, Any]:
        """Return the settings that determine the module's function, so all but ``force``."""
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
                f"{WHO}(gated={count}): only {len(found.attending)} layers of {type(root).__name__} attend to patches:"
                f" {listed([*found.attending], 5)}. Use gated={len(found.attending)} or less."
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
            f"{WHO}: gated {count} of {len(found.attending)} layers, found by {found.of}, on {grid.height} x {grid.width}"
            f" patches and {others} other token{'s' * (others != 1)}: {listed([*chosen])}"
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
            return "the module was already gated"
        return f"{len(self._gates)} layers attend by position at {float(self.report()['gate']):.0%} on average"

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_gates": [gate.detach().clone() for gate in self._gates]}
