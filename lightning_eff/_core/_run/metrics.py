"""Current values of the techniques' metrics in ``trainer.callback_metrics``, instead of those logged last."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._lightning.names import adapted, package_of
from lightning_eff._core._run.protocol import Member

Source = Callable[[], dict[str, float]]
_OURS = ("_current", "_original")


def reported(techniques: Iterable[Member]) -> dict[str, float]:
    """Return the metrics of ``techniques``, by the names that loggers get."""
    return {
        f"eff/{technique.name()}/{quantity}": float(value)
        for technique in techniques
        for quantity, value in technique.report().items()
    }


class CurrentMetrics:
    """Adds a source's current metrics to ``trainer.callback_metrics`` whenever it is read, until :meth:`remove`.

    Logging in each step would be slow. The source is called only when the metrics are read, and once between two calls of
    :meth:`outdate`. The times and values that loggers get do not change.

    Args:
        trainer: the trainer.
        source: returns metrics by name.
    """

    def __init__(self, trainer: Trainer, source: Source) -> None:
        self._trainer, self._source = trainer, source
        self._values: dict[str, Tensor] | None = None
        owner: Any = trainer
        connector = owner._logger_connector
        if not isinstance(connector, _Connector):
            beside = object.__new__(adapted(_Connector, package_of(connector)))
            beside.__dict__ = connector.__dict__  # both share one state
            beside._current, beside._original = [], connector
            owner._logger_connector = connector = beside
        connector._current.append(self)

    def outdate(self) -> None:
        """Call the source again at the next read."""
        self._values = None

    def values(self) -> dict[str, Tensor]:
        """Return the source's metrics as tensors, as Lightning stores logged values."""
        if self._values is None:
            device = self._trainer.strategy.root_device
            found = self._source().items()
            self._values = {name: torch.tensor(value, dtype=torch.float32, device=device) for name, value in found}
        return self._values

    def remove(self, *, keep: bool) -> None:
        """Restore the trainer's own metrics; ``keep`` adds the source's present values to them."""
        owner: Any = self._trainer
        connector = owner._logger_connector
        if not isinstance(connector, _Connector) or self not in connector._current:
            return
        if keep:
            self.outdate()
            connector._callback_metrics.update(self.values())
        connector._current.remove(self)
        if not connector._current:
            owner._logger_connector = connector._original
            for name in _OURS:
                del connector.__dict__[name]


class _Connector(_LoggerConnector):
    """Lightning's connector, with the source's metrics for callbacks."""

    _current: list[CurrentMetrics]
    _original: _LoggerConnector

    @property
    @override
    def callback_metrics(self) -> dict[str, Tensor]:
        found = super().callback_metrics
        for metrics in self._current:
            found.update(metrics.values())
        return found
