"""Optimizer state under the names of the plain module's parameters, so that it does not depend on the layout.

A rank's optimizer steps the parameters that the rank holds. The plain optimizer's numbering is recorded when the optimizer is
built on the whole module. Files use that numbering.

``torch.distributed.checkpoint.state_dict`` uses names too. But it first steps an optimizer without state with zero gradients
(torch 2.13), so a checkpoint before the first step differs from the plain optimizer's. Its groups also lack parameters of
other pipeline stages.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_eff._core._optim.combined import EXTRA, CombinedOptimizer
from lightning_eff.strategies._hybrid.saving.gathering import Described, Gathering
from lightning_eff.strategies._hybrid.shards import shard_like

Options = dict[str, Any]


class NamedOptimizer:
    """An optimizer with the names and the plain numbering of its parameters.

    Attributes:
        groups: names in each parameter group in the plain order, including those of other ranks.
        held: the parameters that this rank steps, by name.

    Args:
        optimizer: the optimizer, built on the whole module, which can contain placeholders.
        names: names by the id of each parameter that the module showed.
        held: names of this rank's parameters; all others are removed from the optimizer.
        who: name of the caller in messages.

    Raises:
        ValueError: if a parameter does not belong to the module, or the optimizer has been stepped.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str], held: set[str], *, who: str) -> None:
        self.optimizer, self._names = optimizer, names
        self.groups: list[list[str]] = []
        self._told_names: dict[int, list[str]] = {}
        for index, group in enumerate(optimizer.param_groups):
            unknown = [tuple(p.shape) for p in group["params"] if id(p) not in names]
            if unknown:
                raise ValueError(
                    f"{who}: group {index} of {type(optimizer).__name__} has parameters of shapes {unknown} that do not belong"
                    " to the LightningModule, or that were taken from it before it was divided. In configure_optimizers, build"
                    " the optimizer from self.parameters() or self.named_parameters()."
                )
            self.groups.append([names[id(p)] for p in group["params"]])
            keep = [names[id(p)] in held for p in group["params"]]
            group["params"] = [p for p, kept in zip(group["params"], keep, strict=True) if kept]
            if "param_names" in group:  # torch sets these if the optimizer was given named parameters
                self._told_names[index] = list(group["param_names"])
                group["param_names"] = [n for n, kept in zip(group["param_names"], keep, strict=True) if kept]
        by_id = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for p in [p for p in optimizer.state if id(p) not in by_id]:
            del optimizer.state[p]
        self.held: dict[str, nn.Parameter] = {}
        for group, all_names in zip(optimizer.param_groups, self.groups, strict=True):
            kept = (name for name in all_names if name in held)
            self.held.update(zip(kept, group["params"], strict=True))

    def take_added(self, gathering: Gathering) -> None:
        """Record the names in groups that hooks have added, including those of other stages; collective if there are any."""
        for group in self.optimizer.param_groups[len(self.groups) :]:
            mine = {name: p for p in group["params"] if (name := self._names.get(id(p))) is not None}
            self.held.update(mine)
            self.groups.append([*gathering.merged(dict.fromkeys(mine))])

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the state of this rank's parameters by name; collective if ranks own the state of others' pieces."""
        shown: dict[Tensor, dict[str, Any]] = {}
        show = getattr(self.optimizer, "show_state", None)  # of optimizers that divide matrices over ranks
        if show is not None:
            show(shown)
        held = {name: p for name, p in self.held.items() if p in self.optimizer.state}
        return {name: dict(shown[p] if p in shown else self.optimizer.state[p]) for name, p in held.items()}

    def options(self) -> list[Options]:
        """Return each group's options, with the names of its parameters under "params"."""
        found = [
            {
                **{k: v for k, v in group.items() if k != "params"},
                **({"param_names": self._told_names[i]} if i in self._told_names else {}),
                "params": list(names),
            }
            for i, (group, names) in enumerate(zip(self.optimizer.param_groups, self.groups, strict=True))
        ]
        if isinstance(self.optimizer, CombinedOptimizer):
            found[0][EXTRA] = self.optimizer.extra_state()
        return found

    def set_options(self, saved: list[Options], *, who: str) -> None:
        """Load the options of saved groups.

        Raises:
            ValueError: if the groups have other sizes.
        """
        sizes, now = [len(group["params"]) for group in saved], [len(names) for names in self.groups]
        if len(sizes) > len(now) and sizes[: len(now)] == now:
            raise ValueError(
                f"{who}: the checkpoint's {type(self.optimizer).__name__} has {len(sizes) - len(now)} more parameter group(s)"
                " than configure_optimizers creates. A hook added them during that run, and they are not added again on resume."
                " Create all groups in configure_optimizers, with a learning rate of 0 at first, or load only the weights."
            )
        if sizes != now:
            raise ValueError(
                f"{who}: the checkpoint's {type(self.optimizer).__name__} has groups of {sizes} parameters and this run's"
                f" has {now}. Resume with the configure_optimizers that the checkpoint was saved with."
            )
        for group, old in zip(self.optimizer.param_groups, saved, strict=True):
            group.update({k: v for k, v in old.items() if k not in ("params", "param_names", EXTRA)})
            if EXTRA in old and isinstance(self.optimizer, CombinedOptimizer):
                self.optimizer.set_extra_state(old[EXTRA][0])

    def set_state(self, get: Callable[[str], Mapping[str, Any] | None], device: torch.device) -> None:
        """Load state; ``get(name)`` returns a parameter's saved state, as whole tensors or this rank's DTensors."""
        on_device = {
            id(p)
            for group in self.optimizer.param_groups
            if group.get("capturable") or group.get("fused")
            for p in group["params"]
        }
        for name, p in self.held.items():
            saved = get(name)
            self.optimizer.state.pop(p, None)
            if saved is not None:
                count_on = device if id(p) in on_device else torch.device("cpu")
                self.optimizer.state[p] = {
                    key: _placed(key, value, p, device, count_on) if isinstance(value, Tensor) else value
                    for key, value in saved.items()
                }

    # -- the plain optimizer's state, in one piece on rank 0

    def consolidate(self, gathering: Gathering) -> dict[str, Any]:
        """Return the ``state_dict`` of the plain module's optimizer on rank 0, and {} elsewhere; collective."""
        self.take_added(gathering)
        mine = self.state()
        told = gathering.merged(
            {name: {k: _told(v) for k, v in state.items()} for name, state in mine.items() if gathering.owned(name)}
        )
        result: dict[int, dict[str, Any]] = {}
        numbers = {name: i for i, name in enumerate(name for names in self.groups for name in names)}
        first = torch.distributed.get_rank() == 0
        for name, number in numbers.items():
            if name not in told:
                continue
            state: dict[str, Any] = {}
            for key, what in told[name].items():
                if isinstance(what, Described):
                    held = mine[name][key] if gathering.owned(name) else None
                    state[key] = gathering.on_first(name, held, what)
                else:
                    state[key] = what
            if first:
                result[number] = state
        if not first:
            return {}
        groups = [{**options, "params": [numbers[name] for name in options["params"]]} for options in self.options()]
        return {"state": result, "param_groups": groups}

    def load_plain(self, saved: Mapping[str, Any], device: torch.device, *, who: str) -> None:
        """Load the ``state_dict`` of an optimizer on the plain module.

        Raises:
            ValueError: if its groups differ from this one's.
        """
        self.set_options(saved["param_groups"], who=who)
        ids = (number for group in saved["param_groups"] for number in group["params"])
        numbers = dict(zip((name for names in self.groups for name in names), ids, strict=True))
        self.set_state(lambda name: saved["state"].get(numbers[name]), device)


