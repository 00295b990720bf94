"""HoulsbyAdapters: small networks behind attention and feed-forward network of frozen blocks (Houlsby et al. 2019).

The rule is ``h + W_u f(W_d h + b_d) + b_u`` for h of d numbers, which the last map of a residual branch puts out, with W_d of
(m, d) random, f GELU, and W_u of (d, m), b_d and b_u zero at first: 2 m d + d + m numbers, and the plain function at first.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.linear_maps import LinearMap, choose, linear_maps
from lightning_eff._core._architecture.naming import check_names
from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._branches.ends import alike_unused, refuse_unequal
from lightning_eff._core._branches.finding import branches
from lightning_eff._core._branches.probing import probed
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey
from lightning_eff._core.technique import Control
from lightning_eff.model.adapters._adapter import DEAD, RIVALS, Adapter, folded
from lightning_eff.model.adapters._reading import read, unread

WHO = "HoulsbyAdapters"
STD = 0.01  # of W_d at first, cut off at two deviations, as the paper has it


class Bottleneck(nn.Module):
    """``h + W_u f(W_d h + b_d) + b_u``, of d numbers to d, which is h at first.

    Args:
        d: numbers in and out.
        m: numbers in between.
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
    """A linear map with a bottleneck behind it.

    Args:
        base: the map.
        d: what it puts out.
        m: of the bottleneck.
        read: it lies in a layer of torch's that may read its weight instead of calling it.
    """

    def __init__(self, base: nn.Module, d: int, m: int, *, read: bool) -> None:
        super().__init__()
        self.base_layer, self.adapter = base, Bottleneck(d, m)
        self.read = read

    @property
    def weight(self) -> Tensor:
        """The map's, for those who ask for its dtype; where an encoder layer of torch's may read it, one that it does not."""
        weight = cast(Tensor, self.base_layer.weight)
        return unread(weight) if self.read else weight

    @property
    def bias(self) -> Tensor | None:
        """The map's."""
        return cast("Tensor | None", self.base_layer.bias)

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.adapter(self.base_layer(*args, **kwargs))


def _pointless(profile: RunProfile) -> str | None:
    if not profile.num_blocks:
        return "there is no stack of blocks with residual branches"
    return None if profile.memory_bound else "memory limits neither batch nor model, and all weights end better"


