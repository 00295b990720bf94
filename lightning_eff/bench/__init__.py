"""Compare recipes with their baseline at equal training time."""

from lightning_eff.bench.benchmark import Benchmark
from lightning_eff.bench.pace import Budget, Incomparable
from lightning_eff.monitor.efficiency_monitor import EfficiencyMonitor

__all__ = ["Benchmark", "Budget", "EfficiencyMonitor", "Incomparable"]
