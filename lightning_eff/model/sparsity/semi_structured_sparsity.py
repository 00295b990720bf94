"""SemiStructuredSparsity: 2:4 sparsity in every product, learned by SR-STE (Mishra et al. 2021; Zhou et al. 2021)."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Fraction, Number
from lightning_eff._core._stack.unfreezing import thawing
from lightning_eff._core.progress import in_window
from lightning_eff._core.search_space import Choice, SearchSpace
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control, OtherWeights
from lightning_eff.model.sparsity._kernels.products import Backend, SparseProducts
from lightning_eff.model.sparsity._kernels.two_of_four import kernels
from lightning_eff.model.sparsity._masks.arguments import Dense, Weights
from lightning_eff.model.sparsity._masks.finding import Weight, chosen
from lightning_eff.model.sparsity._masks.masked import neighbours, no_time_on_a_cpu, stepped
from lightning_eff.model.sparsity._masks.turns import around_steps
from lightning_eff.model.sparsity._masks.two_of_four import laid_out, mask_of
from lightning_eff.model.sparsity._random_mask import RandomMask

WHO = "SemiStructuredSparsity"


@torch.no_grad()
def sr_ste(gradient: Tensor, weight: Tensor, mask: Tensor, *, decay: float) -> None:
    """``g <- g + lambda (1 - M) w`` in place, on the dense gradient of the masked weight (straight-through).

    Args:
        gradient: ``g = dL / d(M w)``, of all elements.
        weight: ``w``, not masked.
        mask: ``M``, True where a weight is kept.
        decay: ``lambda_W``, >= 0.
    """
    # g_t = ∂L/∂(M ⊙ w) + λ_W (1 − M) ⊙ w
    gradient.add_(weight.masked_fill(mask, 0.0), alpha=decay)


def _control(technique: "SemiStructuredSparsity") -> Mapping[str, RandomMask]:
    if technique.neutral:
        return {}
    return {"random mask": RandomMask(sparsity=0.5, names=technique.names, dense=technique.dense)}


class SemiStructuredSparsity(OtherWeights):
    """Train a network with 2:4 sparsity: in every product, two of every four neighbouring weights are zero.

    The weights ``w`` stay dense. In each step, of every aligned four along a layer's inputs, the two with the larger
    magnitude are kept. The network computes with ``M w``, and the gradient goes to all elements of ``w`` (straight-through).
    ``decay (1 - M) w`` in the gradient pulls masked elements to zero, so that masks settle. It is added before clipping, once
    the gradients of all micro-batches are summed. Masks depend only on the current weights.

    With ``tiles``, masks keep two elements in each row *and column* of each 4 x 4 tile: the one of 90 such masks with the
    largest sum. ``W^T`` is then 2:4 as well, which sparse products in the backward pass need. With ``until``, the network is
    sparse for that fraction of the budget and dense afterwards, as in DINOv2's recipe with 0.7; it ends dense.

    Use it to get weights for 2:4 hardware. On CUDA devices of compute capability 8.0 or more, linear layers whose sides are
    multiples of 16 run torch's 2:4 kernels (cuSPARSELt) in float16 and bfloat16, autocast included. They compute the output,
    and with ``tiles`` the gradient of the input too. The gradient of the weight is a dense product. One message at setup says
    which weights the kernels multiply, and why others are multiplied densely. Convolutions, compiled code, other devices and
    types, and weights that another technique has moved within the step (SAM), are multiplied densely. That **saves no time**,
    and masks cost a little.

    **We have not measured the kernels' speed on a GPU.** ``make gpu`` does. Each step packs the weights and chooses masks
    anew, so layers need thousands of tokens per step. Products at twice the speed would make linear layers at most 1.2 times
    as fast, and 1.5 times with ``tiles``. With torchao, two layers of ViT-L's size were 1.25 times as fast on an A100, and
    DINOv2's ViT-L trained 6 % faster end to end. On an H100, the 2:4 kernels were slower than dense products for one user
    (pytorch#153825). ``backend="dense"`` runs none.

    During validation, at the end of the fit, and in every checkpoint's ``state_dict``, weights are ``M w`` with exact zeros.
    The callback's state holds the dense weights, and a resumed fit continues from them. A step needs an additional copy of
    the masked weights. Weights are found as in ``RigL``. Weights whose inputs (with ``tiles``, also outputs) are not
    multiples of 4 are skipped and logged, and so are ``nn.Bilinear`` and, without ``tiles``, experts' matrices in one tensor.
    They are refused if you name them. A module that steps several optimizers itself, such as a GAN, works too; ``decay`` then
    counts in gradient norms only if it clips by ``self.clip_gradients``. It logs ``sparsity`` of the masked weights in the
    last step (0.5, or 0 once it is dense), ``kept`` (elements) and ``kernels`` (weights that 2:4 kernels multiply).

    Args:
        decay: the strength that pulls masked elements to zero, lambda_W. 2e-4 is the paper's, 0 is the plain straight-through
            estimator.
        tiles: whether ``W`` and ``W^T`` are both 2:4.
        backend: "auto" runs torch's 2:4 kernels where they run, "sparse" raises if they run for no weight, "dense" runs none.
        until: the fraction of the budget for which the network is sparse. 0 is plain training.
        names: dotted paths of the weights to mask or of modules that hold them, their last parts, or patterns, such as
            ``["layers.*.mlp.*"]``. None takes all, ``[]`` is plain training.
        dense: patterns of weights to leave alone.

    Raises:
        ValueError: for a value out of range. At setup, if there is nothing to mask, a name matches nothing, a named weight
            cannot be 2:4, ``backend="sparse"`` finds no product for the kernels, or the module steps LBFGS itself.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[SemiStructuredSparsity(tiles=True, until=0.7)])

    References:
        Mishra et al. 2021, "Accelerating Sparse Deep Neural Networks", arXiv:2104.08378.
        Zhou et al. 2021, "Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch", arXiv:2102.04010.
        Hu et al. 2024, "Accelerating Transformer Pre-training with 2:4 Sparsity", arXiv:2404.01847.
    """

    saves = "time of linear layers on GPUs with 2:4 kernels (not measured by us); no time elsewhere"
    paper = "Mishra et al. 2021, arXiv:2104.08378"
    constraints = "an additional copy of the masked weights"
    search_space = SearchSpace({"tiles": Choice((False, True))}, no_time_on_a_cpu)
    control = Control("a fixed random mask of half of the weights", _control)
    conflicts: ClassVar[Mapping[str, str]] = neighbours(WHO)
    needs_automatic_optimization: ClassVar[bool] = False
    needs_budget: ClassVar[bool] = True
    needs_optimizer: ClassVar[bool] = True
    neutral_at: ClassVar[Mapping[str, Any]] = {"until": 0.0, "names": []}

    def __init__(
        self,
        decay: Annotated[float, Number(at_least=0)] = 2e-4,
        *,
        tiles: bool = False,
        backend: Backend = "auto",
        until: Annotated[float, Fraction()] = 1.0,
        names: Weights = None,
        dense: Dense = (),
    ) -> None:
        self.names, self.dense = None if names is None else list(names), list(dense)
        self.decay, self.tiles, self.until = float(decay), tiles, float(until)
        self.backend: Backend = backend

    def _reset(self) -> None:
        self.masks: dict[str, Tensor] = {}  # of the last step
        self._axes: dict[str, tuple[int, ...]] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        self._held: dict[str, Tensor] | None = None  # the dense weights, while the module holds the masked ones
        self._handles: list[RemovableHandle] = []
        self._products = SparseProducts()
        self._stepped = False  # whether an optimizer made a step in the last batch
        self._names: list[str] = []  # of a checkpoint, or of a run that has ended
        self._on, self._total = True, 0
        self._finished = False

    # -- the run

    @override
    def check_checkpoint(self, session: Session, state: dict[str, Any] | None) -> None:
        held = dict(session.module.named_parameters())
        dense = (state or {}).get("dense") or {}
        wrong = [name for name, w in dense.items() if name not in held or held[name].shape != w.shape]
        if session.fitting and wrong:
            raise ValueError(
                f"{WHO}: {len(wrong)} of the checkpoint's dense weights do not fit {type(session.module).__name__}, such as"
                f" {wrong[0]!r}. Resume with the checkpoint's model."
            )

    @override
    def attach(self, session: Session) -> None:
        strategy = session.trainer.strategy
        original = strategy.lightning_module_state_dict

        def sparse_state_dict() -> dict[str, Any]:
            if self._held is not None:
                return original()
            with self.shown(session):
                return deepcopy(original())  # tied weights stay one tensor

        session.patches.set(strategy, "lightning_module_state_dict", sparse_state_dict)

    @override
    def on_model(self, session: Session) -> None:
        if not session.fitting:
            return
        weights: dict[str, Weight] = thawing(lambda: self._chosen(session.module), session._stacks)()
        self._axes, left = laid_out(session.module, weights, tiles=self.tiles)
        reasons = "; ".join(f"{name} {weights[name].shape}: {reason}" for name, reason in left.items())
        if left and (self.names is not None or not self._axes):
            raise ValueError(
                f"{WHO}(tiles={self.tiles}): {len(left)} weights cannot be 2:4: {reasons}. Leave them out of `names`, or name"
                " them in `dense`."
            )
        if left:
            rank_zero_info(f"{WHO}: {len(left)} of {len(weights)} weights stay dense. {reasons}.")
        self._names = [*self._axes]
        self._total = sum(weights[name].numel for name in self._axes)
        self._parameters = {n: p for n, p in session.module.named_parameters() if n in self._axes}
        self.take_out(session)
        session.views.append(lambda training: self._view(session))
        # masks apply after other techniques' changes of weights, in any order of the callbacks
        session.rest(self)
        session.working.append(self)

    def _chosen(self, module: nn.Module) -> dict[str, Weight]:
        return chosen(module, self.names, self.dense, (1, 1), who=WHO, masked=self._names)

    @override
    def on_optimizers(self, session: Session) -> None:
        self._parameters = stepped(session, self._axes, who=WHO)
        if not session.module.automatic_optimization and any(isinstance(o, LBFGS) for o in session.optimizers):
            raise ValueError(
                f"{WHO}: {type(session.module).__name__} has automatic_optimization=False and steps LBFGS itself, whose"
                f" evaluations of the loss within a step would see dense weights. Use another optimizer, or remove {WHO}."
            )
        self._products = SparseProducts(kernels(self._axes, tiles=self.tiles), self.backend, who=WHO)
        self._products.find(session, self._parameters)
        self._handles = around_steps(session, self._before, self._after, skipped=self._after)

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        if not in_window(session.trainer, session.module, stepped=self._stepped):
            self._on = self.until == 1.0 or session.progress.u < self.until
        self._stepped = False

    @contextmanager
    def _view(self, session: Session) -> Iterator[None]:
        """The module computes with the masked weights, until the step's backward pass is over."""
        with (
            nullcontext() if self._held is not None else self.shown(session),
            nullcontext() if self._held is None else self._products.worn(),  # once the masked weights are there
        ):
            yield

    @override
    def put_in(self, session: Session) -> None:
        if self._held is not None or not self._on or not self._parameters:
            return
        self._held = {}
        self._mask(self._parameters)

    @torch.no_grad()
    def _mask(self, names: Iterable[str]) -> None:
        """Put masked weights in place of these dense ones."""
        assert self._held is not None
        for name in names:
            p = self._parameters[name]
            self.masks[name] = mask_of(p, self._axes[name], tiles=self.tiles)
            self._held[name] = p.detach().clone()
            p.masked_fill_(~self.masks[name], 0.0)
            self._products.masked(name, p)

    @override
    @torch.no_grad()
    def take_out(self, session: Session) -> None:
        held, self._held = self._held, None
        self._products.clear()
        named = dict(session.module.named_parameters()) if held else {}
        for name, w in (held or {}).items():
            named[name].copy_(w)

    def _own(self, optimizer: Optimizer) -> list[str]:
        """The weights that this optimizer trains."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return [name for name, p in self._parameters.items() if id(p) in own]

    @torch.no_grad()
    def _before(self, optimizer: Optimizer) -> None:
        """Let the optimizer see its dense weights, and add the decay to their gradients."""
        names = self._own(optimizer)
        if self._held is not None:  # within a step that calls the optimizer itself
            for name in names:
                self._parameters[name].copy_(self._held.pop(name))
        if not self._on or self.decay == 0.0:
            return
        for name in names:
            p = self._parameters[name]
            if p.grad is not None and name in self.masks:
                sr_ste(p.grad, p.detach(), self.masks[name], decay=self.decay)

    def _after(self, optimizer: Optimizer) -> None:
        """Mask its weights again for the rest of a step that calls the optimizer itself."""
        self._stepped = True
        if self._held is not None:
            self._mask(name for name in self._own(optimizer) if name not in self._held)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if not self.neutral:
            self.take_out(self.session)  # a trial run of the tuner may have loaded a checkpoint

    @override
    def detach(self, session: Session) -> None:
        super().detach(session)
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._products.release()
        if not self._finished:
            self.masks = {}

    # -- reports and state

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {
            "sparsity": 0.5 if self._on and self._total else 0.0,
            "kept": self._total // 2 if self._on else self._total,
            "kernels": len(self._products.ran) if self._on else 0,
        }

    @override
    def summary(self) -> str:
        if not self._total:
            return "masked no weight"
        end = "are zero" if self._on else f"were zero for {self.until:.0%} of the run, which ended dense"
        ran = len(self._products.ran)
        time = f"2:4 kernels multiplied {ran} of the weights" if ran else "this saved no time"
        return f"two of every four of {self._total:,} elements in {len(self._names)} weights {end}; {time}"

    @override
    def state_dict(self) -> dict[str, Any]:
        dense = self._held
        if (dense is not None or self._on) and self._session is not None:
            dense = {n: p.detach() for n, p in self._parameters.items()} | (dense or {})
        return {"dense": dense, "on": self._on, "names": self._names, "stepped": self._stepped}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.neutral or (self._session is not None and not self._session.fitting):
            return  # the checkpoint's own weights are validated or tested
        self._held, self._on, self._names = state_dict["dense"], state_dict["on"], state_dict["names"]
        self._stepped = state_dict.get("stepped", False)  # checkpoints of earlier versions have none
