"""``self.log`` in a pipeline: values are recorded per micro-batch, exchanged between ranks, and logged once on each rank."""

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torchmetrics import Metric


@dataclass
class Record:
    """The options and the values per micro-batch of one logged name."""

    options: dict[str, Any]
    values: list[Any] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    weights: list[float] | None = None

    def value(self) -> Tensor:
        """Reduce the values of all micro-batches by ``reduce_fx``: mean, sum, maximum or minimum."""
        stacked = torch.stack([torch.as_tensor(v).detach().to(torch.float64).reshape(()).cpu() for v in self.values])
        reduce_fx = self.options.get("reduce_fx", "mean")
        name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
        if name in ("sum", "max", "min"):
            return {"sum": torch.sum, "max": torch.max, "min": torch.min}[name](stacked)
        if name in ("mean", "avg"):
            if self.weights is not None:
                return stacked @ torch.tensor(self.weights, dtype=torch.float64)
            if self.sizes and len(self.sizes) == len(self.values) and sum(self.sizes) > 0:
                weights = torch.tensor(self.sizes, dtype=torch.float64)
                return (stacked * weights).sum() / weights.sum()
            return stacked.mean()
        return torch.as_tensor(cast("Any", reduce_fx)(stacked)).to(torch.float64)


class Recorder:
    """Records the values that a pass logs.

    Args:
        module: the LightningModule. A module without ``log`` records nothing.
        who: name of the caller in messages.
    """

    def __init__(self, module: nn.Module, *, who: str) -> None:
        self.module, self.who = module, who
        self.records: dict[str, Record] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Replace the module's ``self.log`` until the context ends."""
        if not hasattr(self.module, "log"):
            yield
            return
        namespace = self.module.__dict__
        had, before = "log" in namespace, namespace.get("log")
        namespace["log"] = self._log
        try:
            yield
        finally:
            if had:
                namespace["log"] = before
            else:
                namespace.pop("log", None)

    def _log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        names = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist")
        names += ("sync_dist_group", "add_dataloader_idx", "batch_size", "metric_attribute", "rank_zero_only")
        options |= dict(zip(names, args, strict=False))
        if isinstance(value, dict):
            raise ValueError(
                f"{self.who}: self.log({name!r}, ...) got a dict; expected a number, a tensor of one element or a Metric."
                " Use self.log_dict."
            )
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(
                f"{self.who}: self.log({name!r}, ...) got a tensor of shape {tuple(value.shape)}; expected one element."
                " Log its mean or its sum."
            )
        record = self.records.setdefault(name, Record(options))
        record.options = options
        if options.get("batch_size") is not None:
            record.sizes.append(int(options["batch_size"]))
        if isinstance(value, Tensor):
            value = value.detach().clone()  # the user can change it in place later
        record.values = [value] if isinstance(value, Metric) else [*record.values, value]

    def take(self) -> dict[str, Record]:
        """Return and clear the recorded values."""
        taken, self.records = self.records, {}
        return taken


class Recorders:
    """The recorders of a rank's stages; the code outside the blocks logs on each stage."""

    def __init__(self, module: nn.Module, stages: list[int], *, who: str) -> None:
        self._of = {stage: Recorder(module, who=who) for stage in stages}

    def recorded(self, stage: int) -> AbstractContextManager[None]:
        """Record the values of ``stage`` until the context ends."""
        return self._of[stage].recorded()

    def take(self) -> dict[str, Record]:
        """Return the values of the last stage here, plus names that only other stages logged."""
        taken: dict[str, Record] = {}
        for stage in sorted(self._of, reverse=True):
            for name, record in self._of[stage].take().items():
                taken.setdefault(name, record)
        return taken


