"""The rule by which a loader's setting is chosen, from what each took: a search among neighbours of the best so far."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from lightning_eff.data._loader.moving import Freedom
from lightning_eff.data._loader.tuner import Setting


@dataclass(frozen=True)
class Measured:
    """What a window of batches took with one setting.

    Attributes:
        waiting: mean seconds a batch in which the device waited for the loader, w.
        seconds: mean seconds from one batch's end to the next one's, t: waiting and step.
        startup: seconds in which an epoch's first batch came later than others, s: workers start then.
    """

    waiting: float
    seconds: float
    startup: float = 0.0

    def cost(self, epoch: float) -> float:
        """``t + s / n``: seconds a batch in an epoch of n batches."""
        return self.seconds + self.startup / epoch

    def share(self, epoch: float) -> float:
        """``(w + s / n) / (t + s / n)``: how much of the time the device waits for the loader."""
        return (self.waiting + self.startup / epoch) / self.cost(epoch)


def best_of(measured: Mapping[Setting, Measured], *, epoch: float, least_gain: float) -> Setting:
    """The cheapest setting; one measured later takes the place of an earlier one where it saves ``least_gain`` of its time.

    Args:
        measured: by setting, in the order of measuring; the first is the user's own.
        epoch: batches of an epoch, n.
        least_gain: in [0, 1).
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
    """What to measure next: the own setting first, then neighbours of the best so far; None where no more is to be won.

    Nothing is, once the device waits for at most a share ``waiting`` of the time with the best, or when all that differs from
    it in one of pinning, workers (twice and half as many) and prefetch (twice as far) has been measured.
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
