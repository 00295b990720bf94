"""The rule of both: statistics of some samples of a batch at a time (Hoffer et al. 2017, arXiv:1705.08741)."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from lightning_eff._core._architecture.naming import check_met, meets


def group_sizes(num_samples: int, size: int, *, least: int = 1) -> list[int]:
    """How many samples each ghost batch has: ``size``, and the last one what is left.

    Args:
        num_samples: of the batch, >= 1.
        size: of a group, >= 1.
        least: a last group of fewer samples than this is a part of the group before it: a variance needs two values.
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

    Running statistics move as far as by one batch of BatchNorm, to the mean over samples of the groups' statistics:

        mu_run  <- (1 - eta) mu_run  + eta sum_l (n_l / n) mu_l
        var_run <- (1 - eta) var_run + eta sum_l (n_l / n) var_l        with n_l - 1 in the variances' denominators

    so that ``mu_run`` is that of BatchNorm. The source lets each group move them, ``eta`` of the way: of many small groups
    the first are then forgotten by the end of the batch.

    Args:
        x: shape (n, C) or (n, C, ...).
        running_mean: ``mu_run`` of shape (C,), changed in place, or None.
        running_var: ``var_run`` likewise.
        weight: ``w`` of shape (C,), or None for 1.
        bias: ``b`` of shape (C,), or None for 0.
        sizes: samples of each group, in their order; their sum is n.
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
        # with a momentum of 1, what is written to mean and var is this group's own
        made.append(F.batch_norm(part, mean, var, weight, bias, True, 1.0, eps))
    for running, found in ((running_mean, means), (running_var, variances)):
        if running is not None:
            parts = [n / len(x) * value for n, value in zip(sizes, found, strict=True)]
            running.lerp_(torch.stack(parts).sum(0), momentum)
    return torch.cat(made)


def normed(m: _BatchNorm, x: Tensor, size: int, plain: Callable[..., Tensor]) -> tuple[Tensor, int]:
    """What a BatchNorm in training makes of ``x`` by ghost batches of ``size`` samples, and how many of these there were.

    One group is ``plain(m, x)``, BatchNorm's own call, bit for bit.
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
    """Why a BatchNorm cannot be computed by groups, or None."""
    if isinstance(m, nn.SyncBatchNorm):
        return "it takes the statistics of all processes' samples, which is the opposite"
    if isinstance(m, LazyModuleMixin):
        return "it is lazy, and has no parameters yet: run the module once on a batch before"
    if type(m).forward is not _BatchNorm.forward:
        return "a subclass of BatchNorm with a forward of its own"
    if "forward" in m.__dict__:
        return "it has a forward of its own on the instance"
    return None


def chosen(root: nn.Module, names: Sequence[str] | None, *, who: str) -> tuple[dict[str, _BatchNorm], dict[str, str]]:
    """The BatchNorms that are meant, by path, and why others are left.

    Raises:
        ValueError: if there is none, with what there is; for a name that means none; and for a named one that is unfit.
    """
    every = {path: m for path, m in root.named_modules() if isinstance(m, _BatchNorm)}
    if not every:
        kinds = Counter(type(m).__name__ for m in root.modules() if "norm" in type(m).__name__.lower())
        raise ValueError(
            f"{who}: {type(root).__name__} has no BatchNorm to act on; expected nn.BatchNorm1d, 2d or 3d. It has"
            f" {', '.join(f'{count} {kind}' for kind, count in kinds.items()) or 'no norm of any kind'}. Take the technique"
            " out."
        )
    if names is not None:
        check_met(names, every, who=who, what="BatchNorms", root=type(root).__name__)
    found: dict[str, _BatchNorm] = {}
    left: dict[str, str] = {}
    for path, m in every.items():
        named = names is not None and any(meets(path, name) for name in names)
        if names is not None and not named:
            continue
        reason = unfit(m)
        if reason and named:
            raise ValueError(
                f"{who}: {path} ({type(m).__name__}) cannot be acted on: {reason}. Leave it out of the names."
            )
        if reason:
            left[path] = reason
        else:
            found[path] = m
    if not found:
        reasons = "; ".join(f"{path}: {reason}" for path, reason in left.items())
        raise ValueError(f"{who}: no BatchNorm of {type(root).__name__} can be acted on: {reasons}. Take it out.")
    return found, left


def check_size(size: Any, *, who: str) -> None:
    """Raise ``ValueError`` unless ``size`` is an integer >= 2."""
    if not isinstance(size, int) or isinstance(size, bool) or size < 2:
        raise ValueError(f"{who}({size=}): expected an integer >= 2, samples of a ghost batch.")


def refuse_synchronized(trainer: Trainer, *, who: str) -> None:
    """Raise ``ValueError`` where the Trainer puts norms over all processes in the place of those that are here."""
    if getattr(trainer.strategy, "_layer_sync", None) is not None:
        raise ValueError(
            f"{who}: got Trainer(sync_batchnorm=True), which takes statistics over all processes; expected False, because"
            " these are over parts of one process's batch. Leave sync_batchnorm out, or take the technique out."
        )
