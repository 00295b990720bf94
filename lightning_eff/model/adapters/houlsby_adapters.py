"""HoulsbyAdapters: train small networks after attention and feed-forward networks of frozen blocks (Houlsby et al. 2019).

The rule is ``h + W_u f(W_d h + b_d) + b_u`` for the d outputs h of the last layer of a residual branch, with W_d of (m, d)
random, f GELU, and W_u of (d, m), b_d and b_u initially zero: 2 m d + d + m parameters, and the plain function at first.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, cast

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.linear_maps import LinearMap, choose, linear_maps
from lightning_eff._core._architecture.naming import by_reason
from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._arguments.kinds import Count
from lightning_eff._core._branches.ends import alike_unused, refuse_unequal
from lightning_eff._core._branches.finding import branches
from lightning_eff._core._branches.probing import probed
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace
from lightning_eff.model.adapters._adapter import DEAD, RIVALS, Adapter, blockwise, folded, unless_memory_bound
from lightning_eff.model.adapters._arguments import Also, Save, Targets
from lightning_eff.model.adapters._peft.reading import read, unread

WHO = "HoulsbyAdapters"
STD = 0.01  # of the initial W_d, truncated at two standard deviations as in the paper


class Bottleneck(nn.Module):
    """``h + W_u f(W_d h + b_d) + b_u``, from d to d numbers, which is initially h.

    Args:
        d: the number of inputs and outputs.
        m: the number of hidden units.
    """

    def __init__(self, d: int, m: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(d, m), nn.Linear(m, d)
        nn.init.trunc_normal_(self.down.weight, std=STD, a=-2 * STD, b=2 * STD)
        for zero in (self.down.bias, self.up.weight, self.up.bias):
            nn.init.zeros_(zero)

    @override
    def forward(self, h: Tensor) -> Tensor:
        # h <- h + W_u f(W_d h + b_d) + b_u
        return h + self.up(F.gelu(self.down(h)))


class Adapted(nn.Module):
    """A linear layer followed by a bottleneck.

    Args:
        base: the linear layer.
        d: its number of outputs.
        m: the hidden units of the bottleneck.
        read: whether it is inside one of torch's layers that may read its weight instead of calling it.
    """

    def __init__(self, base: nn.Module, d: int, m: int, *, read: bool) -> None:
        super().__init__()
        self.base_layer, self.adapter = base, Bottleneck(d, m)
        self.read = read

    @property
    def weight(self) -> Tensor:
        """The layer's weight, for its dtype; one that torch's encoder layers do not read, if it is inside one."""
        weight = cast(Tensor, self.base_layer.weight)
        return unread(weight) if self.read else weight

    @property
    def bias(self) -> Tensor | None:
        """The layer's bias."""
        return cast("Tensor | None", self.base_layer.bias)

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.adapter(self.base_layer(*args, **kwargs))


def _pointless(profile: RunProfile) -> str | None:
    return (
        unless_memory_bound(profile)
        if profile.num_blocks
        else "the module has no stack of blocks with residual branches"
    )


