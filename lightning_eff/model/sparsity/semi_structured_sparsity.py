"""2:4 sparsity: two of each four weights are zero in every product, learnt by SR-STE (Mishra et al. 2021; Zhou et al. 2021)."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.naming import check_names
from lightning_eff._core._stack.thawing import thawing
from lightning_eff._core.progress import in_window
from lightning_eff._core.search_space import Choice, SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control, OtherWeights
from lightning_eff.model.sparsity._masks.finding import Weight, chosen
from lightning_eff.model.sparsity._masks.masked import before_clipping, neighbours, no_time, stepped
from lightning_eff.model.sparsity._masks.two_of_four import laid_out, mask_of
from lightning_eff.model.sparsity._random_mask import RandomMask

WHO = "SemiStructuredSparsity"


@torch.no_grad()
def sr_ste(gradient: Tensor, weight: Tensor, mask: Tensor, *, decay: float) -> None:
    """``g <- g + lambda (1 - M) w`` in place, on the dense gradient of the masked weight, which passes straight through.

    Args:
        gradient: ``g = dL / d(M w)``, of all numbers.
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
    """Train a network of which, in every product, two of each four weights that lie side by side are zero.

    The weights ``w`` stay dense. For each step, of each aligned four along the inputs of a map, the two that are larger in
    magnitude are kept, and the network computes with ``M w``, of which the gradient is taken for all numbers of ``w``
    (straight through), as the optimizer steps all. Numbers that are masked are drawn to zero by ``decay (1 - M) w`` in the
    gradient, so that masks settle; it is added before gradients are clipped, once those of all micro-batches are summed.
    Masks follow from the weights of the step alone.

    With ``tiles`` masks have two in each row *and column* of each 4 x 4 tile, those of the 90 such masks with the largest sum:
    ``W^T`` is then 2:4 as well, which the backward pass needs if its products are to be sparse. With ``until`` the network is
    sparse for that share of the budget and then dense, as in DINOv2's recipe of 0.7; it ends dense.

    **It saves no time here.** Products are masked dense ones, and masks cost a little besides. Nvidia's cards from compute
    capability 8.0 on have products of 2:4 matrices of twice the rate in half precision: ``torch.sparse.
    to_sparse_semi_structured`` makes such matrices of the weights that training ends with. Neither that nor training through
    torch's ``_sparse_semi_structured`` kernels has been tried by us, and this class does not call them; those who did
    trained DINOv2's ViT-L 6 % faster end to end.

    While the trainer validates, at the end of fit, and in every checkpoint's ``state_dict``, weights are ``M w``, with exact
    zeros; the dense ones are in this callback's state, and a resumed fit goes on from them. A step holds one more copy of the
    masked weights.

    The weights are those of linear maps and convolutions that train, found as by ``RigL``. Those whose inputs (with
    ``tiles``, and outputs) are no multiple of 4 are left alone, which is told, and so are experts' matrices in one tensor but
    with ``tiles``, and ``nn.Bilinear``. Asked for by name they are refused.

    Logged: ``sparsity``, of the masked weights in the last step (0.5, or 0 once it is dense), ``kept`` (numbers).

    Args:
        decay: lambda_W, >= 0. 2e-4 is the paper's; 0 is the plain straight-through estimator.
        tiles: let ``W`` and ``W^T`` both be 2:4.
        until: the share of the budget for which the network is sparse, in [0, 1]. 0 is plain training.
        names: dotted paths of weights or of modules that hold them, their last parts or patterns; None for all.
        dense: patterns of weights among these that are left alone.

    Raises:
        ValueError: for other values; at setup, if there is nothing to mask, a name means nothing, or what is named is not made
            of whole fours.

    Sources:
        Mishra et al. 2021, arXiv:2104.08378; Zhou et al. 2021, arXiv:2102.04010; Hu et al. 2024, arXiv:2404.01847.
    """

    saves: ClassVar[str] = (
        "no time here: weights of the form of which some accelerators compute products at twice the rate"
    )
    paper: ClassVar[str] = "Mishra et al. 2021, arXiv:2104.08378"
    constraints: ClassVar[str] = "automatic optimization; one more copy of the masked weights"
    survey: ClassVar[Survey | None] = Survey("2:4 sparsity", zhuang="2.1", shen="4.2")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"tiles": Choice((False, True))}, no_time)
    control: ClassVar[Control] = Control("a random mask of half of the weights, which stays", _control)
    conflicts: ClassVar[Mapping[str, str]] = neighbours(WHO)
    needs_budget: ClassVar[bool] = True
    needs_optimizer: ClassVar[bool] = True

    def __init__(
        self,
        decay: float = 2e-4,
        *,
        tiles: bool = False,
        until: float = 1.0,
        names: Sequence[str] | None = None,
        dense: Sequence[str] = (),
    ) -> None:
        if isinstance(decay, bool) or not 0.0 <= decay < float("inf"):
            raise ValueError(f"{WHO}({decay=}): expected a finite number >= 0. 2e-4 is the paper's.")
        if isinstance(until, bool) or not 0.0 <= until <= 1.0:
            raise ValueError(
                f"{WHO}({until=}): expected the share of the budget for which the network is sparse, in [0, 1]; 0 is plain"
                " training."
            )
        if not isinstance(tiles, bool):
            raise ValueError(f"{WHO}({tiles=}): expected True or False, whether W and W^T are both to be 2:4.")
        example = "layers.*.mlp.*"
        self.names = check_names(names, who=WHO, what="weights, or of the modules that hold them", example=example)
        self.dense = check_names(dense, who=WHO, what="weights that stay dense", example="lm_head") or []
        self.decay, self.tiles, self.until = float(decay), tiles, float(until)
        self._reset()

    def _reset(self) -> None:
        self.masks: dict[str, Tensor] = {}  # of the last step
        self._axes: dict[str, tuple[int, ...]] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        self._held: dict[str, Tensor] | None = None  # the dense weights, while the module holds the masked ones
        self._names: list[str] = []  # of a checkpoint, or a run that is over
        self._on, self._total = True, 0
        self._finished = False

    @property
    @override
    def neutral(self) -> bool:
        return self.until == 0.0 or self.names == []

    # -- the run

    @override
    def check_checkpoint(self, session: Session, state: dict[str, Any] | None) -> None:
        held = dict(session.module.named_parameters())
        dense = (state or {}).get("dense") or {}
        wrong = [name for name, w in dense.items() if name not in held or held[name].shape != w.shape]
        if session.fitting and wrong:
            raise ValueError(
                f"{WHO}: the checkpoint's dense weights are of {len(wrong)} parameters that {type(session.module).__name__} has"
                f" not, or has in another shape, such as {wrong[0]!r}; expected a checkpoint of the same model. Resume with the"
                " model it was saved from."
            )

    @override
    def attach(self, session: Session) -> None:
        self._reset()
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
                f"{WHO}(tiles={self.tiles}): of {len(left)} weights two of each four cannot be kept: {reasons}; expected whole"
                " fours. Leave them out of names=, or by dense=."
            )
        if left:
            rank_zero_info(f"{WHO}: {len(left)} of {len(weights)} weights stay dense. {reasons}.")
        self._names = [*self._axes]
        self._total = sum(weights[name].numel for name in self._axes)
        self._parameters = {n: p for n, p in session.module.named_parameters() if n in self._axes}
        self.take_out(session)
        session.views.append(lambda training: self._view(session))
        # what others begin a step with, and step by, is masked afterwards, in whatever order they are given
        session.rest(self)
        session.working.append(self)

    def _chosen(self, module: nn.Module) -> dict[str, Weight]:
        return chosen(module, self.names, self.dense, (1, 1), who=WHO, masked=self._names)

    @override
    def on_optimizers(self, session: Session) -> None:
        self._parameters = stepped(session, self._axes, who=WHO)
        before_clipping(session, self._gradients)

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
            self.take_out(self.session)  # a tuner's trial run may have loaded its checkpoint

    @override
    def detach(self, session: Session) -> None:
        super().detach(session)
        if not self._finished:
            self.masks = {}

    # -- what it tells

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {
            "sparsity": 0.5 if self._on and self._total else 0.0,
            "kept": self._total // 2 if self._on else self._total,
        }

    @override
    def summary(self) -> str:
        if not self._total:
            return "no weight masked"
        end = "are zero" if self._on else f"were zero for {self.until:.0%} of the run, which ended dense"
        return f"two of each four of {self._total:,} numbers in {len(self._names)} weights {end}; that saved no time"

    @override
    def state_dict(self) -> dict[str, Any]:
        dense = self._held
        if dense is None and self._on and self._session is not None:
            dense = {n: p.detach() for n, p in self._parameters.items()}
        return {"dense": dense, "on": self._on, "names": self._names}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.neutral or (self._session is not None and not self._session.fitting):
            return  # the weights that the checkpoint holds are the ones to be validated or tested
        self._held, self._on, self._names = state_dict["dense"], state_dict["on"], state_dict["names"]