def _told(value: Any) -> Any:
    """Return the description of a value for other stages: a tensor's shape and dtype, or the value of a single number."""
    if isinstance(value, Tensor) and (hasattr(value, "device_mesh") or value.numel() > 1):
        return Described.of(value)
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _placed(key: str, value: Tensor, p: nn.Parameter, device: torch.device, count_on: torch.device) -> Tensor:
    if hasattr(value, "device_mesh"):
        return value
    if key == "step":  # torch's optimizers keep counts in host memory, unless they step in one kernel
        return value.to(count_on, copy=True)
    return shard_like(value, p, device)


def named(
    optimizers: Iterable[Optimizer], shown: Mapping[int, str], held: set[str], *, who: str
) -> list[NamedOptimizer]:
    """Return a :class:`NamedOptimizer` for each optimizer."""
    return [NamedOptimizer(optimizer, shown, held, who=who) for optimizer in optimizers]


@contextmanager
def whole_groups(optimizers: Iterable[NamedOptimizer], shown: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Let the optimizers' groups list all parameters of the plain module, ``shown`` by name, until the context ends."""
    groups = [pair for o in optimizers for pair in zip(o.optimizer.param_groups, o.groups, strict=True)]
    before = [group["params"] for group, _ in groups]
    try:
        for group, names in groups:
            group["params"] = [shown[name] for name in names]
        yield
    finally:
        for (group, _), params in zip(groups, before, strict=True):
            group["params"] = params


def steps_apart(optimizers: Iterable[Optimizer]) -> None:
    """Step parameters one by one in groups that have several meshes, or plain and divided parameters.

    torch's ``foreach`` does not support such a mixture. Groups in which the user set ``foreach`` or ``fused`` do not change.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            meshes = {str(getattr(p, "device_mesh", None)) for p in group["params"]}
            if len(meshes) > 1 and group.get("foreach", True) is None and not group.get("fused"):
                group["foreach"] = False
