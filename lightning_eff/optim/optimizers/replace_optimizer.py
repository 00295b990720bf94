"""Another optimizer in the place of the module's, for the parameters that it suits, and rates by kind of parameter.

What a matrix optimizer needs in an unchanged module: Muon for hidden matrices beside AdamW for all else (Jordan et al. 2024),
as one optimizer under plain automatic optimization.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core._needs.needs import Need
from lightning_eff._core._optim.combined import CombinedOptimizer, Following, Origins, set_rate, take_groups
from lightning_eff._core._optim.scheduled import optimizers_of, put_around, reference_rates, schedulers_of
from lightning_eff._core.optimizers import evaluates_anew, rewrite_configured
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control, Technique
from lightning_eff.optim.optimizers._matrices import hidden_matrices
from lightning_eff.optim.optimizers._replacing.assignment import Share, check_not_taken, group_of, shares
from lightning_eff.optim.optimizers._replacing.kinds import kinds_of
from lightning_eff.optim.optimizers._replacing.making import made, making
from lightning_eff.optim.optimizers._replacing.modes import Modes

if TYPE_CHECKING:
    Given = Callable[[Any], Optimizer] | Mapping[str, Any] | str
else:  # the command line makes such a function of a class path and its arguments, and says what is wrong with these
    Given = Callable[[Any], Optimizer]


def combine(
    own: Optimizer,
    schedulers: list[Any],
    parts: list[Share],
    make: Callable[[list[dict[str, Any]]], Optimizer] | None,
    lr: float | None,
) -> CombinedOptimizer:
    """One optimizer of the module's own and another; ``schedulers`` are put around it.

    Args:
        own: the module's; it keeps the groups that stay with it, and is left out where none does.
        schedulers: of ``own``, as ``configure_optimizers`` made them.
        parts: the fate of all its parameters, those that stay first.
        make: makes the other optimizer from groups; None where no parameter is replaced.
        lr: its rate; None for that it is made with.

    Raises:
        ValueError: for a group whose rate is to be in proportion to a rate of zero.
    """
    references = reference_rates(own, schedulers)
    origins = Origins(own)
    stay, go = [p for p in parts if not p.replaced], [p for p in parts if p.replaced]
    groups = [group_of(part, own.param_groups[part.origin]) for part in stay]
    following: list[Following] = []
    for part, group in zip(stay, groups, strict=True):
        ratio = 1.0 if part.rate is None else _ratio(part.rate, references[part.origin], part, bool(schedulers))
        for name in ("lr", "initial_lr", "max_lr", "min_lr"):
            if part.rate is not None and isinstance(group.get(name), int | float | Tensor):
                group[name] = group[name] * ratio if ratio is not None else part.rate
        full = part.rate if part.rate is not None else references[part.origin]
        following.append(Following(part.origin, ratio, full, settings=True))
    optimizers: list[Optimizer] = []
    if stay:
        take_groups(own, groups)
        optimizers.append(own)
    if make is not None and go:
        rates = [part.rate if part.rate is not None else lr for part in go]
        asked = [
            {"params": list(p.parameters)} | ({} if r is None else {"lr": r}) for p, r in zip(go, rates, strict=True)
        ]
        other = make(asked)
        home = {id(p): part for part in go for p in part.parameters}
        for group in other.param_groups:
            part = home[id(group["params"][0])]
            if part.rate is not None and group.get("lr") is not None:
                set_rate(group, part.rate)
            if part.exempt and "weight_decay" in group:
                group["weight_decay"] = 0.0
            rate = None if group.get("lr") is None else float(group["lr"])
            ratio = None if rate is None else _ratio(rate, references[part.origin], part, bool(schedulers))
            if rate is not None and schedulers:
                group["initial_lr"] = rate
            following.append(Following(part.origin, ratio, rate, settings=False))
        optimizers.append(other)
    combined = CombinedOptimizer(optimizers, origins, following, home=own)
    put_around(combined, own, schedulers)
    if schedulers:
        combined.follow()
    return combined


def _ratio(rate: float, reference: float | None, part: Share, scheduled: bool) -> float | None:
    if reference:
        return rate / reference
    if not scheduled:
        return None
    raise ValueError(
        f"ReplaceOptimizer: the module's optimizer has {', '.join(part.names[:3])} in a group of rate {reference}, to which"
        f" {rate:g} is in no proportion, and a scheduler moves it; expected a rate above zero there."
    )


def _pointless(profile: RunProfile) -> str | None:
    return None if profile.num_matrices else "there is no hidden matrix, which the other optimizer would step"


def _search(cls: Any, values: Mapping[str, Any], profile: RunProfile) -> Any:
    rest = {name: value for name, value in values.items() if name != "optimizer"}
    if values["optimizer"] == "SOAP":
        rest = {"lr": rest["lr"] / 2, "betas": [rest["momentum"], 0.95], "weight_decay": rest["weight_decay"]}
    return cls({"class_path": f"lightning_eff.{values['optimizer']}", "init_args": rest})


def _same_rates(technique: Any) -> Mapping[str, Technique]:
    if technique.optimizer is None or not technique.group_lr:
        return {}
    return {"rates": ReplaceOptimizer(group_lr=technique.group_lr)}


class ReplaceOptimizer(Technique):
    """Step chosen parameters with another optimizer; the module's own keeps the rest, its groups and its decay settings.

    Both step as one ``torch.optim.Optimizer``, so that automatic optimization, clipping, accumulation, gradient scalers,
    ``lr_find``, ``LearningRateMonitor`` and checkpoints go on as they are. The module's schedulers, of whatever kind, stay what
    they are and act on the groups that the module made; after each of their steps every group of the optimizer gets its own
    rate times what the schedule has made of the module's (of a cycle: of its highest rate). The same holds for a learning rate
    that the module, or another callback, writes into ``param_groups`` by hand, as in a warm-up in ``optimizer_step``.
    Parameters that the module had in different groups stay apart, so that a list of functions holds for each; groups that the
    module does not decay, where it decays others, are not decayed by the other optimizer either. Its momentum is its own:
    where a scheduler cycles momenta, that holds for what stays.

    An optimizer that has ``train()`` and ``eval()``, as schedule-free ones have, evaluates at other weights than it trains at:
    both are called around validation, and at the end of fit. Checkpoints' ``state_dict`` holds the weights of ``eval()``.

    What went where is printed as training begins. An optimizer with an attribute ``u``, such as :class:`Muon` with settings
    that are functions of it, is told the run's progress before each step.

    A run resumes under the same settings; without this callback the checkpoint's weights can be loaded, and not the state
    of its optimizer.

    Args:
        optimizer: the other optimizer, as a class (``Muon``), a name ("muon"; of this package or ``torch.optim``), a class
            path ("schedulefree.AdamWScheduleFree"), or a function of parameters. In YAML it is a class path with
            ``init_args``; that mapping works in Python too. None keeps the module's optimizer, for ``group_lr`` alone.
        parameters: "matrices" for the hidden matrices of any module (linear maps and convolutions of blocks; never embeddings,
            heads, positions), "all", or a list of patterns of parameter names, as in ``["blocks.*.weight"]``, and of kinds
            as in ``group_lr``.
        lr: the rate of the other optimizer, >= 0, before the module's schedule; None for that it is made with.
        group_lr: rates, >= 0, by kind of parameter ("embedding", "head", "vector", "matrix" or "other") or by pattern of names,
            whichever optimizer has them; the first that matches counts.
        **settings: for the other optimizer, such as ``weight_decay=0.1``.

    Example:
        >>> ReplaceOptimizer("muon", lr=0.02, weight_decay=0.1)
        ReplaceOptimizer(optimizer='muon', lr=0.02, weight_decay=0.1)

    Raises:
        ValueError: for other values; at setup, for a module without a hidden matrix, with several optimizers or none, or with
            manual optimization; for an optimizer that does not take such groups or evaluates the loss anew; for a pattern or
            a kind that matches nothing.
        TypeError: if ``optimizer`` is made already, or makes none; for ``settings`` without an optimizer.

    Sources:
        Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; Wen et al. 2025, arXiv:2509.02046, for
        the control.
    """

    saves: ClassVar[str] = "steps: another update rule for the parameters it suits, a rate for each kind of parameter"
    paper: ClassVar[str] = "Jordan et al. 2024, Muon; Wen et al. 2025, arXiv:2509.02046"
    constraints: ClassVar[str] = "one optimizer, which needs gradients alone; automatic optimization"
    needs: ClassVar[Need] = Need.BATCH
    survey: ClassVar[Survey | None] = Survey("optimizers", zhuang="2.1", shen="5.2")
    # SOAP's best rate was 0.3 to 0.8 of Muon's on the four reference tasks where both were searched: it is given half of "lr"
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {
            "optimizer": Choice(("Muon", "SOAP"), each=True),
            "lr": Uniform(0.005, 0.1, log=True),
            "momentum": Choice((0.8, 0.9, 0.95)),
            "weight_decay": Choice((0.0, 0.05, 0.15)),
        },
        _pointless,
        make=_search,
    )
    control: ClassVar[Control] = Control(
        "the module's own optimizer with the same rates by group, and the baseline with its rate tuned as long",
        _same_rates,
    )
    sparse_gradients: ClassVar[bool] = True
    conflicts: ClassVar[Mapping[str, str]] = {
        "OptimizerOffload": "it moves one optimizer of torch.optim's own to the host, and here two step as one",
        "StochasticRoundingBF16": "it makes each step of one of torch.optim's own optimizers, and here two step as one",
    }

    def __init__(
        self,
        optimizer: Given | None = None,
        parameters: str | Sequence[str] = "matrices",
        lr: float | None = None,
        *,
        group_lr: Mapping[str, float] | None = None,
        **settings: Any,
    ) -> None:
        if optimizer is None and settings:
            raise TypeError(
                f"ReplaceOptimizer({next(iter(settings))}=...): there is no optimizer to give it to. Name one, such as"
                " ReplaceOptimizer('muon', lr=0.02)."
            )
        self._make = None if optimizer is None else making(optimizer, settings)
        if isinstance(parameters, str) and parameters not in ("matrices", "all"):
            raise ValueError(
                f"ReplaceOptimizer({parameters=}): expected 'matrices', 'all', or a list of patterns: [{parameters!r}]."
            )
        patterns = [] if isinstance(parameters, str) else list(parameters)
        if not isinstance(parameters, str) and not (patterns and all(isinstance(p, str) and p for p in patterns)):
            raise ValueError(
                f"ReplaceOptimizer({parameters=}): expected patterns of parameter names, such as ['blocks.*.weight']."
            )
        if optimizer is None and (lr is not None or parameters != "matrices"):
            raise ValueError(
                "ReplaceOptimizer(optimizer=None): lr and parameters are of the other optimizer, and there is none; give one,"
                " or rates by group_lr= alone."
            )
        rates = {"lr": lr} if lr is not None else {}
        for name, rate in {**rates, **(group_lr or {})}.items():
            if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < math.inf:
                where = f"group_lr={{{name!r}: {rate!r}}}" if name in (group_lr or {}) else f"{lr=}"
                raise ValueError(f"ReplaceOptimizer({where}): expected a finite rate >= 0.")
        self.optimizer = optimizer
        self.parameters: str | Sequence[str] = parameters
        self.lr = lr
        self.group_lr = dict(group_lr or {})
        self._reset()

    def _reset(self) -> None:
        self._combined: CombinedOptimizer | None = None
        self._parts: list[Optimizer] = []  # the module's and the other one, the latter last
        self._replacing = ("", list[str]())  # the class of the module's optimizer, and those of its schedulers
        self._last: dict[str, float | int] = {}
        self._who = ""
        self._modes: Modes | None = None
        self._trained: dict[str, Tensor] | None = None  # a checkpoint's, of an optimizer that evaluates at others

    @property
    @override
    def neutral(self) -> bool:
        return self.optimizer is None and not self.group_lr

    @override
    def check_checkpoint(self, session: Session, state: dict[str, Any] | None) -> None:
        if session.fitting and state is None:
            raise ValueError(
                "ReplaceOptimizer: the checkpoint was saved without it, so its optimizer's state is of other groups; expected a"
                " checkpoint of a run with the same settings. Resume without ReplaceOptimizer, or start anew from the"
                " checkpoint's weights alone."
            )

    @override
    def attach(self, session: Session) -> None:
        self._reset()
        configure = session.module.configure_optimizers

        def configure_optimizers() -> Any:
            configured = configure()
            found = optimizers_of(configured)
            if len(found) != 1:
                raise ValueError(
                    f"ReplaceOptimizer: {type(session.module).__name__}.configure_optimizers returned"
                    f" {len(found) or 'no'} optimizers{'' if not found else f' ({[type(o).__name__ for o in found]})'};"
                    " expected one, a part of whose parameters it replaces. Let one optimizer have all parameters, in groups."
                )
            return rewrite_configured(configured, lambda own: self._replaced(session, own, schedulers_of(configured)))

        session.patches.set(session.module, "configure_optimizers", configure_optimizers)

    def _replaced(self, session: Session, own: Optimizer, schedulers: list[Any]) -> Optimizer:
        module, make = session.module, self._make
        parts = shares(module, own, self.parameters if make is not None else None, self.group_lr)
        name = type(own).__name__
        if evaluates_anew(own) and not all(part.replaced for part in parts):
            raise ValueError(
                f"ReplaceOptimizer: the module's {name}, with which {sum(len(p.names) for p in parts if not p.replaced)}"
                " parameters stay, evaluates the loss anew within its step, which two optimizers that step as one cannot do;"
                " expected one that needs gradients alone, such as AdamW. Return one, or replace parameters='all'."
            )
        self._combined = combine(
            own, schedulers, parts, None if make is None else (lambda groups: made(make, groups, module)), self.lr
        )
        self._parts = list(self._combined.parts)
        self._replacing = name, [type(s).__name__ for s in schedulers]
        self._who = type(self._parts[-1]).__name__
        return self._combined

    @override
    def on_optimizers(self, session: Session) -> None:
        assert self._combined is not None
        check_not_taken(session.module, self._combined, self._parts, self.parameters, self.group_lr)
        rank_zero_info(_told(*self._replacing, self._combined, session.module, self._parts[:-1]))
        self._tell(session)
        self._modes = Modes(session, self._parts[-1:] if self.optimizer is not None else [])
        if self._trained is not None:
            self._modes.put(self._trained)
            self._trained = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self._modes:
            self._modes.train()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_start(trainer, pl_module)
        if self._modes:
            self._modes.evaluate()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if self._modes:
            self._modes.train()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        if self._modes:
            self._modes.evaluate()

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        self._tell(session)

    def _tell(self, session: Session) -> None:
        for part in self._combined.parts if self._combined is not None else ():
            if hasattr(part, "u"):
                part.u = session.progress.u  # pyright: ignore[reportAttributeAccessIssue]

    @override
    def detach(self, session: Session) -> None:
        self._last = self._quantities()
        self._combined, self._parts, self._modes = None, [], None

    def _quantities(self) -> dict[str, float | int]:
        if self._combined is None:
            return self._last
        owners = self._parts if self.optimizer is None else self._parts[-1:]
        groups = [group for owner in owners for group in owner.param_groups]
        tensors = [p for group in groups for p in group["params"]]
        rates = [float(group["lr"]) for group in groups if group.get("lr") is not None]
        return {"tensors": len(tensors), "weights": sum(p.numel() for p in tensors), "rate": max(rates, default=0.0)}

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return dict(self._quantities())

    @override
    def summary(self) -> str:
        found = self._quantities()
        if not found:
            return "no optimizer was made"
        what = "at rates by group" if self.optimizer is None else f"by {self._who}"
        return f"{found['tensors']} tensors ({found['weights']:,} weights) stepped {what}"

    @override
    def state_dict(self) -> dict[str, Any]:
        if self.neutral:
            return {}
        return {"optimizer": self._who, **({"trained": self._modes.weights()} if self._modes else {})}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._trained = state_dict.get("trained") if self._session is not None and self._session.fitting else None


def _told(
    own: str, schedulers: list[str], combined: CombinedOptimizer, module: nn.Module, left: Sequence[Optimizer]
) -> str:
    """What went where, a line for each group, and the matrices that stay with the module's optimizer."""
    names = {id(p): name for name, p in module.named_parameters()}
    lines = ["ReplaceOptimizer:"]
    of = {id(group): part for part in combined.parts for group in part.param_groups}
    total = sum(p.numel() for group in combined.param_groups for p in group["params"])
    for group, how in zip(combined.param_groups, combined.following, strict=True):
        who = type(of[id(group)]).__name__
        who += f" ({group['algorithm']})" if isinstance(group.get("algorithm"), str) else ""
        held = group["params"]
        origin = combined.origins.param_groups[how.origin]
        full = group.get("initial_lr", group.get("lr"))
        rate = "no learning rate" if full is None else f"learning rate {float(full):g}"
        was = (
            f" ({own} had {float(origin.get('initial_lr', origin['lr'])):g})"
            if not how.settings or how.ratio != 1
            else ""
        )
        matrices, weights = sum(p.ndim > 1 for p in held), sum(p.numel() for p in held)
        lines.append(
            f"  {who}, {rate}{was}{f' under {schedulers[0]}' if schedulers else ''}: {len(held)} tensors"
            f" ({matrices} matrices), {weights:,} weights, {weights / max(total, 1):.1%} of the parameters:"
            f" {_listed([names.get(id(p), '?') for p in held])}"
        )
    kinds = kinds_of(module, hidden_matrices(module)) if left else {}
    by_kind: dict[str, list[str]] = {}
    for p in (p for part in left for group in part.param_groups for p in group["params"] if p.ndim > 1):
        name = names.get(id(p), "?")
        by_kind.setdefault(kinds.get(name, "other"), []).append(name)
    lines += [f"  {own} keeps these matrices ({kind}): {_listed(found)}" for kind, found in by_kind.items()]
    return "\n".join(lines)


def _listed(names: Sequence[str], most: int = 12) -> str:
    """The names; those that differ in numbers alone stand once, with how many there are."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(".".join("*" if part.isdecimal() else part for part in name.split(".")), []).append(name)
    found = [f"{pattern} ({len(each)})" if len(each) > 1 else each[0] for pattern, each in alike.items()]
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")