class HoulsbyAdapters(Adapter):
    """Fine-tune a pretrained module by training a small network after each residual branch; everything else is frozen.

    In a transformer, these branches are attention and the feed-forward network. They are found in a forward pass on a made-up
    input, whatever the modules are called. The adapter follows the linear layer in which the branch ends, before dropout, the
    branch's own norms, and the sum. This layer must be ``nn.Linear`` or Hugging Face's ``Conv1D``. It skips
    ``nn.MultiheadAttention``, which reads the weight of its last layer instead of calling it, and experts in one parameter.
    Log lines list the adapted and the skipped layers. At the first step the module computes the same as before, bit for bit.

    Use it to fine-tune if the gradients and optimizer state of all weights do not fit. Adapters remain in evaluation: two
    additional layers per branch, which cost time on small batches, whereas ``LoRA`` merges and costs none.
    ``lightning_eff.export`` refuses for the same reason. Activations need slightly more memory than before. The paper also
    trains the norms and a new head: ``also=["*norm*", "head"]``, by your module's names.

    Checkpoints hold the trained weights and all buffers, usually some kilobytes. To resume from one, the module's own code
    must make or load the same frozen weights; this is verified. Without a Trainer, load one with ``lightning_eff.apply(plain,
    HoulsbyAdapters(...)).load_state_dict(checkpoint["state_dict"], strict=False)``.

    ``HybridParallelStrategy`` divides the new weights like all others. Under Lightning's ``ModelParallelStrategy``, call
    ``lightning_eff.apply(self, HoulsbyAdapters(...))`` in ``configure_model`` before it divides the module, and set
    ``save_distributed_checkpoint=False`` on the strategy or ``save="all"`` here. It logs ``trained`` and
    ``frozen``, the numbers of parameters, and ``adapters``, their number.

    Args:
        bottleneck: the number of hidden units of an adapter, fewer than the branch's outputs. The paper has 8 to 256 for 1024
            outputs.
        names: dotted paths of the linear layers to put adapters after, their last parts, or patterns, such as ``["mlp.2"]``.
            None finds the ends of branches, ``[]`` is plain training. Also accepted as ``target_modules``.
        also: patterns of parameters or modules that train as a whole in addition, such as a new head. Also accepted as
            ``modules_to_save``.
        save: what checkpoints hold. "adapter" is only what trains, "all" the whole module.

    Raises:
        ValueError: for a value out of range. At setup or in ``apply``, if no part of the module can be run, no branch ends in
            a layer that can be adapted, a name matches none, a layer has no more outputs than the bottleneck, or the strategy
            divides parameters in another way than FSDP2. On resume, if the module's frozen weights are not those of the run.

    Example:
        >>> trainer = L.Trainer(max_epochs=3, callbacks=[HoulsbyAdapters(64, also=["*norm*", "head"])])

    References:
        Houlsby et al. 2019, "Parameter-Efficient Transfer Learning for NLP", arXiv:1902.00751.
    """

    saves = "the memory of most gradients and of the optimizer's state; checkpoints of kilobytes"
    paper = "Houlsby et al. 2019, arXiv:1902.00751"
    constraints = "fine-tuning of residual networks of linear layers"
    search_space = SearchSpace({"bottleneck": Choice((8, 64))}, _pointless)
    stays = "an adapter has an activation function, so it cannot be merged into a linear layer"
    conflicts: ClassVar[Mapping[str, str]] = {**DEAD, **blockwise("adapters"), "LoRA": RIVALS, "BitFit": RIVALS}
    _adapters = 0

    def __init__(
        self,
        bottleneck: Annotated[int, Count()] = 64,
        *,
        names: Targets = None,
        also: Also = (),
        save: Save = "adapter",
    ) -> None:
        self.bottleneck = bottleneck
        self._take(save, also, names)

    # -- the change

    @override
    def change(self, surgeon: Surgeon) -> None:
        root = surgeon.root
        trained = self.begin(root)
        maps, left = self._ends(surgeon) if self.names is None else choose(root, self.names, who=WHO)
        for m in maps:
            if self.bottleneck >= m.out_features:
                raise ValueError(
                    f"{WHO}(bottleneck={self.bottleneck}): {m} has only {m.out_features} outputs. Give"
                    f" bottleneck={max(1, m.out_features // 4)}, or name other layers."
                )
        chosen, in_readers = {id(m.module): m for m in maps}, read(root)
        made: list[Adapted] = []

        def build(plain: nn.Module) -> nn.Module:
            d = chosen[id(plain)].out_features
            made.append(new := Adapted(plain, d, self.bottleneck, read=id(plain) in in_readers))
            return new

        surgeon.leave(left)
        surgeon.swap(lambda path, m: id(m) in chosen, build, what="a linear layer", numbers=True)
        self._adapters = len(made)
        trained |= {id(p) for m in made for p in m.adapter.parameters()}
        where = folded([m.path for m in maps])
        self.freeze(
            surgeon, trained, f"adapters of {self.bottleneck} hidden units after {len(maps)} linear layers: {where}"
        )

    def _ends(self, surgeon: Surgeon) -> tuple[list[LinearMap], dict[str, str]]:
        """The linear layers in which residual branches end, and why others are left, by name."""
        root = surgeon.root
        try:
            graph = probed(root, who=WHO, batch=surgeon.batch).graph
            every = branches(graph)
            refuse_unequal(root, graph, every, who=WHO)
        except ValueError as e:
            raise ValueError(str(e).replace("branches=[...]", "names=[...]")) from e
        ends = {end.node: end.weight for branch in every for end in branch.last}
        weights = [*dict.fromkeys(ends.values())]
        weights += [name for name in alike_unused(root, graph, weights) if name not in weights]
        users: dict[str, list[LinearMap]] = {}
        names = {id(p): name for name, p in root.named_parameters()}
        for m in linear_maps(root):
            users.setdefault(names.get(id(m.module.weight), ""), []).append(m)
        found: list[LinearMap] = []
        standing: dict[str, list[str]] = {}
        for weight in weights:
            maps, reason = users.get(weight, []), ""
            if not maps:
                reason = "it belongs to no nn.Linear or Conv1D"
            elif len(maps) > 1:
                reason = f"it is shared by {' and '.join(m.path for m in maps)}"
            elif any(node not in ends for node in graph.uses(weight)):
                reason = "it is also used elsewhere than at the end of a branch"
            elif isinstance(maps[0].module, nn.modules.linear.NonDynamicallyQuantizableLinear):
                reason = "nn.MultiheadAttention reads it and does not call its layer"
            else:
                found.append(maps[0])
                continue
            standing.setdefault(reason, []).append(weight)
        left = {folded(paths): reason for reason, paths in standing.items()}
        if not found:
            raise ValueError(
                f"{WHO}: no residual branch of {type(root).__name__} ends in nn.Linear or Conv1D.{by_reason(left)} Name layers"
                f" with {WHO}(names=[...]), or remove the callback."
            )
        return found, left

    # -- reports

    @override
    def report(self) -> "dict[str, float | int | Tensor]":
        return {**super().report(), "adapters": self._adapters}
