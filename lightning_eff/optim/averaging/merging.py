"""Merge the checkpoints of several runs into one model: uniform and greedy soups (Wortsman et al. 2022), and WARM."""

import contextlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Kind, OneOf
from lightning_eff._core._lightning.names import is_a, like
from lightning_eff._core._lightning.undisturbed import undisturbed
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Technique
from lightning_eff.optim.averaging import _soups as soups
from lightning_eff.optim.averaging._batch_norm import modes, recompute_statistics

METHODS = ("uniform", "greedy", "warm")


@dataclass
class Merged:
    """The result of :func:`merge`.

    Attributes:
        checkpoint: the merged checkpoint. ``checkpoint["state_dict"]`` holds the weights. Hyperparameters are those of the
            first run. It has no optimizer state, so a fit that resumes needs one of the runs.
        used: the paths of the checkpoints in the merge.
        scores: the metric of each checkpoint by its path, if they were evaluated.
        score: the metric of the merged weights, if they were evaluated.
        notes: what you should know about this merge.
    """

    checkpoint: dict[str, Any]
    used: list[str]
    scores: dict[str, float] = field(default_factory=dict)
    score: float | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def state_dict(self) -> dict[str, Tensor]:
        """The merged weights."""
        return self.checkpoint["state_dict"]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the merged checkpoint. ``load_from_checkpoint`` reads it."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        torch.save(self.checkpoint, path)

    def __str__(self) -> str:
        lines = [
            f"{path}: {self.scores[path]:.6g}{'' if path in self.used else '  (left out)'}" for path in self.scores
        ]
        lines.append(f"merged {len(self.used)} checkpoints{'' if self.score is None else f': {self.score:.6g}'}")
        return "\n".join([*lines, *self.notes])


class _Recomputed(Exception):
    """Ends the fit in which BatchNorm statistics are recomputed."""


class _Recompute(Technique):
    """Recompute BatchNorm statistics at the module's weights when training starts, and end the fit."""

    needs_optimizer = False
    needs_automatic_optimization = False

    def __init__(self, num_batches: int) -> None:
        self.num_batches = num_batches
        self.buffers: dict[str, Tensor] = {}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        session: Session = self.session
        self.buffers = recompute_statistics(session, modes(pl_module), self.num_batches, epoch=0)
        raise _Recomputed


class _Evaluation:
    """Loads, recomputes and evaluates states with a module and its data."""

    def __init__(
        self,
        module: LightningModule,
        data: Any,
        metric: str,
        trainer: Trainer | None,
        *,
        bn_batches: int,
        statistics: Sequence[str],
    ) -> None:
        self.module, self.metric = module, metric
        self.bn_batches, self.statistics = bn_batches, statistics  # the names of those that differ between checkpoints
        self._fit, self._validate = _given(data)
        self._trainer: Any = like(module, Trainer)
        self._own = trainer

    def load(self, state: soups.State) -> dict[str, Tensor]:
        """Load weights, and return them with recomputed BatchNorm statistics."""
        try:
            self.module.load_state_dict(state, strict=self.module.strict_loading)
        except RuntimeError as error:
            raise ValueError(
                f"merge(module={type(self.module).__name__}): the weights do not fit the module"
                f" ({' '.join(str(error).split())[:300]}). Pass a module with the runs' hyperparameters, and with"
                " lightning_eff.apply if techniques changed its architecture."
            ) from error
        state = dict(state)
        if self.bn_batches and soups.has_statistics(state):
            only = _Recompute(self.bn_batches)
            with undisturbed(), contextlib.suppress(_Recomputed):
                self._quiet(callbacks=[only]).fit(self.module, **self._fit)
            if missed := [name.rpartition(".")[0] for name in self.statistics if name not in only.buffers]:
                layers = f"{', '.join(missed[:5])}{', ...' if len(missed) > 5 else ''}"
                raise ValueError(
                    f"merge(bn_batches={self.bn_batches}): no training batch reached these BatchNorm layers in training"
                    f" mode: {layers}. Pass training data that reaches them and a module in training mode"
                    " (module.train()), or use bn_batches=0 to average their statistics."
                )
            own = self.module.state_dict()
            for name, value in only.buffers.items():
                own[name].copy_(value)
                state[name] = value.detach().cpu().clone()
        return state

    def score(self) -> float:
        """Return the metric of the module's weights on the validation data."""
        with undisturbed():
            trainer = self._own or self._quiet()
            trainer.validate(self.module, verbose=False, **self._validate)
        found = trainer.callback_metrics
        if self.metric not in found:
            raise ValueError(
                f"merge(metric={self.metric!r}): validation logged {', '.join(sorted(found)) or 'no metric'}. Name one of"
                " the metrics that the module logs in validation_step."
            )
        return float(found[self.metric])

    def _quiet(self, **settings: Any) -> Any:
        device = {} if self._own is None else {"accelerator": self._own.strategy.root_device.type}
        off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        settings = dict.fromkeys(off, False) | device | settings
        return self._trainer(max_epochs=1, devices=1, num_sanity_val_steps=0, **settings)


