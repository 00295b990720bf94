"""PrefixTuning: train keys and values before those of each layer, with the model frozen (Li & Liang 2021).

The rule is ``softmax(Q [P_K; K]^T / sqrt(d)) [P_V; V]`` in each attention, for P_K and P_V of (k, d), the only trained weights.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._arguments.kinds import Alias, Count
from lightning_eff._core._attention.calls import Call
from lightning_eff._core._attention.inside import places
from lightning_eff._core._needs.needs import UNTRIED, Part, Reasons
from lightning_eff._core.search_space import Choice, SearchSpace
from lightning_eff.model.adapters._adapter import DEAD, FROZEN, RIVALS, Adapter, blockwise, unless_memory_bound
from lightning_eff.model.adapters._arguments import Also, Length, Save
from lightning_eff.model.adapters._pieces import nowhere
from lightning_eff.model.adapters._prompts.prefix import Init, Trunk, prefixed

WHO = "PrefixTuning"
_KEYS = "its attention has keys without a token, which the other would count as tokens"
_PACKED = "samples in a row would share one prefix, and the mask that separates them has no place for it"
_COMPILED = "compiled code hides the attention that gets the prefix"


def _anything(call: Call) -> str | None:
    """Every call can get a prefix."""
    return None


class PrefixTuning(Adapter):
    """Fine-tune a pretrained transformer by training k keys and values in every attention; the model is frozen.

    Each query sees the prefix before its own keys, whatever the mask says about those. Self-attention and cross-attention of
    encoders, decoders and encoder-decoders get one. The module's code is unchanged: its calls of
    ``F.scaled_dot_product_attention`` (Hugging Face's "sdpa" among them) and of ``nn.MultiheadAttention`` (with
    ``need_weights=False``) are extended. They are found in a pass on a made-up input. Tokens keep their positions, so the
    model needs no room for more, and generation with a cache works. peft instead moves the text by k positions, which
    differs in models with learnt positions.

    Use it for large models with many tasks: 2 k d trained parameters per layer. A step costs as much as k more keys in each
    attention, and the backward pass goes through the whole network. A mask is copied in each layer. With ``hidden``, a
    network of two layers computes the prefixes during training, as in the paper, which found it more stable. Its weights stay
    in the module and its checkpoints.

    Checkpoints hold the trained weights and all buffers. To resume from one, the module's own code must make or load the same
    frozen weights; this is verified. Without a Trainer, load one with ``lightning_eff.apply(plain,
    PrefixTuning(...)).load_state_dict(checkpoint["state_dict"], strict=False)``. It logs ``trained`` and ``frozen``, the
    numbers of parameters, and ``attentions``, the number of modules with a prefix.

    Args:
        length: k, the number of keys and values in each attention. 0 is plain training. The paper uses 10 for table-to-text and
            200 for summarisation. Also accepted as ``num_virtual_tokens``.
        hidden: the width of the network that computes the prefixes, shared by all layers up to its last linear layer. None
            trains the prefixes themselves. The paper uses 512 and 800. Also accepted as ``encoder_hidden_size``.
        init: the initial prefixes. "normal" draws them, or the network's weights as torch does. "zero" starts with zeros.
        also: patterns of parameters or modules that train as a whole in addition, such as a new head. Also accepted as
            ``modules_to_save``.
        save: what checkpoints hold. "adapter" is only what trains, "all" the whole module.

    Raises:
        ValueError: for a value out of range. At setup or in ``apply``, if there is no such attention, a module attends several
            times in a pass, it is compiled, or the strategy divides the module. On resume, if the module's frozen weights are
            not those of the run.

    Example:
        >>> trainer = L.Trainer(max_epochs=3, callbacks=[PrefixTuning(20, hidden=512)])

    References:
        Li & Liang 2021, "Prefix-Tuning: Optimizing Continuous Prompts for Generation", arXiv:2101.00190.
    """

    saves = "the memory of nearly all gradients and of the optimizer's state; checkpoints of kilobytes"
    paper = "Li & Liang 2021, arXiv:2101.00190"
    constraints = (
        "transformers whose attention is scaled_dot_product_attention or nn.MultiheadAttention, not compiled; a single device"
        " or DDP"
    )
    search_space = SearchSpace({"length": Choice((5, 20, 100)), "hidden": Choice((None, 512))}, unless_memory_bound)
    stays = "its prefixes are not tokens, and a plain module has no place for them in its attention"
    conflicts: ClassVar[Mapping[str, str]] = {
        **DEAD,
        **FROZEN,
        **blockwise("prefixes"),
        **dict.fromkeys(("LoRA", "BitFit", "HoulsbyAdapters", "PromptTuning", "VisualPromptTuning", "VeRA"), RIVALS),
        **dict.fromkeys(
            (
                "AttentionWindowWarmup",
                "DOTAAttention",
                "Fastformer",
                "GatedPositionalAttention",
                "Linformer",
                "MaskGuidedTokens",
                "NarrowAttention",
                "Reformer",
                "TokenMerging",
                "TransMix",
            ),
            _KEYS,
        ),
        **dict.fromkeys(("EarlyBird", "TrainLargeThenCompress"), "it prunes units, whose weights are frozen here"),
        "QKNorm": "it normalises all keys, and those of a prefix are trained as they are",
        "SequencePacking": _PACKED,
        "RegionalCompilation": _COMPILED,
    }
    refuses: ClassVar[Reasons] = {
        **Adapter.refuses,
        Part.SHARD: UNTRIED,
        Part.TENSOR: "its prefixes have the heads of the whole layer",
        Part.ITSELF: UNTRIED,
        Part.PIPELINE: UNTRIED,
    }
    neutral_at: ClassVar[Mapping[str, Any]] = {"length": 0}
    _attentions = 0

    def __init__(
        self,
        length: Length = 20,
        *,
        hidden: Annotated[int, Count(), Alias("encoder_hidden_size")] | None = None,
        init: Init = "normal",
        also: Also = (),
        save: Save = "adapter",
    ) -> None:
        self.length, self.hidden = length, hidden
        self.init: Init = init
        self._take(save, also)

    @override
    def change(self, surgeon: Surgeon) -> None:
        root = surgeon.root
        trained = self.begin(root)
        with nowhere(root):
            found = places(surgeon, who=WHO, unfit=_anything)
        by_id = {id(root.get_submodule(path)): place for path, place in found.items()}
        trunk: list[Trunk] = []

        def build(plain: nn.Module) -> nn.Module:
            place, first = by_id[id(plain)], not trunk
            if self.hidden is not None and first:
                trunk.append(Trunk(self.length, place.heads * place.width, self.hidden))
            shared = trunk[0] if trunk else None
            return prefixed(plain, place, who=WHO, length=self.length, init=self.init, trunk=shared, own=first)

        old = {id(p) for p in root.parameters()}
        surgeon.swap(lambda path, m: path in found, build, what="a module that attends", numbers=True)
        new = {id(p) for p in root.parameters()} - old
        self._attentions = len(found)
        of = next(iter(found.values())).of
        rank_zero_info(f"{WHO}: the attention of {len(found)} modules was found by {of}.")
        self.freeze(surgeon, trained | new, f"{self.length} keys and values in each of {len(found)} attentions")

    @override
    def report(self) -> "dict[str, float | int | Tensor]":
        return {**super().report(), "attentions": self._attentions}
