"""VeRA: two vectors beside each frozen linear map, between random projections that all share (Kopiczko et al. 2023).

The rule is ``h = W x + b * B (d * A x)`` with W frozen, A of (r, K) and B of (N, r) random, frozen and shared by all maps,
which take as many of their columns and rows as they have; b of (N,) zero and d of (r,) small at first, which alone train.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.naming import check_names
from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core.search_space import Choice, SearchSpace, Survey
from lightning_eff._core.technique import Control
from lightning_eff.model.adapters._adapter import DEAD, RIVALS, Adapter, folded
from lightning_eff.model.adapters._optional import imported
from lightning_eff.model.adapters._peft.places import places, pointless
from lightning_eff.model.adapters._reading import read

WHO = "VeRA"


class VeRA(Adapter):
    """Fine-tune a pretrained module by r + N numbers beside each linear map of N outputs, and nothing else.

    The layers are peft's, under its names. Acted on are all linear maps of the stacks of repeated blocks, or of the whole
    module where it has no stack; tied maps are left; which they are is printed. At the first step the module computes what it
    did. Ranks are larger than ``LoRA``'s, since they cost r numbers a map, and may be larger than the maps.

    The projections are drawn of ``key``, as peft draws them, by torch's generator on the CPU: no checkpoint holds them, and
    each run and ``apply`` has the same. They take r (K + N) numbers once, for the largest K and N, and a step computes with
    factors of rank r at each map, so that it takes more time than ``LoRA`` of a small rank.

    Checkpoints hold what trains, and all buffers that are saved: a run resumes from one where the module's own code makes or
    loads the weights that the run began with, which is looked at. ``lightning_eff.export_adapter(module.model, folder)``
    writes the folder that ``peft.PeftModel.from_pretrained`` reads, projections included, and
    ``lightning_eff.export(module)`` merges into the plain module. Without a Trainer load a checkpoint with
    ``lightning_eff.apply(plain, VeRA(...)).load_state_dict(checkpoint["state_dict"], strict=False)``.

    ``HybridParallelStrategy`` divides what was put in with all else. Under Lightning's ``ModelParallelStrategy`` let
    ``configure_model`` call ``lightning_eff.apply(self, VeRA(...))`` before it divides the module, and give the strategy
    ``save_distributed_checkpoint=False``, or the technique ``save="all"``.

    Logged: ``trained`` and ``frozen``, how many numbers, and ``maps``.

    Args:
        rank: r, an integer >= 1.
        d_initial: what d begins at, other than 0; 0.1 is the paper's.
        dropout: of the projections' inputs, in [0, 1).
        key: of which the projections are drawn, an integer >= 0.
        names: dotted paths of maps, their last parts or patterns, such as ``["q_proj", "v_proj"]``; None looks for them,
            ``[]`` is plain training.
        also: patterns of parameters, or modules, that train as a whole beside, such as a new head.
        save: "adapter" for checkpoints of what trains, "all" for whole ones.

    Raises:
        ValueError: for other values; at setup or in ``apply``, where no map is left to act on, with the reason for each;
            for a name that means no map, with the nearest ones, or one that cannot be replaced; under strategies that
            divide parameters otherwise; from a checkpoint without the frozen weights, where the module has others than its
            run began with.
        ImportError: at setup, where peft is not installed.

    Sources:
        Kopiczko et al. 2023, arXiv:2310.11454.
    """

    saves: ClassVar[str] = "the memory of nearly all gradients and of the optimizer's state; checkpoints of kilobytes"
    paper: ClassVar[str] = "Kopiczko et al. 2023, arXiv:2310.11454"
    constraints: ClassVar[str] = "fine-tuning; needs peft"
    survey: ClassVar[Survey | None] = Survey("parameter-efficient tuning (VeRA)", zhuang="3")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"rank": Choice((64, 256, 1024))}, pointless)
    control: ClassVar[Control] = Control("the baseline, which tunes all weights, for as many seconds")
    conflicts: ClassVar[Mapping[str, str]] = {
        **DEAD,
        **dict.fromkeys(("LoRA", "BitFit", "HoulsbyAdapters", "PromptTuning", "VisualPromptTuning"), RIVALS),
        "Fixup": "it puts scalars before and behind each map, which is then no plain one that factors could stand beside",
        "ButterflyLinear": "it puts factors beside whole maps, of which that leaves none",
        "ApproximateRandomDropout": "its maps have projections beside them, and are not seen to be feed-forward networks",
        "GradientCentralization": "it centres the gradients of maps' weights, which are frozen here",
        "ReplaceOptimizer": "it steps hidden matrices, which are frozen here",
        "KFAC": "it preconditions the weights of maps, which are frozen here",
        "FixRes": "it ends by training the classifier and norms alone, which are frozen here",
        "GreedyLayerwise": "it trains some blocks at a time, whose vectors are all that trains here",
        "LayerFreezing": "it freezes blocks, whose vectors are all that trains here",
    }
    _maps = 0

    def __init__(
        self,
        rank: int = 256,
        *,
        d_initial: float = 0.1,
        dropout: float = 0.0,
        key: int = 0,
        names: Sequence[str] | None = None,
        also: Sequence[str] = (),
        save: Literal["adapter", "all"] = "adapter",
    ) -> None:
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            raise ValueError(f"{WHO}({rank=}): expected an integer >= 1, such as 256.")
        if not _number(d_initial) or d_initial == 0:
            raise ValueError(
                f"{WHO}({d_initial=}): expected a number other than 0, from which nothing would be learnt."
            )
        if not (_number(dropout) and 0.0 <= dropout < 1.0):
            raise ValueError(f"{WHO}({dropout=}): expected a share of the inputs in [0, 1).")
        if not isinstance(key, int) or isinstance(key, bool) or key < 0:
            raise ValueError(f"{WHO}({key=}): expected an integer >= 0, of which the projections are drawn.")
        self.rank, self.d_initial, self.dropout, self.key = rank, d_initial, dropout, key
        self.names = check_names(names, who=WHO, what="linear maps", example="q_proj")
        self._take(save, also)

    @property
    @override
    def neutral(self) -> bool:
        return self.names == []

    @override
    def change(self, surgeon: Surgeon) -> None:
        imported("peft", extra="peft", who=WHO)
        from peft import VeraConfig

        from lightning_eff.model.adapters._peft.vera import projections, vera_layer

        root = surgeon.root
        maps, left = places(root, self.names, rank=self.rank, bounded=False, who=WHO)
        config = VeraConfig(
            r=self.rank, d_initial=self.d_initial, vera_dropout=self.dropout, projection_prng_key=self.key
        )
        trained = self.begin(root)
        chosen = {id(m.module): m for m in maps}
        inside = {id(p) for m in maps for p in m.module.parameters()}
        made: list[nn.Module] = []
        in_readers = read(root)
        largest = max(m.in_features for m in maps), max(m.out_features for m in maps)
        shared = projections(self.rank, *largest, self.key)

        def build(plain: nn.Module) -> nn.Module:
            of = chosen[id(plain)]
            made.append(
                new := vera_layer(plain, shared, config, transposed=of.transposed, read=id(plain) in in_readers)
            )
            return new

        surgeon.leave(left)
        surgeon.swap(lambda path, m: id(m) in chosen, build, what="a linear map", numbers=True)
        trained = (trained - inside) | {id(p) for m in made for p in m.parameters() if id(p) not in inside}
        self._maps = len(made)
        told = folded([m.path for m in maps])
        self.freeze(surgeon, trained, f"vectors beside {len(maps)} linear maps, of rank {self.rank}: {told}")

    # -- what is told

    @override
    def report(self) -> "dict[str, float | int | Tensor]":
        return {**super().report(), "maps": self._maps}


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
