"""Choose a loader's setting from measured times, by a search among neighbors of the best so far."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from lightning_eff.data._loader.moving import Freedom
from lightning_eff.data._loader.tuner import Setting


@dataclass(frozen=True)
class Measured:
    """The times of a window of batches with one setting.

    Attributes:
        waiting: the mean seconds per batch that the device waited for the loader, w.
        seconds: the mean seconds from the end of one batch to the next, t, with waiting and step.
        startup: the extra seconds of an epoch's first batch, s, because workers start.
    """

    waiting: float
    seconds: float
    startup: float = 0.0

    def cost(self, epoch: float) -> float:
        """Compute the seconds per batch in an epoch of n batches, ``t + s / n``."""
        return self.seconds + self.startup / epoch

    def share(self, epoch: float) -> float:
        """Compute the fraction of the time that the device waits for the loader, ``(w + s / n) / (t + s / n)``."""
        return (self.waiting + self.startup / epoch) / self.cost(epoch)


def best_of(measured: Mapping[Setting, Measured], *, epoch: float, least_gain: float) -> Setting:
    """Find the cheapest setting. A later one replaces an earlier one only if it saves ``least_gain`` of its time.

    Args:
        measured: the times by setting, in the order of measuring. The first is the user's own.
        epoch: the number n of batches per epoch.
        least_gain: the fraction to save, in [0, 1).
    """
    settings = iter(measured)
    best = next(settings)
    for setting in settings:
        # t_k + s_k / n < (1 - g) (t_best + s_best / n)
        if measured[setting].cost(epoch) < (1 - least_gain) * measured[best].cost(epoch):
            best = setting
    return best


def next_setting(
    measured: Mapping[Setting, Measured],
    own: Setting,
    free: Freedom,
    *,
    epoch: float,
    waiting: float,
    least_gain: float,
    max_workers: int,
    max_prefetch: int,
) -> Setting | None:
    """Choose what to measure next: the own setting first, then neighbors of the best so far, or None at the end.

    The search ends once the device waits for at most the fraction ``waiting`` of the time with the best setting, or once
    all its neighbors have been measured. They differ in pinning, workers (double or half) or prefetch (double).
    """
    if own not in measured:
        return own
    best = best_of(measured, epoch=epoch, least_gain=least_gain)
    if measured[best].share(epoch) <= waiting:
        return None
    near = _neighbours(best, own, free, max_workers=max_workers, max_prefetch=max_prefetch)
    return next((setting for setting in near if setting not in measured), None)


def _neighbours(
    best: Setting, own: Setting, free: Freedom, *, max_workers: int, max_prefetch: int
) -> Iterator[Setting]:
    workers, ahead = best.num_workers, best.prefetch_factor
    if free.pin and not best.pin_memory:
        yield replace(best, pin_memory=True)
    if free.workers and workers < max_workers:
        yield replace(best, num_workers=min(max(2 * workers, 1), max_workers), prefetch_factor=ahead or 2)
    if free.prefetch and workers and ahead < max_prefetch:
        yield replace(best, prefetch_factor=min(2 * ahead, max_prefetch))
    if free.workers and workers > 1 and own.num_workers > 0:
        yield replace(best, num_workers=workers // 2)
