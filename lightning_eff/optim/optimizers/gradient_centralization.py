"""Gradient centralization: remove the mean from each output's gradient (Yong et al. 2020)."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Fraction
from lightning_eff._core._needs.needs import Part, Reasons
from lightning_eff._core.search_space import SearchSpace, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control, Technique
from lightning_eff.optim.optimizers._matrices import is_linear

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@torch.no_grad()
def centralize(gradient: Tensor, *, dim: int, strength: float = 1.0) -> Tensor:
    """Subtract each output's mean from the gradient of a weight, in place.

    Args:
        gradient: ``g``, of a linear layer or a convolution, with two or more dimensions.
        dim: the dimension of the outputs.
        strength: the fraction of the mean that is subtracted.

    Returns:
        The norm of what was subtracted, shape ().
    """
    # μ_o = mean over inputs (and places in a kernel) of g_o
    mean = gradient.mean([d for d in range(gradient.ndim) if d != dim], keepdim=True) * strength
    # Φ(g)_o = g_o − μ_o
    gradient -= mean
    inputs = gradient.numel() // mean.numel()
    return torch.linalg.vector_norm(mean, dtype=torch.promote_types(mean.dtype, torch.float32)) * inputs**0.5


def output_dims(module: nn.Module) -> dict[str, int]:
    """The weights of linear layers and convolutions, by parameter name, each with the dimension of its outputs.

    Embeddings are left out, also if one is tied to the head. So are grouped transposed convolutions, whose outputs do not
    lie along one dimension; weights with one input per output, whose gradient is its own mean; and the lengths that
    ``weight_norm`` keeps beside the directions.
    """
    tables = {id(p) for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) for p in m.parameters()}
    found: dict[int, int] = {}
    for owner in module.modules():
        dim = _output_dim(owner)
        if dim is not None:
            own = (p for p in owner.parameters(recurse=False) if p.ndim > 1 and id(p) not in tables)
            found |= {id(p): dim for p in own if p.numel() > p.shape[dim] and not _is_lengths(owner, p)}
    return {name: found[id(p)] for name, p in module.named_parameters() if id(p) in found}


def _is_lengths(owner: nn.Module, p: Tensor) -> bool:
    """Whether ``p`` scales slices of the owner's weight, as ``weight_g`` of ``torch.nn.utils.weight_norm`` does."""
    weight = vars(owner).get("weight")  # computed before each forward pass
    if not isinstance(weight, Tensor) or weight.ndim != p.ndim or weight.shape == p.shape:
        return False
    return all(a in (1, b) for a, b in zip(p.shape, weight.shape, strict=True))


def _output_dim(owner: nn.Module) -> int | None:
    """The dimension of the outputs in a module's weights; None for modules without such weights."""
    if isinstance(owner, _TRANSPOSED):
        return 1 if owner.groups == 1 else None
    if type(owner).__name__ == "Conv1D":  # transformers' linear layer of shape (in, out)
        return 1
    return 0 if isinstance(owner, (*_CONVOLUTIONS, nn.RNNBase)) or is_linear(owner) else None


class GradientCentralization(Technique):
    """Subtract the mean over inputs from each output's gradient, before every optimizer step.

    This applies to the weights of linear layers and convolutions; the mean is over inputs and kernel positions. Under plain
    SGD the mean of each output's weights then stays constant, and anything that all inputs have in common, such as the mean
    of non-negative activations, no longer moves the weights. It runs before gradient clipping, after gradients are summed
    over accumulation windows and ranks. It costs almost nothing.

    Biases, norms and embeddings (also tied ones) keep their gradients. So do weights with one input per output, such as those
    of ``nn.Linear(1, n)`` and depthwise 1x1 convolutions, which would lose their whole gradient, and the lengths of
    ``weight_norm``.

    It logs ``centralized``, the number of weights in the last step, and ``removed_norm``, the norm of what was subtracted.

    Args:
        strength: the fraction of the mean that is subtracted. 1 is the paper's, 0 is plain training.

    Raises:
        ValueError: for a value out of range. At setup, if no optimizer has a weight of a linear layer or a convolution.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[GradientCentralization()])

    References:
        Yong et al. 2020, "Gradient Centralization: A New Optimization Technique for Deep Neural Networks", arXiv:2004.01461.
    """

    saves: ClassVar[str] = "steps, according to the paper: better conditioned gradients at almost no cost"
    paper: ClassVar[str] = "Yong et al. 2020, arXiv:2004.01461"
    refuses: ClassVar[Reasons] = dict.fromkeys((Part.SHARD, Part.TENSOR, Part.PIPELINE), "")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"strength": Uniform(0.25, 1.0)})
    control: ClassVar[Control] = Control(
        "the baseline for the same time with a learning rate that decays to zero; step costs are about equal"
    )
    needs_automatic_optimization: ClassVar[bool] = False
    neutral_at: ClassVar[Mapping[str, Any]] = {"strength": 0.0}
    checkpointed: ClassVar[tuple[str, ...]] = ("_last",)

    def __init__(self, strength: Annotated[float, Fraction()] = 1.0) -> None:
        self.strength = strength

    def _reset(self) -> None:
        self._dims: dict[int, int] = {}
        self._last: dict[str, float | int | Tensor] = {}

    @override
    def on_optimizers(self, session: Session) -> None:
        dims = output_dims(session.module)
        held = {id(p) for optimizer in session.optimizers for group in optimizer.param_groups for p in group["params"]}
        self._dims = {
            id(p): dims[name] for name, p in session.module.named_parameters() if name in dims and id(p) in held
        }
        if not self._dims:
            raise ValueError(
                f"GradientCentralization: no optimizer of {type(session.module).__name__} has the weight of a linear layer or a"
                f" convolution with several inputs per output (there are: {', '.join([*dims][:5]) or 'none'}). Give one to an"
                " optimizer, or remove the technique."
            )

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        norms: list[Tensor] = []
        for group in optimizer.param_groups if self._dims else ():
            for p in group["params"]:
                if id(p) in self._dims and p.grad is not None:
                    norms.append(centralize(p.grad, dim=self._dims[id(p)], strength=self.strength))
        if norms:
            removed = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
            self._last = {"centralized": len(norms), "removed_norm": removed}

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return dict(self._last)

    @override
    def summary(self) -> str:
        if not self._last:
            return "no gradient was centralized"
        removed = float(self._last["removed_norm"])
        count = f"{self._last['centralized']:g}"
        return f"centralized the gradients of {count} weights; removed a norm of {removed:.2g} in the last step"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"last": {name: float(value) for name, value in self._last.items()}}
