"""BitFit: train only the biases, and freeze every other weight (Ben Zaken et al. 2022).

The rule is ``theta_t+1 = theta_t - gamma g`` for biases ``theta``, and ``theta_t+1 = theta_t`` for all other weights.
"""

from collections.abc import Mapping
from typing import ClassVar

from torch import nn
from typing_extensions import override

from lightning_eff._core._architecture.naming import check_met, meets
from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._architecture.technique import Change
from lightning_eff._core.search_space import SearchSpace
from lightning_eff.model.adapters._adapter import DEAD, FROZEN, RIVALS, Adapter, folded, unless_memory_bound
from lightning_eff.model.adapters._arguments import Also, Paths, Save

WHO = "BitFit"


def biases(module: nn.Module) -> dict[str, nn.Parameter]:
    """The biases of ``module`` by name: vectors with a name that ends in ``bias``, such as ``in_proj_bias``."""
    return {
        name: p
        for name, p in module.named_parameters()
        if p.ndim <= 1 and name.rpartition(".")[2].lower().endswith("bias")
    }


class BitFit(Adapter):
    """Fine-tune a pretrained module by training only its biases, about a thousandth of its parameters.

    All biases of linear layers, convolutions and norms train. Everything else is frozen, is in no optimizer and, by default,
    in no checkpoint. If the head is new, name it in ``also``, as in the paper.

    Use it to fine-tune if memory is scarce and the module has biases; most recent language models have none. It saves the
    memory of most gradients and of the optimizer's state.

    Checkpoints hold the trained weights and all buffers, usually some kilobytes. To resume from one, the module's own code
    must make or load the same frozen weights; this is verified. Without a Trainer, load one with ``lightning_eff.apply(plain,
    BitFit(...)).load_state_dict(checkpoint["state_dict"], strict=False)``.

    It trains under strategies that divide parameters with FSDP2: ``HybridParallelStrategy``, and Lightning's
    ``ModelParallelStrategy`` with ``save_distributed_checkpoint=False`` or with ``save="all"`` here. It logs ``trained`` and
    ``frozen``, the numbers of parameters.

    Args:
        names: patterns of biases, or of modules whose biases train, such as ``["layers.*"]``. None takes all, ``[]`` is plain
            training.
        also: patterns of parameters or modules that train as a whole in addition, such as a new head. Also accepted as
            ``modules_to_save``.
        save: what checkpoints hold. "adapter" is only what trains, "all" the whole module.

    Raises:
        ValueError: for a wrong value. At setup or in ``apply``, if the module has no biases that can train, a name matches
            none, or the strategy divides parameters in another way than FSDP2. On resume, if the module's frozen weights are
            not those of the run.

    Example:
        >>> trainer = L.Trainer(max_epochs=3, callbacks=[BitFit(also=["head"])])

    References:
        Ben Zaken et al. 2022, "BitFit: Simple Parameter-efficient Fine-tuning for Transformer-based Masked Language-models",
        arXiv:2106.10199.
    """

    saves = "the memory of most gradients and of the optimizer's state; checkpoints of kilobytes"
    paper = "Ben Zaken et al. 2022, arXiv:2106.10199"
    constraints = "fine-tuning of modules that have biases"
    search_space = SearchSpace({}, unless_memory_bound)
    change_at = Change.FREEZE
    conflicts: ClassVar[Mapping[str, str]] = {
        "LoRA": RIVALS,
        **FROZEN,
        **DEAD,
    }

    def __init__(self, names: Paths = None, *, also: Also = (), save: Save = "adapter") -> None:
        self._take(save, also, names)

    @override
    def change(self, surgeon: Surgeon) -> None:
        root = surgeon.root
        found, beside = biases(root), self.begin(root)
        if not found:
            raise ValueError(
                f"{WHO}: {type(root).__name__} has no bias to train: none of its parameters is a vector whose name ends in"
                " 'bias'. Use LoRA instead, or remove the callback."
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
