"""Replace the module's optimizer for some parameters, and set learning rates by kind of parameter.

A matrix optimizer needs this in an unchanged module: Muon for hidden matrices and AdamW for the rest (Jordan et al. 2024), as
one optimizer under plain automatic optimization.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Either, Names, Number, OneOf
from lightning_eff._core._arguments.objects import Table
from lightning_eff._core._needs.needs import Need
from lightning_eff._core._optim.combined import CombinedOptimizer, Following, Origins, set_rate, take_groups
from lightning_eff._core._optim.scheduled import optimizers_of, put_around, reference_rates, schedulers_of
from lightning_eff._core.optimizers import evaluates_anew, rewrite_configured
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Uniform, needs_matrices
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control, Technique
from lightning_eff.optim.optimizers._replacing.assignment import Share, check_not_taken, group_of, shares
from lightning_eff.optim.optimizers._replacing.making import made, making
from lightning_eff.optim.optimizers._replacing.modes import Modes
from lightning_eff.optim.optimizers._replacing.printing import assignment_text

if TYPE_CHECKING:
    Given = Callable[[Any], Optimizer] | Mapping[str, Any] | str
else:  # the command line makes such a function from a class path and its arguments, and reports errors in them
    Given = Callable[[Any], Optimizer]


def combine(
    own: Optimizer,
    schedulers: list[Any],
    parts: list[Share],
    make: Callable[[list[dict[str, Any]]], Optimizer] | None,
    lr: float | None,
) -> CombinedOptimizer:
    """Combine the module's optimizer and another one; ``schedulers`` then act on the combination.

    Args:
        own: the module's optimizer. It keeps the groups that stay, and is left out if none does.
        schedulers: of ``own``, as ``configure_optimizers`` made them.
        parts: all of its parameters, with those that stay first.
        make: makes the other optimizer from groups; None if no parameter is replaced.
        lr: its learning rate; None keeps the one that it is made with.

    Raises:
        ValueError: for a group whose learning rate would be proportional to a learning rate of zero.
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
        f"ReplaceOptimizer: the module's optimizer has {', '.join(part.names[:3])} in a group with learning rate {reference},"
        f" so a scheduler cannot scale {rate:g} in proportion. Use a learning rate above zero there."
    )


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
    """Train some parameters with another optimizer, such as Muon; the module's own optimizer keeps the rest.

    Both step as one ``torch.optim.Optimizer``, so automatic optimization, clipping, accumulation, gradient scalers,
    ``lr_find``, ``LearningRateMonitor`` and checkpoints work as before. The module's schedulers stay and act on the groups
    that the module made. After each scheduler step, every group's learning rate is scaled in proportion to the module's (for
    a cycle, in proportion to its highest). The same holds for a learning rate that the module or another callback writes
    into ``param_groups``, as in a warm-up in ``optimizer_step``. Parameters from different groups stay in different groups.
    Groups that the module does not decay, while it decays others, are not decayed by the other optimizer either. The other
    optimizer has its own momentum: a scheduler that cycles momentum acts only on the parameters that stay.

    An optimizer with ``train()`` and ``eval()``, such as a schedule-free one, is switched around validation and at the end
    of fit. The checkpoint's ``state_dict`` holds the weights of ``eval()``. An optimizer with an attribute ``u``, such as
    :class:`Muon` with settings that are functions of it, gets the run's progress before each step. The assignment is printed
    when training begins.

    A run resumes under the same settings. Without this callback, the checkpoint's weights can be loaded, but not the state of
    its optimizer.

    Args:
        optimizer: the other optimizer: a class (``Muon``), a name ("muon"; of this package or ``torch.optim``), a class path
            ("schedulefree.AdamWScheduleFree"), or a function of parameters. In YAML it is a class path with ``init_args``;
            that mapping works in Python too. None keeps the module's optimizer, for ``group_lr`` alone.
        parameters: the parameters that it trains: "matrices" for the hidden matrices (weights of linear layers and
            convolutions, without embeddings, heads and positions), "all", or a list of name patterns such as
            ``["blocks.*.weight"]``, or of kinds as in ``group_lr``.
        lr: the learning rate of the other optimizer, before the module's schedule; None keeps its default.
        group_lr: learning rates by kind of parameter ("embedding", "head", "vector", "matrix" or "other") or by name pattern,
            for both optimizers. The first match counts.
        **settings: keyword arguments of the other optimizer, such as ``weight_decay=0.1``.

    Raises:
        ValueError: for a value out of range. At setup, for a module without a hidden matrix, with several optimizers or none,
            or with manual optimization; for an optimizer that does not take such groups or evaluates the loss again; or for a
            pattern or a kind that matches nothing.
        TypeError: if ``optimizer`` is an instance or does not make an optimizer, and for ``settings`` without an optimizer.

    Example:
        >>> ReplaceOptimizer("muon", lr=0.02, weight_decay=0.1)
        ReplaceOptimizer(optimizer='muon', lr=0.02, weight_decay=0.1)
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[ReplaceOptimizer(Muon, lr=0.02)])

    References:
        Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks". Wen et al. 2025, arXiv:2509.02046, for
        the control.
    """

    saves: ClassVar[str] = (
        "steps: an update rule that suits the parameters, and a learning rate for each kind of parameter"
    )
    paper: ClassVar[str] = "Jordan et al. 2024, Muon; Wen et al. 2025, arXiv:2509.02046"
    constraints: ClassVar[str] = "needs automatic optimization and one optimizer without a closure"
    needs: ClassVar[Need] = Need.BATCH
    # SOAP's best rate was 0.3 to 0.8 of Muon's on the four reference tasks where both were searched: it is given half of "lr"
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {
            "optimizer": Choice(("Muon", "SOAP"), each=True),
            "lr": Uniform(0.005, 0.1, log=True),
            "momentum": Choice((0.8, 0.9, 0.95)),
            "weight_decay": Choice((0.0, 0.05, 0.15)),
        },
        needs_matrices,
        make=_search,
    )
    control: ClassVar[Control] = Control(
        "the module's own optimizer with the same learning rates by group, and the baseline with an equally tuned one",
        _same_rates,
    )
    sparse_gradients: ClassVar[bool] = True
    conflicts: ClassVar[Mapping[str, str]] = {
        "OptimizerOffload": "OptimizerOffload handles a single optimizer of torch.optim, and this combines two",
        "StochasticRoundingBF16": "the plugin handles a single optimizer of torch.optim, and this combines two",
    }

    def __init__(
        self,
        optimizer: Given | None = None,
        parameters: Annotated[
            str | Sequence[str],
            Either(OneOf("matrices", "all"), Names("name patterns", empty=False), hint="Example: ['blocks.*.weight']."),
        ] = "matrices",
        lr: Annotated[float, Number(at_least=0)] | None = None,
        *,
        group_lr: Annotated[Mapping[str, float], Table("name patterns", Number(at_least=0))] | None = None,
        **settings: Any,
    ) -> None:
        if optimizer is None and settings:
            raise TypeError(
                f"ReplaceOptimizer({next(iter(settings))}=...): this is a setting of an optimizer, and none is named. Name one,"
                " as in ReplaceOptimizer('muon', lr=0.02)."
            )
        self._make = None if optimizer is None else making(optimizer, settings)
        if optimizer is None and (lr is not None or parameters != "matrices"):
            raise ValueError(
                "ReplaceOptimizer(optimizer=None): lr and parameters are for another optimizer, and none is named. Name one, or"
                " give only group_lr=."
            )
        self.optimizer = optimizer
        self.parameters: str | Sequence[str] = parameters
        self.lr = lr
        self.group_lr = dict(group_lr or {})

    def _reset(self) -> None:
        self._combined: CombinedOptimizer | None = None
        self._parts: list[Optimizer] = []  # the module's, and then the other one
        self._replacing = ("", list[str]())  # the class names of the module's optimizer and of its schedulers
        self._last: dict[str, float | int] = {}
        self._who = ""
        self._modes: Modes | None = None
        self._trained: dict[str, Tensor] | None = None  # the checkpoint's, if the optimizer evaluates at other weights

    @property
    @override
    def neutral(self) -> bool:
        return self.optimizer is None and not self.group_lr

    @override
    def check_checkpoint(self, session: Session, state: dict[str, Any] | None) -> None:
        if session.fitting and state is None:
            raise ValueError(
                "ReplaceOptimizer: the checkpoint was saved without it, so its optimizer state has other groups. Resume without"
                " ReplaceOptimizer, or start a new fit from the checkpoint's weights."
            )

    @override
    def attach(self, session: Session) -> None:
        configure = session.module.configure_optimizers

        def configure_optimizers() -> Any:
            configured = configure()
            found = optimizers_of(configured)
            if len(found) != 1:
                raise ValueError(
                    f"ReplaceOptimizer: {type(session.module).__name__}.configure_optimizers returned"
                    f" {len(found) or 'no'} optimizers{'' if not found else f' ({[type(o).__name__ for o in found]})'}."
                    " Return one optimizer with all parameters, in groups if needed."
                )
            return rewrite_configured(configured, lambda own: self._replaced(session, own, schedulers_of(configured)))

        session.patches.set(session.module, "configure_optimizers", configure_optimizers)

    def _replaced(self, session: Session, own: Optimizer, schedulers: list[Any]) -> Optimizer:
        module, make = session.module, self._make
        parts = shares(module, own, self.parameters if make is not None else None, self.group_lr)
        name = type(own).__name__
        if evaluates_anew(own) and not all(part.replaced for part in parts):
            raise ValueError(
                f"ReplaceOptimizer: the module's {name} keeps {sum(len(p.names) for p in parts if not p.replaced)} parameters"
                " and"
                " evaluates the loss again within its step, which a combined optimizer cannot do. Return one that only needs"
                " gradients, such as AdamW, or set parameters='all'."
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
        rank_zero_info(assignment_text(*self._replacing, self._combined, session.module, self._parts[:-1]))
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
        what = "with learning rates by group" if self.optimizer is None else f"by {self._who}"
        return f"{found['tensors']} tensors ({found['weights']:,} weights) trained {what}"

    @override
    def state_dict(self) -> dict[str, Any]:
        if self.neutral:
            return {}
        return {"optimizer": self._who, **({"trained": self._modes.weights()} if self._modes else {})}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._trained = state_dict.get("trained") if self._session is not None and self._session.fitting else None
