"""Problems that cost a run time or memory for nothing."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from lightning_eff.advice._looking.frames import Place
from lightning_eff.advice._looking.operations import CHECKS
from lightning_eff.advice._looking.parameters import listed
from lightning_eff.advice._looking.problem import Problem
from lightning_eff.advice._looking.watched import Watched

DATA, DATA_SECONDS = 0.15, 2e-3  # of a step, and seconds of it, that may pass before its batch is there
METRICS = 0.05  # of a step, for metrics
TWICE = 0.1  # of a step's multiplications, done a second time
PADDING = 0.2  # of the positions
VALIDATION = 0.4  # of the run
OFTEN = 4  # a progress bar that is refreshed after so many steps or fewer is refreshed often
_KINDS = {"item": "reads a value on the host", "print": "prints a tensor", "copy": "copies a tensor to the host"}
_FIXES = {name: f"Pass validate_args=False to {name.split()[0]}." for name in CHECKS}


def costs(seen: Watched) -> Iterator[Problem]:
    """The problems that cost time or memory for nothing."""
    for look in _COSTS:
        yield from look(seen)


def _data(seen: Watched) -> Iterator[Problem]:
    if not seen.times.known:
        return
    loader: Any = seen.trainer.train_dataloader
    workers = getattr(loader, "num_workers", None)
    waiting, step = seen.times.waiting(workers)
    if waiting < DATA_SECONDS or waiting < DATA * step:
        return
    told = f" The loader has num_workers={workers}." if workers is not None else ""
    yield Problem(
        "waiting-for-data",
        f"Each step waits {1000 * waiting:.3g} ms of {1000 * step:.3g} ms ({waiting / step:.0%}) for its batch.{told}",
        "Add the callback LoaderTuning(), or raise num_workers of the DataLoader.",
        waiting / step,
    )


def _validation(seen: Watched) -> Iterator[Problem]:
    batch = seen.times.validation_batch()
    batches, every = seen.validation_batches, seen.validate_every
    if batch is None or not batches or not every or not seen.times.known:
        return
    validating, training = batch * batches, seen.times.step() * every
    share = validating / (validating + training)
    if share < VALIDATION:
        return
    yield Problem(
        "slow-validation",
        f"Validation takes {share:.0%} of the run: {batches} batches ({validating:.3g} s) after every {every} training"
        f" batches ({training:.3g} s).",
        "Validate less often (check_val_every_n_epoch, val_check_interval) or on fewer batches (limit_val_batches).",
        share,
    )


def _waits(seen: Watched) -> Iterator[Problem]:
    steps = len(seen.close)
    if steps < 2:
        return
    here, total = Counter[Place](), Counter[Place]()
    kinds: dict[Place, set[str]] = {}
    for one in seen.close[1:]:  # the first step may look at more
        for place, by_kind in one.waits.items():
            here[place] += 1
            total[place] += max(by_kind.values())
            kinds.setdefault(place, set()).update(by_kind)
    often = [p for p in here if 2 * here[p] >= steps - 1 and here[p] >= min(2, steps - 1) and _can_be_changed(p)]
    if not often:
        return
    often.sort(key=lambda p: -total[p])
    lines = [f"{p} ({p.code or ', '.join(sorted(kinds[p]))}) {total[p] / (steps - 1):.3g} times" for p in often[:5]]
    more = f", and {len(often) - 5} more lines" if len(often) > 5 else ""
    fixes = list(dict.fromkeys(_FIXES[p.through] for p in often if p.through in _FIXES))
    if any(p.through not in _FIXES for p in often):
        fixes.append("Log tensors as they are (self.log('loss', loss)), and read or print values every 50 steps or so.")
    yield Problem(
        "host-synchronisation",
        f"On an accelerator each step waits for it {sum(total[p] for p in often) / (steps - 1):.3g} times: at"
        f" {'; '.join(lines)}{more}.",
        " ".join(fixes),
    )


def _can_be_changed(place: Place) -> bool:
    """Whether a user can avoid a synchronisation. Libraries and optimizers need some."""
    return place.through in ("", *_FIXES)


def _logging(seen: Watched) -> Iterator[Problem]:
    bar = [name for name, n in seen.bar.items() if 2 * n > seen.steps and n > 2]
    if bar and 0 < seen.bar_rate <= OFTEN:
        yield Problem(
            "progress-bar-synchronisation",
            f"The progress bar shows {', '.join(sorted(bar)[:5])} and is refreshed every {_steps(seen.bar_rate)}. On an"
            " accelerator each refresh waits for it.",
            "Refresh it less often: callbacks=[TQDMProgressBar(refresh_rate=20)].",
        )
    log = [name for name, n in seen.log.items() if 2 * n > seen.steps and n > 2]
    if log and 0 < seen.log_rate <= OFTEN:
        yield Problem(
            "logging-every-step",
            f"The logger writes {', '.join(sorted(log)[:5])} every {_steps(seen.log_rate)}. On an accelerator each row"
            " waits for it.",
            "Pass log_every_n_steps=50 to the Trainer.",
        )


def _steps(n: int) -> str:
    return "step" if n == 1 else f"{n} steps"


def _twice(seen: Watched) -> Iterator[Problem]:
    steps = [one for one in seen.close if one.twice and one.cost]
    shares = [sum(t.cost for t in one.twice) / one.cost for one in steps]
    if 2 * len(steps) <= len(seen.close) or not shares or sorted(shares)[len(shares) // 2] < TWICE:
        return
    share = sorted(shares)[len(shares) // 2]
    by_line = Counter[tuple[str, str]]()
    paths = Counter[str]()
    for one in steps[0].twice:
        by_line[str(one.second), str(one.first)] += int(one.cost)
        paths[next((m for m in one.modules if m), "")] += int(one.cost)
    (second, first), _ = by_line.most_common(1)[0]
    path = paths.most_common(1)[0][0]
    what = f"{path} is computed" if path else "The same products are computed"
    where = f"at {second} and at {first}" if second != first else f"at {second}"
    yield Problem(
        "duplicate-work",
        f"{what} twice per step on the same inputs, {where}. The second time is {share:.0%} of the step's multiplications.",
        "Keep the first result in a variable and use it in both places.",
        share,
    )


def _metrics(seen: Watched) -> Iterator[Problem]:
    times = seen.times
    if times.timed < 3 or not times.metrics or not times.known:
        return
    per_step = times.metric_seconds / max(seen.steps - len(seen.close), 1)
    share = per_step / times.step()
    if share < METRICS:
        return
    names = ", ".join(f"{n} at {place}" if place else n for n, place in list(times.metrics.items())[:5])
    yield Problem(
        "costly-metrics",
        f"Metrics take {1000 * per_step:.3g} ms of each training step ({share:.0%}): {names}.",
        "Compute them in validation only, or every 50 steps.",
        share,
    )


def _padding(seen: Watched) -> Iterator[Problem]:
    padding, total = seen.padding
    if total and padding >= PADDING * total:
        yield Problem(
            "padding",
            f"{padding / total:.0%} of the positions in token batches are padding.",
            "Try SequencePacking(), which skips padding, or TokenBudgetBatches, which batches texts of similar length.",
            padding / total,
        )


def _settings(seen: Watched) -> Iterator[Problem]:
    gradients = seen.gradients
    if seen.anomaly:
        yield Problem(
            "detect-anomaly",
            "Autograd's anomaly detection is on. It records the stack of every operation and checks every gradient for NaN.",
            "Remove detect_anomaly=True from the Trainer once the bug is found.",
        )
    if seen.searches_unused and gradients is not None and gradients.passes >= 3 and gradients.whole == gradients.passes:
        yield Problem(
            "find-unused-parameters",
            f"DDP searches the graph of every step for unused parameters, but all {len(gradients.trained)} parameter tensors"
            f" got a gradient in each of {gradients.passes} steps.",
            'Use strategy="ddp".',
        )
    if seen.deterministic:
        yield Problem(
            "deterministic-algorithms",
            "Deterministic algorithms are on. Some operations then use slower kernels.",
            "Remove deterministic=True from the Trainer if runs need not be repeated bit for bit.",
        )
    yield from _widths(seen)
    yield from _accumulation(seen)


def _widths(seen: Watched) -> Iterator[Problem]:
    if str(seen.trainer.precision).startswith("64"):
        return
    wide = [name for name, p in seen.module.named_parameters() if p.dtype is torch.float64]
    if wide:
        yield Problem(
            "float64-parameters",
            f"In float64 are {listed(wide, dict(seen.module.named_parameters()))}. They need twice the memory, and most GPUs"
            " compute float64 at a small fraction of their speed.",
            "Convert them with .float().",
        )
    elif seen.wide:
        yield Problem(
            "float64-batch",
            f"The step reads {', '.join(sorted(seen.wide)[:5])} in float64. Such tensors need twice the memory, and most GPUs"
            " compute float64 at a small fraction of their speed.",
            "Convert samples in the data set with .float() or .astype('float32').",
        )


def _accumulation(seen: Watched) -> Iterator[Problem]:
    factor = seen.trainer.accumulate_grad_batches
    if factor < 2 or seen.device.type != "cuda" or not seen.steps:
        return
    norms = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in seen.module.modules())
    held = sum(p.numel() * p.element_size() * 2 for p in seen.module.parameters())
    peak = torch.cuda.max_memory_allocated(seen.device)
    most = torch.cuda.get_device_properties(seen.device).total_memory
    needed = held + (peak - held) * factor
    if norms or needed > 0.7 * most:
        return
    yield Problem(
        "needless-accumulation",
        f"accumulate_grad_batches={factor}, but the whole batch would need about {needed / 2**30:.3g} of"
        f" {most / 2**30:.3g} GiB.",
        f"Use batches that are {factor} times as large and accumulate_grad_batches=1.",
    )


_COSTS: tuple[Callable[[Watched], Iterator[Problem]], ...] = (
    _data,
    _validation,
    _twice,
    _metrics,
    _padding,
    _waits,
    _logging,
    _settings,
)