def _given(data: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of ``fit`` and ``validate`` for a data module, a pair of loaders, or the module's own data."""
    if data is None:
        return {}, {}
    if is_a(data, LightningDataModule):
        return {"datamodule": data}, {"datamodule": data}
    if isinstance(data, tuple | list) and len(data) == 2:
        return {"train_dataloaders": data[0]}, {"dataloaders": data[1]}
    kind = "a loader" if isinstance(data, DataLoader) else type(data).__name__
    raise TypeError(
        f"merge(data={kind}): expected a LightningDataModule or (train_loader, val_loader). Pass one of these, or nothing if"
        " the module has its own data."
    )


def merge(
    checkpoints: Sequence[str | os.PathLike[str]],
    module: LightningModule | None = None,
    data: Any = None,
    *,
    method: Literal["uniform", "greedy", "warm"] = "uniform",
    weights: Sequence[float] | None = None,
    metric: str | None = None,
    mode: Literal["min", "max"] = "min",
    bn_batches: int = 100,
    trainer: Trainer | None = None,
) -> Merged:
    """Average the weights of several runs that began from the same pretrained weights, and evaluate the result.

    One model with averaged weights costs no more than one of the runs at inference, and often generalizes better than each of
    them. Use it after fine-tuning with several seeds, data orders or hyperparameters. Runs that began from different random
    weights do not average well. Evaluate before you trust a merge.

    BatchNorm statistics are not averaged. They are recomputed on training data for each set of weights that is evaluated or
    returned, by the rule of ``torch.optim.swa_utils.update_bn``. Layers that are frozen, in evaluation mode or unused keep
    their statistics if all checkpoints have the same ones. Integer buffers are those of the first checkpoint. Checkpoints
    of averaging techniques such as :class:`ExponentialMovingAverage` hold the average, so the averages are merged.
    The module holds the merged weights afterwards.

    Args:
        checkpoints: the paths of two or more checkpoints of one architecture.
        module: a module of that architecture. It is needed for "greedy", for ``metric``, and for BatchNorm layers.
        data: a LightningDataModule, or ``(train_loader, val_loader)``; None if the module has its own data.
        method: "uniform" averages all checkpoints, which is also WARM's rule ("warm") for reward models. "greedy" begins with
            the best one, and keeps each further checkpoint that does not make the mean worse.
        weights: a weight >= 0 for each checkpoint in the mean, for "uniform"; None for equal weights.
        metric: the name of a metric that the module logs in validation. None evaluates nothing; "greedy" then uses "val_loss".
        mode: whether the metric should be small ("min") or large ("max").
        bn_batches: the number of training batches for BatchNorm statistics. 0 averages them like weights.
        trainer: the Trainer that evaluates; None for one device without logs.

    Returns:
        The merged checkpoint, with the metric of each checkpoint and of the merge.

    Raises:
        FileNotFoundError: if a checkpoint does not exist.
        TypeError: if ``data`` is neither a data module nor a pair of loaders.
        ValueError: for a value out of range, fewer than two checkpoints, checkpoints of different architectures, if the
            module or the data that the merge needs are missing, or if no training batch reaches a BatchNorm layer.

    Example:
        >>> soup = lightning_eff.merge(["seed0.ckpt", "seed1.ckpt"], module, data, method="greedy", metric="val_loss")
        >>> soup.save("soup.ckpt")

    References:
        Wortsman et al. 2022, "Model soups", arXiv:2203.05482.
        Ramé et al. 2024, "WARM: On the Benefits of Weight Averaged Reward Models", arXiv:2401.12187.
    """
    _check("method", method, OneOf(*METHODS))
    _check("mode", mode, OneOf("min", "max"))
    _check("bn_batches", bn_batches, Count(at_least=0))
    paths = [str(path) for path in ([checkpoints] if isinstance(checkpoints, str | os.PathLike) else checkpoints)]
    if len(paths) < 2:
        raise ValueError(f"merge(checkpoints={paths}): there is nothing to merge. Pass two or more paths.")
    given = [1.0] * len(paths) if weights is None else [float(a) for a in weights]
    if len(given) != len(paths) or not all(0 <= a < math.inf for a in given) or not sum(given):
        raise ValueError(
            f"merge(weights={weights}): expected {len(paths)} numbers >= 0, one for each checkpoint, not all 0. Omit it for"
            " equal weights."
        )
    if weights is not None and method == "greedy":
        raise ValueError(
            "merge(method='greedy', weights=...): a greedy soup gives equal weights to the checkpoints that it keeps."
            " Omit weights, or use method='uniform'."
        )
    read = [soups.read(path) for path in paths]
    soups.check_alike(paths, read)
    states: list[soups.State] = [checkpoint["state_dict"] for checkpoint in read]
    metric = metric or ("val_loss" if method == "greedy" else None)
    needs = _need(states[0], metric, bn_batches)
    if needs and module is None:
        raise ValueError(f"merge(module=None): {needs}. Pass the module and its data.")
    result = Merged({}, paths, notes=_notes(read, states))
    evaluation = None
    if module is not None:
        unlike = soups.unlike_statistics(states)
        evaluation = _Evaluation(module, data, metric or "", trainer, bn_batches=bn_batches, statistics=unlike)
    chosen = list(range(len(paths)))
    if evaluation is not None and metric is not None:
        for path, state in zip(paths, states, strict=True):
            evaluation.load(state)
            result.scores[path] = evaluation.score()
    if method == "greedy":
        assert evaluation is not None

        def score_of(places: list[int]) -> float:
            evaluation.load(soups.mean([states[i] for i in places], [1.0] * len(places)))
            return evaluation.score()

        better = (lambda a, b: a < b) if mode == "min" else (lambda a, b: a > b)
        chosen, _ = soups.greedy([*result.scores.values()], score_of, better=better)
    result.used = [paths[i] for i in chosen]
    merged: dict[str, Tensor] = soups.mean([states[i] for i in chosen], [given[i] for i in chosen])
    if evaluation is not None:
        merged = evaluation.load(merged)
        result.score = evaluation.score() if metric is not None else None
    kept = ("pytorch-lightning_version", "hyper_parameters", "hparams_name", "hparams_type")
    result.checkpoint = {name: read[0][name] for name in kept if name in read[0]} | {"state_dict": merged}
    if architecture := soups.architecture(read[0]):
        result.checkpoint["lightning_eff"] = {"architecture": architecture}
    return result


def _check(name: str, value: Any, kind: Kind) -> None:
    try:
        kind(value)
    except (ValueError, TypeError):
        raise ValueError(f"merge({name}={value!r}): expected {kind.expected}.") from None


def _need(state: soups.State, metric: str | None, bn_batches: int) -> str:
    """Say why a merge needs the module and its data, or nothing."""
    if metric is not None:
        return f"evaluating {metric} needs the module"
    if bn_batches and soups.has_statistics(state):
        return "BatchNorm statistics must be recomputed on training data (bn_batches=0 averages them instead)"
    return ""


def _notes(read: Sequence[dict[str, Any]], states: Sequence[soups.State]) -> list[str]:
    notes = []
    if unequal := soups.unequal(states):
        notes.append(f"Integer buffers that differ have the first checkpoint's values: {', '.join(unequal[:5])}.")
    if soups.adapters(read[0]):
        notes.append(
            "The mean of two LoRA factors is not the mean of their products. Merge exported models if the result is worse than"
            " the runs."
        )
    return notes
