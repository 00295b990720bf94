"""LoRA: train low-rank factors on frozen linear layers, made by peft (Hu et al. 2022).

The rule is ``h = W x + (alpha / r) B A x`` with W frozen, A of (r, K) random and B of (N, r) initially zero, computed by
peft's ``lora.Linear``. The function is the plain module's until the first step, and ``W + (alpha / r) B A`` at the end.
"""

import copy
import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core._architecture.linear_maps import LinearMap
from lightning_eff._core._arguments.kinds import Alias, Number
from lightning_eff._core._optim.parameter_multipliers import hasten
from lightning_eff._core._optim.scheduled import schedulers_of
from lightning_eff._core.optimizers import is_per_parameter, rewrite_configured
from lightning_eff._core.search_space import Choice, SearchSpace
from lightning_eff._core.session import Session
from lightning_eff.model.adapters._adapter import DEAD, RIVALS, blockwise
from lightning_eff.model.adapters._arguments import Also, Dropout, Rank, Save, Targets
from lightning_eff.model.adapters._peft.places import pointless
from lightning_eff.model.adapters._peft.technique import Maker, OnLinearLayers

WHO = "LoRA"


class LoRA(OnLinearLayers):
    """Fine-tune a pretrained module by training low-rank factors on its linear layers; everything else is frozen.

    The layers are peft's, with peft's names, in any module: a hand-written LightningModule or one around a Hugging Face
    model. LoRA adapts all linear layers in the stacks of repeated blocks, as QLoRA's authors recommend, or in the whole
    module if it has no stack. It skips tied layers. A log line lists the adapted layers. At the first step the module
    computes the same as before (up to rounding with ``pissa``).

    Use it to fine-tune if the gradients and optimizer state of all weights do not fit, or to get small checkpoints. Gradients
    and optimizer state are only those of the factors. Activations need as much memory as before, and small modules train no
    faster.

    Checkpoints hold the trained weights and all buffers, usually some kilobytes. To resume from one, the module's own code
    must make or load the same frozen weights; this is verified. Without a Trainer, load one with ``lightning_eff.apply(plain,
    LoRA(...)).load_state_dict(checkpoint["state_dict"], strict=False)``. ``lightning_eff.export_adapter(module.model,
    folder)`` writes the folder that ``peft.PeftModel.from_pretrained`` reads. ``lightning_eff.export(module)`` merges the
    factors into the plain module.

    ``HybridParallelStrategy`` divides the new weights like all others. Under Lightning's ``ModelParallelStrategy``, call
    ``lightning_eff.apply(self, LoRA(...))`` in ``configure_model`` before it divides the module, and set
    ``save_distributed_checkpoint=False`` on the strategy or ``save="all"`` here. It logs ``trained`` and
    ``frozen``, the numbers of parameters, and ``maps``, the number of adapted layers.

    Args:
        rank: the rank of the factors. For named layers, it is at most the smaller side. Also accepted as ``r``.
        alpha: the scale of the factors' product, which is multiplied by ``alpha / rank``. None is twice the rank. Also
            accepted as ``lora_alpha``.
        dropout: the probability to drop an input of the factors. Also accepted as ``lora_dropout``.
        names: dotted paths of the linear layers, their last parts, or patterns, such as ``["q_proj", "v_proj"]``. None looks
            for layers, ``[]`` is plain training. Also accepted as ``target_modules``.
        also: patterns of parameters or modules that train as a whole in addition, such as a new head. Also accepted as
            ``modules_to_save``.
        save: what checkpoints hold. "adapter" is only what trains, "all" the whole module.
        dora: whether to learn the length of each weight row separately from its direction (DoRA). It needs more memory and
            time. Also accepted as ``use_dora``.
        pissa: whether the factors start with the largest singular values of W, and the rest is the frozen base (PiSSA).
        rslora: whether to scale by ``alpha / sqrt(rank)`` (rsLoRA), for high ranks. Also accepted as ``use_rslora``.
        b_rate: the ratio of B's learning rate to A's (LoRA+; its authors recommend 16). 1 is LoRA. Also accepted as
            ``loraplus_lr_ratio``.

    Raises:
        ValueError: for a value out of range. At setup or in ``apply``, if there is no layer to adapt, a name matches none, a
            named layer cannot be adapted, the strategy divides parameters in another way than FSDP2, or ``b_rate`` is set and
            the optimizer is not one of torch's. On resume, if the module's frozen weights are not those of the run.
        ImportError: at setup, if peft is not installed.

    Example:
        >>> trainer = L.Trainer(max_epochs=3, callbacks=[LoRA(8, alpha=16, also=["classifier"])])

    References:
        Hu et al. 2022, "LoRA: Low-Rank Adaptation of Large Language Models", arXiv:2106.09685.
        Liu et al. 2024, "DoRA: Weight-Decomposed Low-Rank Adaptation", arXiv:2402.09353.
        Meng et al. 2024, "PiSSA: Principal Singular Values and Singular Vectors Adaptation of Large Language Models",
        arXiv:2404.02948.
        Kalajdzievski 2023, "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA", arXiv:2312.03732.
        Hayou et al. 2024, "LoRA+: Efficient Low Rank Adaptation of Large Models", arXiv:2402.12354.
    """

    saves = "the memory of most gradients and of the optimizer's state; checkpoints of kilobytes"
    paper = "Hu et al. 2022, arXiv:2106.09685"
    search_space = SearchSpace({"rank": Choice((4, 8, 16)), "b_rate": Choice((1.0, 16.0))}, pointless)
    conflicts: ClassVar[Mapping[str, str]] = {
        **DEAD,
        **blockwise("factors"),
        "BitFit": RIVALS,
        "Fixup": "it adds scalars before and after each linear layer, and such a layer cannot be adapted",
    }
    trains: ClassVar[str] = "factors"
    bounded: ClassVar[bool] = True

    def __init__(
        self,
        rank: Rank = 8,
        *,
        alpha: Annotated[float | None, Number(above=0), Alias("lora_alpha")] = None,
        dropout: Annotated[Dropout, Alias("lora_dropout")] = 0.0,
        names: Targets = None,
        also: Also = (),
        dora: Annotated[bool, Alias("use_dora")] = False,
        pissa: bool = False,
        rslora: Annotated[bool, Alias("use_rslora")] = False,
        b_rate: Annotated[float, Number(above=0), Alias("loraplus_lr_ratio")] = 1.0,
        save: Save = "adapter",
    ) -> None:
        self.rank, self.alpha, self.dropout, self.b_rate = rank, alpha, dropout, b_rate
        self.dora, self.pissa, self.rslora = dora, pissa, rslora
        self.starts_alone = not dora and not pissa
        self._take(save, also, names)

    # -- the change

    @override
    def maker(self, maps: Sequence[LinearMap]) -> Maker:
        from peft import LoraConfig

        from lightning_eff.model.adapters._peft.copies import Copies
        from lightning_eff.model.adapters._peft.layers import draw_lora, lora_layer

        config = LoraConfig(
            r=self.rank,
            lora_alpha=2 * self.rank if self.alpha is None else self.alpha,  # pyright: ignore[reportArgumentType]
            lora_dropout=self.dropout,
            use_rslora=self.rslora,
            use_dora=self.dora,
            init_lora_weights="pissa" if self.pissa else True,
        )

        def make(base: nn.Module, *, transposed: bool, read: bool) -> nn.Module:
            return lora_layer(_own_weight(base) if self.pissa else base, config, transposed=transposed, read=read)

        return Copies(make, draw_lora) if self.starts_alone else make

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
                        f"{WHO}(b_rate={self.b_rate}): {type(optimizer).__name__} has no learning rate for each group of"
                        " parameters. Give b_rate=1, or use an optimizer such as AdamW."
                    )
                hasten(optimizer, schedulers_of(configured), mine, self.b_rate)
                return optimizer

            rewrite_configured(configured, hastened)
            return configured

        configure_optimizers.__wrapped__ = inspect.unwrap(original)  # pyright: ignore[reportAttributeAccessIssue]
        session.patches.set(module, "configure_optimizers", configure_optimizers)


def _own_weight(plain: nn.Module) -> nn.Module:
    """A shallow copy of ``plain`` with a copy of its weight, which can change without changing ``plain``."""
    base = copy.copy(plain)
    base._parameters = dict(plain._parameters)
    weight = plain.weight
    assert isinstance(weight, nn.Parameter)
    base._parameters["weight"] = nn.Parameter(weight.detach().clone(), weight.requires_grad)
    return base
