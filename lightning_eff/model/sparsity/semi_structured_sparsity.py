"""SemiStructuredSparsity: 2:4 sparsity in every product, learned by SR-STE (Mishra et al. 2021; Zhou et al. 2021)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Fraction, Number
from lightning_eff._core._stack.unfreezing import thawing
from lightning_eff._core.progress import in_window
from lightning_eff._core.search_space import Choice, SearchSpace
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control, OtherWeights
from lightning_eff.model.sparsity._masks.arguments import Dense, Weights
from lightning_eff.model.sparsity._masks.finding import Weight, chosen
from lightning_eff.model.sparsity._masks.masked import neighbours, no_time, stepped
from lightning_eff.model.sparsity._masks.turns import before_clipping
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

    Use it to get weights for 2:4 hardware. **It saves no time here**: products are masked dense ones, and masks cost a
    little. Nvidia GPUs from compute capability 8.0 on compute 2:4 products at twice the throughput in half precision.
    ``torch.sparse.to_sparse_semi_structured`` converts the final weights. Neither this nor training with torch's
    ``_sparse_semi_structured`` kernels has been tested here, and this class does not call them. Others trained DINOv2's ViT-L
    6 % faster end to end with them.

    During validation, at the end of the fit, and in every checkpoint's ``state_dict``, weights are ``M w`` with exact zeros.
    The callback's state holds the dense weights, and a resumed fit continues from them. A step needs an additional copy of
    the masked weights. Weights are found as in ``RigL``. Weights whose inputs (with ``tiles``, also outputs) are not
    multiples of 4 are skipped and logged, and so are ``nn.Bilinear`` and, without ``tiles``, experts' matrices in one tensor.
    They are refused if you name them. It logs ``sparsity`` of the masked weights in the last step (0.5, or 0 once it is
    dense) and ``kept`` (elements).

    Args:
        decay: the strength that pulls masked elements to zero, lambda_W. 2e-4 is the paper's, 0 is the plain straight-through
            estimator.
        tiles: whether ``W`` and ``W^T`` are both 2:4.
        until: the fraction of the budget for which the network is sparse. 0 is plain training.
        names: dotted paths of the weights to mask or of modules that hold them, their last parts, or patterns, such as
            ``["layers.*.mlp.*"]``. None takes all, ``[]`` is plain training.
        dense: patterns of weights to leave alone.

    Raises:
        ValueError: for a value out of range. At setup, if there is nothing to mask, a name matches nothing, or a named weight
            cannot be 2:4.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[SemiStructuredSparsity(tiles=True, until=0.7)])

    References:
        Mishra et al. 2021, "Accelerating Sparse Deep Neural Networks", arXiv:2104.08378.
        Zhou et al. 2021, "Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch", arXiv:2102.04010.
        Hu et al. 2024, "Accelerating Transformer Pre-training with 2:4 Sparsity", arXiv:2404.01847.
    """

    saves = "no time here: weights that some accelerators multiply at twice the throughput"
    paper = "Mishra et al. 2021, arXiv:2104.08378"
    constraints = "automatic optimization; an additional copy of the masked weights"
    search_space = SearchSpace({"tiles": Choice((False, True))}, no_time)
    control = Control("a fixed random mask of half of the weights", _control)
    conflicts: ClassVar[Mapping[str, str]] = neighbours(WHO)
    needs_budget: ClassVar[bool] = True
    needs_optimizer: ClassVar[bool] = True
    neutral_at: ClassVar[Mapping[str, Any]] = {"until": 0.0, "names": []}

    def __init__(
        self,
        decay: Annotated[float, Number(at_least=0)] = 2e-4,
        *,
        tiles: bool = False,
        until: Annotated[float, Fraction()] = 1.0,
        names: Weights = None,
        dense: Dense = (),
    ) -> None:
        self.names, self.dense = None if names is None else list(names), list(dense)
        self.decay, self.tiles, self.until = float(decay), tiles, float(until)

    def _reset(self) -> None:
        self.masks: dict[str, Tensor] = {}  # of the last step
        self._axes: dict[str, tuple[int, ...]] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        self._held: dict[str, Tensor] | None = None  # the dense weights, while the module holds the masked ones
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
        before_clipping(session, lambda _: self._gradients())

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        if not in_window(session.trainer, session.module, stepped=False):
            self._on = self.until == 1.0 or session.progress.u < self.until

    @contextmanager
    def _view(self, session: Session) -> Iterator[None]:
        """The module computes with the masked weights, until the step's backward pass is over."""
        if self._held is not None:
            yield
        else:
            with self.shown(session):
                yield

    @override
    @torch.no_grad()
    def put_in(self, session: Session) -> None:
        if self._held is not None or not self._on or not self._parameters:
            return
        self.masks = {n: mask_of(p, self._axes[n], tiles=self.tiles) for n, p in self._parameters.items()}
        self._held = {n: p.detach().clone() for n, p in self._parameters.items()}
        for name, mask in self.masks.items():
            self._parameters[name].masked_fill_(~mask, 0.0)

    @override
    @torch.no_grad()
    def take_out(self, session: Session) -> None:
        held, self._held = self._held, None
        named = dict(session.module.named_parameters()) if held else {}
        for name, w in (held or {}).items():
            named[name].copy_(w)

    def _gradients(self) -> None:
        if not self._on or self.decay == 0.0:
            return
        for name, mask in self.masks.items():
            p = self._parameters[name]
            if p.grad is not None:
                sr_ste(p.grad, p.detach(), mask, decay=self.decay)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if not self.neutral:
            self.take_out(self.session)  # a trial run of the tuner may have loaded a checkpoint

    @override
    def detach(self, session: Session) -> None:
        super().detach(session)
        if not self._finished:
            self.masks = {}

    # -- reports and state

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {
            "sparsity": 0.5 if self._on and self._total else 0.0,
            "kept": self._total // 2 if self._on else self._total,
        }

    @override
    def summary(self) -> str:
        if not self._total:
            return "masked no weight"
        end = "are zero" if self._on else f"were zero for {self.until:.0%} of the run, which ended dense"
        return f"two of every four of {self._total:,} elements in {len(self._names)} weights {end}; this saved no time"

    @override
    def state_dict(self) -> dict[str, Any]:
        dense = self._held
        if dense is None and self._on and self._session is not None:
            dense = {n: p.detach() for n, p in self._parameters.items()}
        return {"dense": dense, "on": self._on, "names": self._names}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.neutral or (self._session is not None and not self._session.fitting):
            return  # the checkpoint's own weights are validated or tested
        self._held, self._on, self._names = state_dict["dense"], state_dict["on"], state_dict["names"]
