"""BitFit: train the biases alone, and freeze every other weight (Ben Zaken et al. 2022).

The rule is ``theta_t+1 = theta_t - gamma g`` for ``theta`` a bias, and ``theta_t+1 = theta_t`` for all others.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from torch import nn
from typing_extensions import override

from lightning_eff._core._architecture.naming import check_met, check_names, meets
from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._architecture.technique import Change
from lightning_eff._core.search_space import RunProfile, SearchSpace, Survey
from lightning_eff._core.technique import Control
from lightning_eff.model.adapters._adapter import DEAD, RIVALS, Adapter, folded

WHO = "BitFit"


def biases(module: nn.Module) -> dict[str, nn.Parameter]:
    """The bias terms of ``module`` by name: vectors called ``bias``, or by a name that ends so, as ``in_proj_bias``."""
    return {
        name: p
        for name, p in module.named_parameters()
        if p.ndim <= 1 and name.rpartition(".")[2].lower().endswith("bias")
    }


def _pointless(profile: RunProfile) -> str | None:
    return None if profile.memory_bound else "memory limits neither batch nor model, and all weights end better"


class BitFit(Adapter):
    """Fine-tune a pretrained module by its biases alone: a thousandth of its numbers.

    All bias terms of maps, convolutions and norms train; everything else is frozen, is in no optimizer and, by default, in no
    checkpoint. Name the head in ``also`` where it is new, as the paper does.

    Checkpoints hold what trains, and all buffers, which is some kilobytes: a run resumes from one where the module's own code
    makes or loads the weights that the run began with, which is looked at. Without a Trainer load one with
    ``lightning_eff.apply(plain, BitFit(...)).load_state_dict(checkpoint["state_dict"], strict=False)``.

    Strategies that divide parameters by FSDP2 train it too: ``HybridParallelStrategy``, and Lightning's
    ``ModelParallelStrategy`` with ``save_distributed_checkpoint=False``, or with ``save="all"``.

    Logged: ``trained`` and ``frozen``, how many numbers.

    Args:
        names: patterns of biases, or of modules whose biases train, such as ``["layers.*"]``; None takes all, ``[]`` is plain
            training.
        also: patterns of other parameters, or modules, that train as a whole, such as ``["head"]``.
        save: "adapter" for checkpoints of what trains, "all" for whole ones.

    Raises:
        ValueError: for other values; at setup or in ``apply``, where the module has no biases, as most recent language
            models do, or all of them are frozen; for a name that means none, with the nearest ones; under strategies that
            divide parameters otherwise; from a checkpoint without the frozen weights, where the module has others than its
            run began with.

    Sources:
        Ben Zaken et al. 2022, arXiv:2106.10199.
    """

    saves: ClassVar[str] = "the memory of most gradients and of the optimizer's state; checkpoints of kilobytes"
    paper: ClassVar[str] = "Ben Zaken et al. 2022, arXiv:2106.10199"
    constraints: ClassVar[str] = "fine-tuning of modules that have biases"
    survey: ClassVar[Survey | None] = Survey("parameter-efficient tuning (BitFit)", zhuang="3")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({}, _pointless)
    control: ClassVar[Control] = Control("the baseline, which tunes all weights, for as many seconds")
    change_at: ClassVar[Change] = Change.FREEZE
    conflicts: ClassVar[Mapping[str, str]] = {
        "LoRA": RIVALS,
        "GradientCentralization": "it centres the gradients of maps' weights, which are frozen here",
        "ReplaceOptimizer": "it steps hidden matrices, which are frozen here",
        "KFAC": "it preconditions the weights of maps, which are frozen here",
        **DEAD,
    }

    def __init__(
        self,
        names: Sequence[str] | None = None,
        *,
        also: Sequence[str] = (),
        save: Literal["adapter", "all"] = "adapter",
    ) -> None:
        self.names = check_names(names, who=WHO, what="biases", example="layers.*")
        self._take(save, also)

    @property
    @override
    def neutral(self) -> bool:
        return self.names == []

    @override
    def change(self, surgeon: Surgeon) -> None:
        root = surgeon.root
        found, beside = biases(root), self.begin(root)
        if not found:
            raise ValueError(
                f"{WHO}: {type(root).__name__} has no bias to train, among {len(list(root.parameters()))} parameters; expected"
                " vectors whose names end in 'bias'. Take the technique out, or train something else, as LoRA does."
            )
        if self.names is not None:
            owners = {path: name for name in found for path in (name, name.rpartition(".")[0])}
            check_met(self.names, owners, who=WHO, what="biases", root=type(root).__name__)
            found = {
                name: p
                for name, p in found.items()
                if any(meets(at, one) for one in self.names for at in (name, name.rpartition(".")[0]))
            }
        trained = {id(p) for p in found.values()} | beside
        self.freeze(surgeon, trained, f"{len(found)} biases: {folded([*found])}")
