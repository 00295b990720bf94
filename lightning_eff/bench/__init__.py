"""The honest comparison of a recipe with its baseline."""

from lightning_eff.bench.benchmark import Benchmark
from lightning_eff.bench.pace import Budget, Incomparable
from lightning_eff.monitor.efficiency_monitor import EfficiencyMonitor

__all__ = ["Benchmark", "Budget", "EfficiencyMonitor", "Incomparable"]
