"""The rule of both techniques: statistics of some samples of a batch at a time (Hoffer et al. 2017, arXiv:1705.08741)."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from lightning_eff._core._arguments.kinds import Alias, Count
from lightning_eff.model.layers._shared.choosing import check_any, select

#: The number of samples in a ghost batch.
GhostSize = Annotated[int, Count(at_least=2), Alias("ghost_batch_size")]


def group_sizes(num_samples: int, size: int, *, least: int = 1) -> list[int]:
    """The number of samples in each ghost batch: ``size``, and the rest in the last one.

    Args:
        num_samples: the number of samples in the batch, >= 1.
        size: the number of samples in a group, >= 1.
        least: a last group with fewer samples joins the group before it, because a variance needs two values.
    """
    whole, left = divmod(num_samples, size)
    if whole and left < least:
        return [*[size] * (whole - 1), size + left]
    return [*[size] * whole, *([left] if left else [])]


def ghost_batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    sizes: list[int],
    momentum: float,
    eps: float,
) -> Tensor:
    """``y_l = w (x_l - mu_l) / sqrt(var_l + eps) + b`` for each ghost batch ``l``, with its own mean and variance.

    Running statistics move as far as with one batch of BatchNorm, towards the mean over samples of the groups' statistics:

        mu_run  <- (1 - eta) mu_run  + eta sum_l (n_l / n) mu_l
        var_run <- (1 - eta) var_run + eta sum_l (n_l / n) var_l        with n_l - 1 in the variances' denominators

    so ``mu_run`` equals that of BatchNorm. In the paper each group moves them by ``eta``, and with many small groups the
    first ones are forgotten by the end of the batch.

    Args:
        x: shape (n, C) or (n, C, ...).
        running_mean: ``mu_run`` of shape (C,), changed in place, or None.
        running_var: ``var_run`` likewise.
        weight: ``w`` of shape (C,), or None for 1.
        bias: ``b`` of shape (C,), or None for 0.
        sizes: the number of samples in each group, in order; they add up to n.
        momentum: ``eta``, in [0, 1].
        eps: added to variances.
    """
    made: list[Tensor] = []
    means, variances = [], []
    for part in x.split(sizes):
        mean = var = None
        if running_mean is not None and running_var is not None:
            mean, var = running_mean.new_zeros(len(running_mean)), running_var.new_zeros(len(running_var))
            means.append(mean)
            variances.append(var)
        # with a momentum of 1, mean and var receive this group's own statistics
        made.append(F.batch_norm(part, mean, var, weight, bias, True, 1.0, eps))
    for running, found in ((running_mean, means), (running_var, variances)):
        if running is not None:
            parts = [n / len(x) * value for n, value in zip(sizes, found, strict=True)]
            running.lerp_(torch.stack(parts).sum(0), momentum)
    return torch.cat(made)


def normed(m: _BatchNorm, x: Tensor, size: int, plain: Callable[..., Tensor]) -> tuple[Tensor, int]:
    """The output of a BatchNorm in training for ``x`` in ghost batches of ``size`` samples, and the number of ghost batches.

    A single group runs ``plain(m, x)``, BatchNorm's own call, bit for bit.
    """
    least = 1 if x.ndim > 2 and x[0, 0].numel() > 1 else 2
    sizes = group_sizes(len(x), size, least=least) if x.ndim > 1 else []
    if len(sizes) < 2:
        return plain(m, x), 1
    m._check_input_dim(x)
    momentum = 0.0 if m.momentum is None else m.momentum
    if m.track_running_stats and m.num_batches_tracked is not None:
        m.num_batches_tracked.add_(1)
        if m.momentum is None:  # the mean over all batches
            momentum = 1.0 / float(m.num_batches_tracked)
    y = ghost_batch_norm(x, m.running_mean, m.running_var, m.weight, m.bias, sizes=sizes, momentum=momentum, eps=m.eps)
    return y, len(sizes)


def unfit(m: _BatchNorm) -> str | None:
    """Why a BatchNorm cannot be computed in groups, or None."""
    if isinstance(m, nn.SyncBatchNorm):
        return "it takes statistics over the samples of all processes"
    if isinstance(m, LazyModuleMixin):
        return "it is lazy and has no parameters yet; run the module once on a batch before the fit"
    if type(m).forward is not _BatchNorm.forward:
        return "it is a subclass of BatchNorm with its own forward"
    if "forward" in m.__dict__:
        return "its instance has its own forward"
    return None


def chosen(
    root: nn.Module,
    names: Sequence[str] | None,
    *,
    who: str,
    also: Callable[[_BatchNorm], str | None] = lambda m: None,
) -> tuple[dict[str, _BatchNorm], dict[str, str]]:
    """The BatchNorms to act on, by path, and why others are left.

    Args:
        root: the module.
        names: patterns of paths, or None for every BatchNorm.
        who: the technique.
        also: another reason to leave a BatchNorm, or None.

    Raises:
        ValueError: if there is none, a name means none, or a named one is unfit.
    """
    every = {path: m for path, m in root.named_modules() if isinstance(m, _BatchNorm)}
    if not every:
        kinds = Counter(type(m).__name__ for m in root.modules() if "norm" in type(m).__name__.lower())
        listed = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(5)) or "no norms"
        raise ValueError(f"{who}: {type(root).__name__} has no BatchNorm to act on, but {listed}. Remove the callback.")
    found, left = select(every, names, lambda path, m: unfit(m) or also(m), who=who, what="BatchNorms", root=root)
    check_any(found, left, who=who, what="BatchNorm", root=root)
    return found, left


def refuse_synchronized(trainer: Trainer, *, who: str) -> None:
    """Raise ``ValueError`` if the Trainer replaces BatchNorm by a norm over all processes."""
    if getattr(trainer.strategy, "_layer_sync", None) is not None:
        raise ValueError(
            f"{who}: Trainer(sync_batchnorm=True) takes statistics over all processes, and {who} over parts of one process's"
            " batch. Leave sync_batchnorm out, or remove the callback."
        )
