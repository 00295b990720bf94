"""The values that a fit has logged: Lightning's sums for epoch means, its dictionaries of metrics, and states of metrics."""

import math
import sys
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_eff._core._stack.walking import modules_by_path

_DICTIONARIES = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_META = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx"),
    *("dataloader_idx", "metric_attribute"),
)
#: Attributes of a metric that change but are not states.
_COUNTED = ("_update_count", "_computed", "_forward_cache")
_NUMBERS = (bool, int, float, str, type(None))


def save_logged(trainer: Trainer) -> dict[str, Any]:
    """Return the logged values, as plain containers."""
    connector: Any = trainer._logger_connector
    epoch_loop = trainer.fit_loop.epoch_loop
    state: dict[str, Any] = {name: _copied(dict(getattr(connector, name))) for name in _DICTIONARIES}
    state |= {"first": connector._first_loop_iter, "fx": connector._current_fx}
    state["training"] = _save_results(epoch_loop._results)
    state["validation"] = _save_results(epoch_loop.val_loop._results) if trainer.validating else None
    return state


def load_logged(trainer: Trainer, module: LightningModule, state: dict[str, Any]) -> None:
    """Restore the values of :func:`save_logged`, over those that this run's first hooks have logged."""
    connector: Any = trainer._logger_connector
    device = trainer.strategy.root_device
    for name in _DICTIONARIES:
        getattr(connector, name).update(_moved(state[name], device))
    connector._first_loop_iter, connector._current_fx = state["first"], state["fx"]
    epoch_loop = trainer.fit_loop.epoch_loop
    _load_results(trainer, module, epoch_loop._results, state["training"])
    if state["validation"] is not None:
        _load_results(trainer, module, epoch_loop.val_loop._results, state["validation"])


def _save_results(results: Any) -> dict[str, Any]:
    entries = {key: _save_entry(entry) for key, entry in results.items() if not entry.has_reset}
    return {
        "entries": {key: entry for key, entry in entries.items() if entry is not None},
        "batch_size": _batch_size(results),
        "dataloader_idx": results.dataloader_idx,
    }


def _batch_size(results: Any) -> int | None:
    """Return Lightning's number of samples in the current batch, for values that hooks still have to log."""
    if results.batch_size is not None or results.batch is None:
        return results.batch_size
    extract = sys.modules[type(results).__module__].extract_batch_size
    try:
        return int(extract(results.batch))
    except Exception:  # raised if the size is unknown; a guess gives a warning
        return None


def _save_entry(entry: Any) -> dict[str, Any] | None:
    meta = entry.meta
    if meta.sync.group is not None:
        return None  # a process group cannot be saved
    state: dict[str, Any] = {name: getattr(meta, name) for name in _META}
    state |= {"reduce": meta.reduce_fx.__name__, "is_tensor": entry.is_tensor}
    state |= {"sync": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only}
    values = {name: _copied(getattr(entry, name)) for name in _COUNTED}
    if entry.is_tensor:
        values["value"] = _copied(entry.value)
        if meta.is_mean_reduction:
            values["cumulated_batch_size"] = _copied(entry.cumulated_batch_size)
    return {**state, "values": values}


def _load_results(trainer: Trainer, module: LightningModule, results: Any, state: dict[str, Any]) -> None:
    kinds = sys.modules[type(results).__module__]
    device = trainer.strategy.root_device
    for key, entry in state["entries"].items():
        meta = kinds._Metadata(**{name: entry[name] for name in _META}, reduce_fx=getattr(torch, entry["reduce"]))
        meta.sync = kinds._Sync(
            _should=entry["sync"], fn=trainer.strategy.reduce, rank_zero_only=entry["rank_zero_only"]
        )
        result = kinds._ResultMetric(meta, entry["is_tensor"])
        if not entry["is_tensor"]:
            metric = _at(module, entry["metric_attribute"])
            if metric is None:
                continue
            result.value = metric
        for name, value in entry["values"].items():
            setattr(result, name, _moved(value, device))
        result.to(device)
        results[key] = result
    results.batch_size, results.dataloader_idx = state["batch_size"], state["dataloader_idx"]


def _at(module: nn.Module, path: str | None) -> Any:
    try:
        return None if path is None else module.get_submodule(path)
    except AttributeError:
        return None


class Metrics:
    """The torchmetrics objects in a module, whose states are in no ``state_dict``.

    Args:
        module: searched once, when a fit begins.
    """

    def __init__(self, module: nn.Module) -> None:
        named = modules_by_path(module)
        self._found = {path: m for path, m in named if _is_metric(m)}
        # members of a collection that share a state get it only on request
        self._shared = [m for _, m in named if hasattr(m, "_compute_groups_create_state_ref")]
        self._began = {path: _plain_attributes(metric) for path, metric in self._found.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the differences from the start of the fit by path, as plain containers."""
        for collection in self._shared:
            collection._compute_groups_create_state_ref()  # pyright: ignore[reportCallIssue]
        states = {path: self._save(path, metric) for path, metric in self._found.items()}
        return {path: state for path, state in states.items() if state}

    def _save(self, path: str, metric: Any) -> dict[str, Any]:
        began = self._began[path]
        changed = {name: v for name, v in _plain_attributes(metric).items() if name not in began or began[name] != v}
        if metric._update_count or "_update_count" in changed:
            changed |= {name: _copied(getattr(metric, name)) for name in (*metric._defaults, *_COUNTED)}
        return changed

    def load_state_dict(self, states: Mapping[str, Any], device: torch.device) -> None:
        """Restore the result of :meth:`state_dict`."""
        for path, state in states.items():
            metric = self._found.get(path)
            for name, value in state.items() if metric is not None else ():
                current = getattr(metric, name, None)
                where = current.device if isinstance(current, Tensor) else getattr(metric, "_device", device)
                setattr(metric, name, _moved(value, where))


def _is_metric(module: nn.Module) -> bool:
    defaults = getattr(module, "_defaults", None)
    return isinstance(defaults, dict) and hasattr(module, "_update_count") and hasattr(module, "_reductions")


def _plain_attributes(metric: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(metric).items() if isinstance(value, _NUMBERS) and not _is_nan(value)}


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _copied(value: Any) -> Any:
    """Copy tensors to the CPU without graphs, in the same containers; other objects are omitted."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {str(key): _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(item) for item in value] if isinstance(value, list) else tuple(_copied(item) for item in value)
    return value if type(value) in _NUMBERS else None


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_moved(item, device) for item in value)
    return value