def fetched(records: Mapping[str, Record], losses: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Copy the logged numbers and the losses to the host at once, since each copy waits for the device.

    Returns:
        The losses.
    """
    logged = [(r, i) for r in records.values() for i, v in enumerate(r.values) if isinstance(v, Tensor)]
    here = [*(r.values[i] for r, i in logged), *losses.values()]
    if not here:
        return {}
    device = next((t.device for t in here if t.device.type != "cpu"), here[0].device)
    there = torch.stack([t.detach().reshape(()).to(device, torch.float64) for t in here]).cpu().unbind()
    for (record, i), value in zip(logged, there, strict=False):
        record.values[i] = value
    return dict(zip(losses, there[len(logged) :], strict=True))


class Agreement:
    """Exchanges logged values between ranks, and the names whenever they change.

    In most passes the names do not change, and one sum over the ranks sends all values and the loss. The last stage's rank
    logs everything outside the blocks. Other ranks add only names that it did not log.

    Args:
        module: the LightningModule.
        group: the pipeline ranks.
        source: group rank of the last stage.
        device: device for collectives.
    """

    def __init__(self, module: nn.Module, group: ProcessGroup, source: int, device: torch.device) -> None:
        self.module, self.group, self.source, self.device = module, group, source, device
        self._agreed: dict[str, list[tuple[str, int, dict[str, Any], str | None]]] = {}
        self._own: dict[str, str] = {}

    def share(self, kind: str, records: dict[str, Record], extra: list[float]) -> tuple[list[float], list[Any]]:
        """Exchange the records of one pass.

        Args:
            kind: kind of pass, each with its own names.
            records: this rank's records.
            extra: further numbers to sum over the ranks.

        Returns:
            The sums of ``extra``, and ``(name, value, options)`` of all values to log, the same on every rank.
        """
        own = json.dumps([(n, repr(sorted(r.options.items())), self._metric(r)) for n, r in records.items()])
        changed = self._agreed.get(kind) is None or self._own.get(kind) != own
        sums, values = self._sum(kind, records, extra, changed)
        if sums[0] > 0:
            self._own[kind] = own
            self._agree(kind, records)
            sums, values = self._sum(kind, records, extra, False)
        logged = []
        for (name, _, options, metric), (value, size) in zip(self._agreed[kind], values, strict=True):
            options = dict(options)
            if options.get("batch_size") is not None:
                options["batch_size"] = round(size)
            logged.append((name, value if metric is None else self.module.get_submodule(metric), options))
        return sums[1:], logged

    def _metric(self, record: Record) -> str | None:
        """Return the path of a logged Metric in the module, or None for a number."""
        value = record.values[-1]
        if not isinstance(value, Metric):
            return None
        for path, found in self.module.named_modules(remove_duplicate=False):
            if found is value:
                return path
        raise ValueError(
            f"HybridParallelStrategy: self.log got a {type(value).__name__} that is not an attribute of the module, so other"
            " pipeline ranks cannot find it. Make it an attribute of the LightningModule, or log its value."
        )

    def _agree(self, kind: str, records: dict[str, Record]) -> None:
        mine = [(n, dict(r.options), self._metric(r)) for n, r in records.items()]
        theirs: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(theirs, mine, group=self.group)
        agreed: dict[str, tuple[str, int, dict[str, Any], str | None]] = {}
        for rank in (self.source, *range(len(theirs))):
            for name, options, metric in theirs[rank]:
                agreed.setdefault(name, (name, rank, options, metric))
        self._agreed[kind] = list(agreed.values())

    def _sum(
        self, kind: str, records: dict[str, Record], extra: list[float], changed: bool
    ) -> tuple[list[float], list[tuple[Tensor, float]]]:
        me = dist.get_rank(self.group)
        numbers = [float(changed), *extra]
        for name, rank, _, metric in [] if changed else self._agreed.get(kind, []):
            mine = rank == me and metric is None and name in records
            numbers += [float(records[name].value()), float(sum(records[name].sizes))] if mine else [0.0, 0.0]
        sent = 1 + len(extra) + 2 * len(self._agreed.get(kind, []))
        packed = torch.tensor(numbers + [0.0] * (sent - len(numbers)), dtype=torch.float64, device=self.device)
        dist.all_reduce(packed, group=self.group)
        flat = packed.tolist()
        head = 1 + len(extra)
        values = [(torch.tensor(flat[i], device=self.device), flat[i + 1]) for i in range(head, len(flat), 2)]
        return flat[:head], values


def replay(module: nn.Module, logged: list[Any]) -> None:
    """Log the exchanged values on this rank with the module's ``log``."""
    for name, value, options in logged:
        cast("Any", module).log(name, value, **options)
