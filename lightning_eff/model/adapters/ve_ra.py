"""VeRA: train two vectors on each frozen linear layer, around random projections that all share (Kopiczko et al. 2023).

The rule is ``h = W x + b * B (d * A x)`` with W frozen, and A of (r, K) and B of (N, r) random, frozen and shared by all
layers, which use as many of their columns and rows as they need. Only b of (N,), initially zero, and d of (r,), initially
small, are trained.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

from torch import nn
from typing_extensions import override

from lightning_eff._core._architecture.linear_maps import LinearMap
from lightning_eff._core._arguments.kinds import Alias, Count, Number
from lightning_eff._core.search_space import Choice, SearchSpace
from lightning_eff.model.adapters._adapter import DEAD, FROZEN, RIVALS, blockwise
from lightning_eff.model.adapters._arguments import Also, Dropout, Rank, Save, Targets
from lightning_eff.model.adapters._peft.places import pointless
from lightning_eff.model.adapters._peft.technique import Maker, OnLinearLayers

WHO = "VeRA"


class VeRA(OnLinearLayers):
    """Fine-tune a pretrained module by training r + N numbers on each linear layer of N outputs; everything else is frozen.

    The layers are peft's, with peft's names. VeRA adapts all linear layers in the stacks of repeated blocks, or in the whole
    module if it has no stack. It skips tied layers. A log line lists the adapted layers. At the first step the module
    computes the same as before. Ranks are higher than those of ``LoRA``, because the rank costs only r numbers per layer.
    They may exceed the layer's sides.

    Use it if ``LoRA`` has too many trained parameters, for example for many adapters of one model. The projections are drawn
    from ``key`` as in peft, with torch's generator on the CPU. No checkpoint holds them, and each run and ``apply`` gets the
    same. They take r (K + N) numbers once, for the largest K and N. A step multiplies by factors of rank r at each layer, so
    it takes longer than ``LoRA`` with a small rank.

    Checkpoints hold the trained weights and all buffers, usually some kilobytes. To resume from one, the module's own code
    must make or load the same frozen weights; this is verified. Without a Trainer, load one with ``lightning_eff.apply(plain,
    VeRA(...)).load_state_dict(checkpoint["state_dict"], strict=False)``. ``lightning_eff.export_adapter(module.model,
    folder)`` writes the folder that ``peft.PeftModel.from_pretrained`` reads, including the projections.
    ``lightning_eff.export(module)`` merges the vectors into the plain module.

    ``HybridParallelStrategy`` divides the new weights like all others. Under Lightning's ``ModelParallelStrategy``, call
    ``lightning_eff.apply(self, VeRA(...))`` in ``configure_model`` before it divides the module, and set
    ``save_distributed_checkpoint=False`` on the strategy or ``save="all"`` here. It logs ``trained`` and
    ``frozen``, the numbers of parameters, and ``maps``, the number of adapted layers.

    Args:
        rank: the rank of the projections. Also accepted as ``r``.
        d_initial: the initial value of d, which cannot be 0. 0.1 is the paper's.
        dropout: the probability to drop an input of the projections. Also accepted as ``vera_dropout``.
        key: the seed of the projections. Also accepted as ``projection_prng_key``.
        names: dotted paths of the linear layers, their last parts, or patterns, such as ``["q_proj", "v_proj"]``. None looks
            for layers, ``[]`` is plain training. Also accepted as ``target_modules``.
        also: patterns of parameters or modules that train as a whole in addition, such as a new head. Also accepted as
            ``modules_to_save``.
        save: what checkpoints hold. "adapter" is only what trains, "all" the whole module.

    Raises:
        ValueError: for a value out of range. At setup or in ``apply``, if there is no layer to adapt, a name matches none, a
            named layer cannot be adapted, or the strategy divides parameters in another way than FSDP2. On resume, if the
            module's frozen weights are not those of the run.
        ImportError: at setup, if peft is not installed.

    Example:
        >>> trainer = L.Trainer(max_epochs=3, callbacks=[VeRA(256, also=["classifier"])])

    References:
        Kopiczko et al. 2023, "VeRA: Vector-based Random Matrix Adaptation", arXiv:2310.11454.
    """

    saves = "the memory of nearly all gradients and of the optimizer's state; checkpoints of kilobytes"
    paper = "Kopiczko et al. 2023, arXiv:2310.11454"
    search_space = SearchSpace({"rank": Choice((64, 256, 1024))}, pointless)
    conflicts: ClassVar[Mapping[str, str]] = {
        **DEAD,
        **FROZEN,
        **blockwise("vectors"),
        **dict.fromkeys(("LoRA", "BitFit", "HoulsbyAdapters", "PromptTuning", "VisualPromptTuning"), RIVALS),
        "Fixup": "it adds scalars before and after each linear layer, and such a layer cannot be adapted",
        "ButterflyLinear": "this adapts linear layers, and it replaces all of them with factors",
        "ApproximateRandomDropout": "this adds projections to linear layers, which hides feed-forward networks",
    }
    trains: ClassVar[str] = "vectors"
    bounded: ClassVar[bool] = False

    def __init__(
        self,
        rank: Rank = 256,
        *,
        d_initial: Annotated[float, Number()] = 0.1,
        dropout: Annotated[Dropout, Alias("vera_dropout")] = 0.0,
        key: Annotated[int, Count(at_least=0), Alias("projection_prng_key")] = 0,
        names: Targets = None,
        also: Also = (),
        save: Save = "adapter",
    ) -> None:
        if d_initial == 0:
            raise ValueError(f"{WHO}({d_initial=}): from 0, b gets no gradient. Give another number, such as 0.1.")
        self.rank, self.d_initial, self.dropout, self.key = rank, d_initial, dropout, key
        self._take(save, also, names)

    @override
    def maker(self, maps: Sequence[LinearMap]) -> Maker:
        from peft import VeraConfig

        from lightning_eff.model.adapters._peft.vera import projections, vera_layer

        config = VeraConfig(
            r=self.rank, d_initial=self.d_initial, vera_dropout=self.dropout, projection_prng_key=self.key
        )
        largest = max(m.in_features for m in maps), max(m.out_features for m in maps)
        shared = projections(self.rank, *largest, self.key)

        def make(base: nn.Module, *, transposed: bool, read: bool) -> nn.Module:
            return vera_layer(base, shared, config, transposed=transposed, read=read)

        return make
