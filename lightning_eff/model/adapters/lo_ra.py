"""LoRA: low-rank factors beside frozen linear maps, made by peft (Hu et al. 2022).

The rule is ``h = W x + (alpha / r) B A x`` with W frozen, A of (r, K) random and B of (N, r) zero at first, which peft's
``lora.Linear`` computes; so the function is the plain module's until the first step, and ``W + (alpha / r) B A`` at the end.
"""

import copy
import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core._architecture.linear_maps import LinearMap
from lightning_eff._core._architecture.naming import check_names
from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._optim.faster import hasten
from lightning_eff._core._optim.scheduled import schedulers_of
from lightning_eff._core.optimizers import is_per_parameter, rewrite_configured
from lightning_eff._core.search_space import Choice, SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.adapters._adapter import DEAD, RIVALS, Adapter, folded
from lightning_eff.model.adapters._optional import imported
from lightning_eff.model.adapters._peft.places import places, pointless
from lightning_eff.model.adapters._reading import read

WHO = "LoRA"


class LoRA(Adapter):
    """Fine-tune a pretrained module by factors of low rank beside its linear maps, which are frozen as all else is.

    The layers are peft's, under its names, put into any module: a LightningModule written by hand as well as one around a
    Hugging Face model. Acted on are all linear maps of the stacks of repeated blocks, as QLoRA's authors advise, or of the
    whole module where it has no stack; tied maps are left; which they are is printed. At the first step the module computes
    what it did (but for rounding with ``pissa``).

    Checkpoints hold what trains, and all buffers, which is some kilobytes: a run resumes from one where the module's own code
    makes or loads the weights that the run began with, which is looked at. ``lightning_eff.export_adapter(module.model,
    folder)`` writes the folder that ``peft.PeftModel.from_pretrained`` reads, and ``lightning_eff.export(module)`` merges the
    factors into the plain module. Without a Trainer load a checkpoint with ``lightning_eff.apply(plain,
    LoRA(...)).load_state_dict(checkpoint["state_dict"], strict=False)``.

    Gradients and optimizer state are those of the factors alone. Activations take as much memory as before, and time is not
    less on small modules.

    ``HybridParallelStrategy`` divides what was put in with all else. Under Lightning's ``ModelParallelStrategy`` let
    ``configure_model`` call ``lightning_eff.apply(self, LoRA(...))`` before it divides the module, and give the strategy
    ``save_distributed_checkpoint=False``, or the technique ``save="all"``.

    Logged: ``trained`` and ``frozen``, how many numbers, and ``maps``.

    Args:
        rank: r, an integer >= 1 and at most the smaller side of each map that is named.
        alpha: the factors' product is scaled by ``alpha / rank``; None for twice the rank.
        dropout: of the factors' inputs, in [0, 1).
        names: dotted paths of maps, their last parts or patterns, such as ``["q_proj", "v_proj"]``; None looks for them,
            ``[]`` is plain training.
        also: patterns of parameters, or modules, that train as a whole beside, such as a new head.
        dora: learn the length of each row of the weight apart from its direction (DoRA); takes more memory and time.
        pissa: begin with the largest singular values of W in the factors, and the rest as the frozen base (PiSSA).
        rslora: scale by ``alpha / sqrt(rank)`` (rsLoRA), which large ranks want.
        b_rate: the rate of B as a multiple of A's, > 0 (LoRA+, whose authors advise 16); 1 is LoRA.
        save: "adapter" for checkpoints of what trains, "all" for whole ones.

    Raises:
        ValueError: for other values; at setup or in ``apply``, where no map is left to act on, with the reason for each;
            for a name that means no map, with the nearest ones; for a named map with a smaller side than the rank, or that
            cannot be replaced; under strategies that divide parameters otherwise; with ``b_rate`` where the optimizer is
            not one of torch's; from a checkpoint without the frozen weights, where the module has others than its run began
            with.
        ImportError: at setup, where peft is not installed.

    Sources:
        Hu et al. 2022, arXiv:2106.09685; Liu et al. 2024, arXiv:2402.09353 (DoRA); Meng et al. 2024, arXiv:2404.02948
        (PiSSA); Kalajdzievski 2023, arXiv:2312.03732 (rsLoRA); Hayou et al. 2024, arXiv:2402.12354 (LoRA+).
    """

    saves: ClassVar[str] = "the memory of most gradients and of the optimizer's state; checkpoints of kilobytes"
    paper: ClassVar[str] = "Hu et al. 2022, arXiv:2106.09685"
    constraints: ClassVar[str] = "fine-tuning; needs peft"
    survey: ClassVar[Survey | None] = Survey("parameter-efficient tuning (LoRA)", zhuang="3")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"rank": Choice((4, 8, 16)), "b_rate": Choice((1.0, 16.0))}, pointless
    )
    control: ClassVar[Control] = Control("the baseline, which tunes all weights, for as many seconds")
    conflicts: ClassVar[Mapping[str, str]] = {
        **DEAD,
        "BitFit": RIVALS,
        "Fixup": "it puts scalars before and behind each map, which is then no plain one that factors could stand beside",
        "FixRes": "it ends by training the classifier and norms alone, which are frozen here",
        "GreedyLayerwise": "it trains some blocks at a time, whose factors are all that trains here",
        "LayerFreezing": "it freezes blocks, whose factors are all that trains here",
    }
    _maps = 0

    def __init__(
        self,
        rank: int = 8,
        *,
        alpha: float | None = None,
        dropout: float = 0.0,
        names: Sequence[str] | None = None,
        also: Sequence[str] = (),
        dora: bool = False,
        pissa: bool = False,
        rslora: bool = False,
        b_rate: float = 1.0,
        save: Literal["adapter", "all"] = "adapter",
    ) -> None:
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            raise ValueError(f"{WHO}({rank=}): expected an integer >= 1, such as 8.")
        if alpha is not None and not (_number(alpha) and alpha > 0):
            raise ValueError(f"{WHO}({alpha=}): expected a number > 0, or None for twice the rank.")
        if not (_number(dropout) and 0.0 <= dropout < 1.0):
            raise ValueError(f"{WHO}({dropout=}): expected a share of the inputs in [0, 1).")
        if not (_number(b_rate) and b_rate > 0):
            raise ValueError(f"{WHO}({b_rate=}): expected a multiple of A's rate > 0, such as 16.")
        self.rank, self.alpha, self.dropout, self.b_rate = rank, alpha, dropout, b_rate
        self.dora, self.pissa, self.rslora = bool(dora), bool(pissa), bool(rslora)
        self.names = check_names(names, who=WHO, what="linear maps", example="q_proj")
        self._take(save, also)

    @property
    @override
    def neutral(self) -> bool:
        return self.names == []

    # -- the change

    @override
    def change(self, surgeon: Surgeon) -> None:
        imported("peft", extra="peft", who=WHO)
        from peft import LoraConfig

        from lightning_eff.model.adapters._peft.layers import lora_layer

        root = surgeon.root
        maps, left = places(root, self.names, rank=self.rank, bounded=True, who=WHO)
        config = LoraConfig(
            r=self.rank,
            lora_alpha=2 * self.rank if self.alpha is None else self.alpha,  # pyright: ignore[reportArgumentType]
            lora_dropout=self.dropout,
            use_rslora=self.rslora,
            use_dora=self.dora,
            init_lora_weights="pissa" if self.pissa else True,
        )
        trained = self.begin(root)
        chosen = {id(m.module): m for m in maps}
        inside = {id(p) for m in maps for p in m.module.parameters()}
        made: list[nn.Module] = []
        in_readers = read(root)

        def build(plain: nn.Module) -> nn.Module:
            base = _own_weight(plain) if self.pissa else plain
            transposed = chosen[id(plain)].transposed
            made.append(new := lora_layer(base, config, transposed=transposed, read=id(plain) in in_readers))
            return new

        surgeon.leave(left)
        surgeon.swap(
            lambda path, m: id(m) in chosen, build, what="a linear map", numbers=not self.dora and not self.pissa
        )
        bases = {id(p) for m in made for p in m.base_layer.parameters()} | inside  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
        trained = (trained - bases) | {id(p) for m in made for p in m.parameters() if id(p) not in bases}
        self._maps = len(made)
        self.freeze(surgeon, trained, f"factors of rank {self.rank} beside {len(maps)} linear maps: {self._told(maps)}")

    def _told(self, maps: Sequence[LinearMap]) -> str:
        return folded([m.path for m in maps])

    # -- LoRA+

    @override
    def on_open(self, session: Session) -> None:
        super().on_open(session)
        if not session.fitting or self.b_rate == 1.0:
            return
        module = session.module
        original = module.configure_optimizers

        @functools.wraps(original)
        def configure_optimizers() -> Any:
            configured = original()
            factors = [p for name, p in module.named_parameters() if ".lora_B." in name]

            def hastened(optimizer: Optimizer) -> Optimizer:
                held = {id(p) for group in optimizer.param_groups for p in group["params"]}
                mine: list[Tensor] = [p for p in factors if id(p) in held]
                if mine and not is_per_parameter(optimizer):
                    raise ValueError(
                        f"{WHO}(b_rate={self.b_rate}): got the optimizer {type(optimizer).__name__}; expected one of"
                        " torch.optim with a rate for each group. Give b_rate=1, or another optimizer."
                    )
                hasten(optimizer, schedulers_of(configured), mine, self.b_rate)
                return optimizer

            rewrite_configured(configured, hastened)
            return configured

        configure_optimizers.__wrapped__ = inspect.unwrap(original)  # pyright: ignore[reportAttributeAccessIssue]
        session.patches.set(module, "configure_optimizers", configure_optimizers)

    # -- what is told

    @override
    def report(self) -> "dict[str, float | int | Tensor]":
        return {**super().report(), "maps": self._maps}


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _own_weight(plain: nn.Module) -> nn.Module:
    """``plain`` with a weight of its own, which may become another without a trace in ``plain``."""
    base = copy.copy(plain)
    base._parameters = dict(plain._parameters)
    weight = plain.weight
    assert isinstance(weight, nn.Parameter)
    base._parameters["weight"] = nn.Parameter(weight.detach().clone(), weight.requires_grad)
    return base