class HoulsbyAdapters(Adapter):
    """Fine-tune a pretrained module by a small network behind each residual branch, with all else frozen.

    In a transformer these branches are attention and the feed-forward network. They are found in a pass over an input that is
    made up, whatever modules are called, and the adapter stands behind the map that the branch ends in, before dropout, norms
    of the branch's own, and the sum. Only ``nn.Linear`` and Hugging Face's ``Conv1D`` are such maps: torch's
    ``nn.MultiheadAttention`` reads its last map's weight instead of calling it, and experts may lie in one parameter; those
    are left, which is printed, and so is where adapters stand. At the first step the module computes what it did, bit for bit.

    The paper trains the norms too, and a new head: ``also=["*norm*", "head"]``, by the module's own names of them.

    The adapters are there in evaluation too: two more maps in each branch, which cost time on small batches, where ``LoRA``
    merges and costs none. ``lightning_eff.export`` refuses for the same reason: what is not linear folds into no map.
    Gradients and optimizer state are those of the adapters alone; activations take a little more memory than before.

    Checkpoints hold what trains, and all buffers: a run resumes from one where the module's own code makes or loads the
    weights that the run began with, which is looked at. Without a Trainer load one with ``lightning_eff.apply(plain,
    HoulsbyAdapters(...)).load_state_dict(checkpoint["state_dict"], strict=False)``.

    ``HybridParallelStrategy`` divides what was put in with all else. Under Lightning's ``ModelParallelStrategy`` let
    ``configure_model`` call ``lightning_eff.apply(self, HoulsbyAdapters(...))`` before it divides the module, and give the
    strategy ``save_distributed_checkpoint=False``, or the technique ``save="all"``.

    Logged: ``trained`` and ``frozen``, how many numbers, and ``adapters``.

    Args:
        bottleneck: m, an integer >= 1 and below d of each branch; the paper has 8 to 256 for d = 1024.
        names: dotted paths of linear maps to stand behind, their last parts or patterns, such as ``["mlp.2"]``; None looks for
            the ends of branches, ``[]`` is plain training.
        also: patterns of parameters, or modules, that train as a whole beside, such as a new head.
        save: "adapter" for checkpoints of what trains, "all" for whole ones.

    Raises:
        ValueError: for other values; at setup or in ``apply``, where nothing could be run or no branch ends in a map that
            could be replaced, with the reason for each; for a name that means no map, with the nearest ones; for a map that
            puts out no more than the bottleneck has; under strategies that divide parameters otherwise; from a checkpoint
            without the frozen weights, where the module has others than its run began with.

    Sources:
        Houlsby et al. 2019, arXiv:1902.00751.
    """

    saves: ClassVar[str] = "the memory of most gradients and of the optimizer's state; checkpoints of kilobytes"
    paper: ClassVar[str] = "Houlsby et al. 2019, arXiv:1902.00751"
    constraints: ClassVar[str] = "fine-tuning of residual networks of linear maps"
    survey: ClassVar[Survey | None] = Survey("parameter-efficient tuning (adapters)", zhuang="3")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"bottleneck": Choice((8, 64))}, _pointless)
    control: ClassVar[Control] = Control("the baseline, which tunes all weights, for as many seconds")
    stays: ClassVar[str] = (
        "between its two maps stands an activation function, so that it is no linear map and folds into none"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        **DEAD,
        "LoRA": RIVALS,
        "BitFit": RIVALS,
        "FixRes": "it ends by training the classifier and norms alone, which are frozen here",
        "GreedyLayerwise": "it trains some blocks at a time, whose adapters are all that trains here",
        "LayerFreezing": "it freezes blocks, whose adapters are all that trains here",
    }
    _adapters = 0

    def __init__(
        self,
        bottleneck: int = 64,
        *,
        names: Sequence[str] | None = None,
        also: Sequence[str] = (),
        save: Literal["adapter", "all"] = "adapter",
    ) -> None:
        if not isinstance(bottleneck, int) or isinstance(bottleneck, bool) or bottleneck < 1:
            raise ValueError(f"{WHO}({bottleneck=}): expected an integer >= 1, such as 64.")
        self.bottleneck = bottleneck
        self.names = check_names(names, who=WHO, what="linear maps", example="mlp.2")
        self._take(save, also)

    @property
    @override
    def neutral(self) -> bool:
        return self.names == []

    # -- the change

    @override
    def change(self, surgeon: Surgeon) -> None:
        root = surgeon.root
        trained = self.begin(root)
        maps, left = self._ends(surgeon) if self.names is None else choose(root, self.names, who=WHO)
        for m in maps:
            if self.bottleneck >= m.out_features:
                raise ValueError(
                    f"{WHO}(bottleneck={self.bottleneck}): {m} puts out {m.out_features} numbers; expected fewer in between."
                    f" Give bottleneck={max(1, m.out_features // 4)}, or name other maps."
                )
        chosen, in_readers = {id(m.module): m for m in maps}, read(root)
        made: list[Adapted] = []

        def build(plain: nn.Module) -> nn.Module:
            d = chosen[id(plain)].out_features
            made.append(new := Adapted(plain, d, self.bottleneck, read=id(plain) in in_readers))
            return new

        surgeon.leave(left)
        surgeon.swap(lambda path, m: id(m) in chosen, build, what="a linear map", numbers=True)
        self._adapters = len(made)
        trained |= {id(p) for m in made for p in m.adapter.parameters()}
        where = folded([m.path for m in maps])
        self.freeze(surgeon, trained, f"adapters of {self.bottleneck} numbers behind {len(maps)} linear maps: {where}")

    def _ends(self, surgeon: Surgeon) -> tuple[list[LinearMap], dict[str, str]]:
        """The maps that residual branches end in, and reasons by the names of those that are left."""
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
                reason = "it is the weight of no nn.Linear or Conv1D"
            elif len(maps) > 1:
                reason = f"it is the weight of {' and of '.join(m.path for m in maps)}"
            elif any(node not in ends for node in graph.uses(weight)):
                reason = "it is used elsewhere too, and not as the end of a branch"
            elif isinstance(maps[0].module, nn.modules.linear.NonDynamicallyQuantizableLinear):
                reason = "nn.MultiheadAttention uses it, and does not call its map"
            else:
                found.append(maps[0])
                continue
            standing.setdefault(reason, []).append(weight)
        left = {folded(paths): reason for reason, paths in standing.items()}
        if not found:
            reasons = "".join(f" {name}: {reason}." for name, reason in left.items())
            raise ValueError(
                f"{WHO}: no residual branch of {type(root).__name__} ends in a linear map that an adapter could stand behind."
                f"{reasons} Expected nn.Linear or Hugging Face's Conv1D. Name maps, {WHO}(names=[...]), or take the technique"
                " out."
            )
        return found, left

    # -- what is told

    @override
    def report(self) -> "dict[str, float | int | Tensor]":
        return {**super().report(), "adapters": self._adapters}
