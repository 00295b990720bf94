"""RemoveBias: transformer blocks without biases (Geiping & Goldstein 2022).

The rule is ``y = W x`` for linear layers, and ``y = (x - mean) / sqrt(var + eps) g`` for LayerNorm. Each is the plain layer
with a bias of zero. ``_attention.rebiased`` holds the layers.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from typing_extensions import override

from lightning_eff._core._architecture.linear_maps import LinearMap, linear_maps, unfit
from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._architecture.technique import Architecture, Change
from lightning_eff._core._arguments.kinds import SomeOf
from lightning_eff._core._needs.needs import UNTRIED, Part, Reasons
from lightning_eff._core._stack.finding import repeated
from lightning_eff._core.search_space import SearchSpace, needs_blocks
from lightning_eff._core.technique import Control
from lightning_eff.model.layers._attention.rebiased import RebiasedLinear, UnbiasedConv1D, UnbiasedLayerNorm
from lightning_eff.model.layers._shared.arguments import Paths
from lightning_eff.model.layers._shared.choosing import ByName, check_any, select
from lightning_eff.model.layers._shared.fast_paths import REASON, linear_in_evaluation, read_in_evaluation

WHO = "RemoveBias"
KINDS = ("linear", "norm")


class RemoveBias(ByName, Architecture):
    """Remove the biases of linear layers and LayerNorms in a network's blocks.

    Each ``nn.Linear`` and Hugging Face ``Conv1D`` of a repeated block becomes ``W x``, and each ``nn.LayerNorm`` keeps its
    gain only. Weights stay. Layers outside of blocks keep their biases, because a head's bias holds the frequencies of
    classes; name them to include them. Biases that are not zero are dropped, so a pretrained module computes something else
    afterwards. ``RemoveQKVBias`` removes those that have no effect, and needs no training from scratch.

    Use it when you train a transformer from scratch. **It saves little**: the sums of gradients over tokens for each bias,
    and less than 1 % of the parameters. Cramming reports the same quality. Checkpoints load into ``lightning_eff.apply(plain,
    RemoveBias())``. ``lightning_eff.export`` returns the plain module with biases of zero, which computes the same.

    It skips layers that cannot lose their bias, and logs which: those that ``nn.MultiheadAttention`` or
    ``nn.TransformerEncoderLayer`` read without calling them, subclasses with their own ``forward``, and biases that several
    modules share. It logs ``removed``, the number of parameters.

    Args:
        of: the kinds of layers. ``[]`` is plain training.
        names: dotted paths of the layers, their last parts, or patterns, such as ``["blocks.*.mlp.*"]``. None takes all in
            the repeated blocks, ``[]`` is plain training.

    Raises:
        ValueError: for a wrong value. At setup or in ``apply``, if there is no bias to remove, a name matches no layer with a
            bias, or a named layer cannot lose it.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[RemoveBias()])

    References:
        Geiping & Goldstein 2022, "Cramming: Training a Language Model on a Single GPU in One Day", arXiv:2212.14034.
    """

    saves = "sums of gradients over tokens, and less than 1 % of the parameters"
    paper = "Geiping & Goldstein 2022, arXiv:2212.14034"
    constraints = "repeated blocks with nn.Linear, Conv1D or nn.LayerNorm; no sharding, tensor or pipeline parallelism"
    search_space = SearchSpace({}, needs_blocks)
    control = Control("the baseline for the same time, with all biases")
    conflicts: ClassVar[Mapping[str, str]] = {
        "BitFit": "RemoveBias removes the biases that BitFit trains",
        "RemoveQKVBias": "RemoveBias removes the biases of keys and values too",
    }
    refuses: ClassVar[Reasons] = {
        **Architecture.refuses,
        **dict.fromkeys((Part.SHARD, Part.TENSOR, Part.ITSELF, Part.PIPELINE), UNTRIED),
    }
    change_at = Change.SWAP
    _removed = 0

    def __init__(
        self,
        of: Annotated[
            Sequence[str], SomeOf(KINDS, once=True, hint="Biases of convolutions and batch norms stay.")
        ] = KINDS,
        *,
        names: Paths = None,
    ) -> None:
        self.of = list(of)
        self._take_names(names)

    @property
    @override
    def neutral(self) -> bool:
        return not self.of or super().neutral

    # -- the change

    @override
    def change(self, surgeon: Surgeon) -> None:
        root = surgeon.root
        maps = {m.path: m for m in linear_maps(root) if m.path and m.module.bias is not None}
        every = self._candidates(root, maps)
        users = _users(root)
        read = read_in_evaluation(root) | linear_in_evaluation(root)

        def why_not(path: str, m: nn.Module) -> str | None:
            if is_parametrized(m):
                return "it is parametrized"
            if id(m) in read:
                return REASON
            if isinstance(m, nn.LayerNorm) and type(m).forward is not nn.LayerNorm.forward:
                return "it is a subclass of nn.LayerNorm with its own forward"
            if path in maps and (reason := unfit(maps[path])) is not None:
                return reason
            return "several modules share its bias" if users[id(m.bias)] > 1 else None

        found, left = select(every, self.names, why_not, who=WHO, what="layers with a bias", root=root)
        check_any(found, left, who=WHO, what="layer with a bias", root=root)
        if not found:
            raise ValueError(
                f"{WHO}(of={self.of}): found no such layer with a bias in repeated blocks of {type(root).__name__}. Name"
                f" layers elsewhere, such as names=['{next(iter(maps), 'fc')}'], or remove the callback."
            )
        surgeon.leave(left)
        ids = {id(m): maps.get(path) for path, m in found.items()}
        self._removed = sum(m.bias.numel() for m in {id(m): m for m in found.values()}.values())  # pyright: ignore[reportCallIssue]
        paths = surgeon.swap(
            lambda path, m: id(m) in ids, lambda m: _unbiased(m, ids[id(m)]), what="a layer with a bias"
        )
        rank_zero_info(f"{WHO}: removed {self._removed:,} biases of {len(ids)} layers, such as {', '.join(paths[:4])}.")

    def _candidates(self, root: nn.Module, maps: Mapping[str, LinearMap]) -> dict[str, nn.Module]:
        """The layers with a bias, by path: all, or those in repeated blocks if there are no names."""
        norms = {path: m for path, m in root.named_modules() if isinstance(m, nn.LayerNorm) and m.bias is not None}
        kinds: dict[str, Mapping[str, nn.Module]] = {
            "linear": {path: m.module for path, m in maps.items()},
            "norm": norms,
        }
        every = {path: m for kind in self.of for path, m in kinds[kind].items()}
        if self.names is not None:
            return every
        blocks = tuple(prefix for stack in repeated(root) if stack.composite for prefix in stack.prefixes)
        return {path: m for path, m in every.items() if blocks and path.startswith(blocks)}

    # -- reports

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"removed": self._removed}

    @override
    def summary(self) -> str:
        return f"removed {self._removed:,} biases" if self._removed else "the module already had none"


def _users(root: nn.Module) -> dict[int, int]:
    """How many modules register each parameter, by its id."""
    found: dict[int, int] = {}
    for m in root.modules():
        for p in m._parameters.values():
            found[id(p)] = found.get(id(p), 0) + 1
    return found


def _unbiased(m: nn.Module, one: LinearMap | None) -> nn.Module:
    if isinstance(m, nn.LayerNorm):
        return UnbiasedLayerNorm(m)
    assert one is not None
    return UnbiasedConv1D(one) if not isinstance(m, nn.Linear) else RebiasedLinear(m, None)
