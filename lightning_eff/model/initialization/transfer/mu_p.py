"""MuP: learning rates that were tuned on a narrow model suit a wide one (Yang et al. 2022, arXiv:2203.03466).

The rules are in ``_rules.py``.
"""

import functools
import importlib
import inspect
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core import rng
from lightning_eff._core._arguments.kinds import Kind
from lightning_eff._core._lightning.names import is_a, is_overridden
from lightning_eff._core._needs.needs import UNTRIED, Part, Reasons
from lightning_eff._core._optim.combined import CombinedOptimizer
from lightning_eff._core._optim.parameter_multipliers import hasten
from lightning_eff._core._optim.scheduled import schedulers_of
from lightning_eff._core.optimizers import rewrite_configured
from lightning_eff._core.search_space import RunProfile, SearchSpace
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.initialization._maps import SAME_WEIGHTS, listed
from lightning_eff.model.initialization._once import Initialization, Turn, trained
from lightning_eff.model.initialization.transfer._rules import (
    CLASSES,
    Role,
    Rule,
    own_scale,
    rate_factor,
    root_mean_square,
    rule_of,
    std_factor,
)
from lightning_eff.model.initialization.transfer._widths import roles_of

WHO = "MuP"
#: Techniques that replace, add or remove parameters.
CHANGE_PARAMETERS = (
    *("BitFit", "ButterflyLinear", "DOTAAttention", "EmbeddingShortcuts", "Fastformer", "Fixup"),
    *("GatedPositionalAttention", "HoulsbyAdapters", "LayerScale", "LinearHead", "Linformer", "LoRA", "LowRankConv"),
    *("LowRankLinear", "MultiTokenPrediction", "NgramEmbedding", "ParameterSharing", "PreNorm", "PrefixTuning"),
    *("PromptTuning", "QKNorm"),
    *("QuantizedBase", "RMSNormalization", "ReZero", "RemoveBias", "RemoveQKVBias", "ReversibleLayers", "SeqNorm"),
    *("SkipInit", "SparseUpcycling", "UShapedSkips", "ValueEmbeddings", "ValueResiduals", "VeRA", "VisualPromptTuning"),
)


@dataclass(frozen=True, repr=False)
class Base(Kind):
    """A module, a function that builds one, or a mapping with ``class_path`` and ``init_args``."""

    @property
    @override
    def expected(self) -> str:
        return "a module, a function that builds one, or a mapping with class_path and init_args"

    @override
    def __call__(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            if "class_path" not in value or set(value) - {"class_path", "init_args"}:
                raise ValueError
            return dict(value)
        if not isinstance(value, nn.Module) and not callable(value):
            raise ValueError
        return value


def _pointless(profile: RunProfile) -> str:
    return "it carries learning rates over from a narrower module, which only you can name"


def _of_nothing(cls: Any, values: Mapping[str, Any], profile: RunProfile) -> Any:
    return cls(nn.Identity, **values)


def _plain(technique: "MuP") -> Mapping[str, "MuP"]:
    return {} if technique.base is None else {"same learning rate": MuP(None)}


class MuP(Initialization):
    """Carry a learning rate that you tuned on a narrow model over to this wide one, by the maximal update parametrization.

    In the standard parametrization the best learning rate falls as the width grows. Here each parameter gets an initial
    size and a learning rate that follow from the ratio of its shape to the shape in ``base``, the narrow model. Then
    activations change equally much per step at any width, and the best learning rate stays about where it is. Tune the
    learning rate on the narrow model, write it into the config of the wide one, and add ``MuP(base=...)``. The narrow
    model needs no callback: with a base of the same widths, nothing changes.

    A parameter with r_in times the inputs and r_out times the outputs of the base's gets:

    - **input** (embeddings, biases, norms, first layers): the base's standard deviation and learning rate, and r_out times
      the rate under SGD;
    - **hidden**: ``r_in^(-1/2)`` times the standard deviation; ``1 / r_in`` times the learning rate under Adam and its
      kind, ``r_out / r_in`` times under SGD, and ``sqrt(r_out / r_in)`` times under Muon, whose own scale by shape is
      taken into account;
    - **output** (the head): ``1 / r_in`` times both.

    Weight decay is divided by the same factor as the learning rate is multiplied by, so their product stays. Schedules of
    the learning rate act as before. The forward pass does not change, so checkpoints load into the plain module.

    The base's standard deviations are measured on a fresh base model. Each wider weight is then multiplied by one number
    before the first step of a fresh fit, whatever its distribution. Parameters of the base's shape stay as they are.

    A forward pass on generated inputs shows how each parameter is used, whatever its name. A head that shares its weight
    with the embedding keeps the embedding's size, and the gain of the norm before it takes over the factor of the head. If
    attention heads are wider than the base's, scores must be divided by their width instead of its square root. Layers
    that compute only queries take this factor over. If queries, keys and values are one layer, such a base is refused.
    Choose a base with fewer heads of the same width instead.
    Only softmax attention is recognised.

    Use the same depth, batch size and number of steps for both models, because this callback transfers over width only. It
    has no rule for depth. It costs one pass, and a copy of the base at the start. Gradient clipping does not
    matter for Adam; under SGD it acts on the norm of all gradients, which changes with the width.

    Logged: ``tensors``, how many parameters are wider than the base's, and ``numbers``, how many numbers were rescaled.

    Args:
        base: the narrow model: a freshly built module, a function that builds one, such as ``partial(GPT, dim=48)``, or a
            mapping with ``class_path`` and ``init_args``, as in a config. None is plain training.
        rule: how updates grow with the gradient. "auto" follows the class of each optimizer. For other classes, give
            "adam" if the size of updates does not depend on the size of gradients. Give "sgd" if it is proportional to it,
            and "spectral" if updates have a spectral norm of one.
        attention: whether to correct the scores of wider attention heads, "scale", or to "keep" the module's.
        force: whether to also rescale weights that were loaded or trained before.

    Raises:
        ValueError: for a value of the wrong kind. At setup, for a base with other parameters, depth or vocabulary; for a
            base that was trained; for an optimizer that no rule fits; for a tied head without a norm before it; for wider
            attention heads with fused queries; or if the module was loaded and ``force`` is not set.

    Example:
        >>> base = {"class_path": "examples.gpt.module.GPT", "init_args": {"dim": 48, "num_heads": 3}}
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[MuP(base)])

    References:
        Yang et al. 2022, "Tensor Programs V: Tuning Large Neural Networks via Zero-Shot Hyperparameter Transfer",
        arXiv:2203.03466 (Table 3, and the authors' package for weight decay). Yang, Simon, Bernstein 2023, "A Spectral
        Condition for Feature Learning", arXiv:2310.17813. Dey et al. 2025, arXiv:2505.01618 (weight decay).
    """

    saves = "the search for the learning rate of a wide model: it is tuned on a narrow one"
    paper = "Yang et al. 2022, arXiv:2203.03466; Yang et al. 2023, arXiv:2310.17813"
    constraints = "a narrow model of the same depth; no sharding, tensor or pipeline parallelism"
    search_space = SearchSpace({}, _pointless, _of_nothing)
    control = Control("the same learning rate without MuP, which costs the same", _plain)
    turn: ClassVar[Turn] = Turn.MAPS
    neutral_at: ClassVar[Mapping[str, Any]] = {"base": None}
    refuses: ClassVar[Reasons] = {
        **Initialization.refuses,
        **dict.fromkeys((Part.SHARD, Part.TENSOR, Part.ITSELF, Part.PIPELINE), UNTRIED),
    }
    conflicts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("DataDrivenInit", "LSUV", "MetaInit", "OrthogonalInit", "RepOptimizer", "TFixup", "ZerO"), SAME_WEIGHTS
        ),
        **dict.fromkeys(
            CHANGE_PARAMETERS, "it changes which parameters the module has, and the base would have others"
        ),
        "SLAMB": "MuP has no rule for LAMB, whose updates follow the norms of weights",
    }

    def __init__(
        self,
        base: Annotated[Mapping[str, Any] | nn.Module | Callable[[], nn.Module], Base()] | None,
        *,
        rule: Literal["auto", "adam", "sgd", "spectral"] = "auto",
        attention: Literal["scale", "keep"] = "scale",
        force: bool = False,
    ) -> None:
        self.base, self.attention, self.force = base, attention, force
        self.rule: Rule | Literal["auto"] = rule

    def _reset(self) -> None:
        self._roles: dict[str, Role] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}  # the base's
        self._sizes: dict[str, float] = {}  # the root mean square that each parameter starts with
        self._factors: dict[str, float] = {}  # of the learning rates
        self._foreign = False  # whether the run resumes from a checkpoint that was saved without it

    # -- before the optimizers are built

    @override
    def on_model(self, session: Session) -> None:
        if not session.fitting:
            return
        base = built(self.base, session.seed)
        if source := trained(base):
            raise ValueError(
                f"{WHO}(base=...): {source}, and it must be freshly built. Give a function that builds it."
            )
        self._roles = roles_of(session.module, base, who=WHO, scores=self.attention == "scale")
        if self._foreign and self._roles:
            raise ValueError(
                f"{WHO}: the checkpoint was saved without it, so its optimizer state has other groups. Resume without {WHO}, or"
                " start a new fit from the checkpoint's weights."
            )
        narrow = dict(base.named_parameters())
        self._shapes = {name: tuple(narrow[name].shape) for name in self._roles}
        sizes = {name: root_mean_square(narrow[name]) * std_factor(role) for name, role in self._roles.items()}
        self._sizes = session.trainer.strategy.broadcast(sizes)
        super().on_model(session)
        if self._roles:
            self._wrap(session.module)
        else:
            rank_zero_info(f"{WHO}: all shapes are those of the base, so nothing changes.")

    def _wrap(self, module: LightningModule) -> None:
        original = module.configure_optimizers

        @functools.wraps(original)
        def configure_optimizers() -> Any:
            configured = original()
            schedulers = schedulers_of(configured)
            rewrite_configured(configured, lambda optimizer: self._multiplied(module, optimizer, schedulers))
            return configured

        configure_optimizers.__wrapped__ = inspect.unwrap(original)  # pyright: ignore[reportAttributeAccessIssue]
        self.session.patches.set(module, "configure_optimizers", configure_optimizers)

    def _multiplied(self, module: LightningModule, optimizer: Optimizer, schedulers: list[Any]) -> Optimizer:
        """Multiply the learning rates of an optimizer's wider parameters.

        Raises:
            ValueError: if no rule fits its class, or a group has no learning rate.
        """
        names = {id(p): name for name, p in module.named_parameters()}
        by_factor: dict[float, list[Tensor]] = {}
        for group in optimizer.param_groups:
            for p in group["params"]:
                name = names.get(id(p))
                if name in self._roles:
                    part = optimizer.part_of(p) if isinstance(optimizer, CombinedOptimizer) else optimizer
                    factor = self._factor(part, group, name, tuple(p.shape))
                    self._factors[name] = factor
                    by_factor.setdefault(factor, []).append(p)
        for factor, parameters in by_factor.items():
            if factor != 1.0:
                hasten(optimizer, schedulers, parameters, factor, keep_decay=True)
        return optimizer

    def _factor(self, optimizer: Optimizer, group: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> float:
        who, role = type(optimizer).__name__, self._roles[name]
        known = rule_of(optimizer, group)
        rule: Rule | None = known if self.rule == "auto" else self.rule
        if rule is None or group.get("lr") is None:
            every = ", ".join(cls for classes in CLASSES.values() for cls in classes)
            raise ValueError(
                f"{WHO}(rule={self.rule!r}): {who} trains {name}, and "
                + (
                    f"how its updates grow with the width is not known. Use one of {every}, or give rule='adam', 'sgd' or"
                    " 'spectral'."
                    if rule is None
                    else "it has no learning rate. Use an optimizer with a learning rate for each group."
                )
            )
        if rule == "spectral" and (role.inputs == (1, 1) or role.outputs == (1, 1)):
            raise ValueError(
                f"{WHO}(rule={self.rule!r}): {who} trains {name}, which is not the weight of a linear layer or convolution, and"
                " the spectral rule is for these only. Let AdamW train it, as ReplaceOptimizer('muon') does."
            )
        factor = rate_factor(role, rule)
        return factor / own_scale(group, role, shape, self._shapes[name]) if known == "spectral" else factor

    # -- the weights

    @override
    def check_checkpoint(self, session: Session, state: dict[str, Any] | None) -> None:
        self._foreign = state is None and session.fitting

    @override
    def initialize(self, session: Session, batch: Any, batch_idx: int) -> int | None:
        parameters = dict(session.module.named_parameters())
        numbers = 0
        for name, size in self._sizes.items():
            weight = parameters[name].detach()
            now = root_mean_square(weight)
            if now == size:
                continue
            if now == 0.0:
                raise ValueError(
                    f"{WHO}: {name} starts at zero, but its root mean square is {size:g} in the base. Build both models by the"
                    " same code."
                )
            weight.mul_(size / now)
            numbers += weight.numel()
        kinds = {
            kind: [n for n, role in self._roles.items() if role.kind == kind] for kind in ("input", "hidden", "output")
        }
        rank_zero_info(
            f"{WHO}: "
            + "; ".join(f"{len(names)} {kind}: {listed(names, 4)}" for kind, names in kinds.items() if names)
            + f"; learning rates times {', '.join(f'{f:.3g}' for f in sorted(set(self._factors.values())))}."
        )
        return numbers

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "tensors": len(self._roles)}

    @override
    def summary(self) -> str:
        if not self._roles:
            return "changed nothing, because all shapes are those of the base"
        changed = sum(factor != 1.0 for factor in self._factors.values())
        return f"rescaled {self._numbers:,} numbers, and the learning rates of {changed} of {len(self._roles)} wider tensors"


def built(base: Any, seed: int) -> nn.Module:
    """Return the base model, without a trace in the global random state.

    Args:
        base: a module, a function that builds one, or a mapping with ``class_path`` and ``init_args``.
        seed: determines the random weights of a base that is built here.

    Raises:
        ValueError: if there is no such class, or the result is not a module.
    """
    with rng.fork():
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        made = _instance(base) if isinstance(base, Mapping) else base
        if not isinstance(made, nn.Module) and callable(made):
            made = made()
        if not isinstance(made, nn.Module):
            raise ValueError(
                f"{WHO}(base=...): it builds a {type(made).__name__}; expected an nn.Module. Return the module."
            )
        if is_a(made, LightningModule) and is_overridden("configure_model", made):
            made.configure_model()  # pyright: ignore[reportCallIssue]
    return made


def _instance(value: Any) -> Any:
    """Build the objects that mappings with ``class_path`` describe, also within others."""
    if isinstance(value, Mapping) and "class_path" in value:
        home, _, name = str(value["class_path"]).rpartition(".")
        try:
            cls = getattr(importlib.import_module(home), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{WHO}(base={{'class_path': {value['class_path']!r}}}): no class is found there ({error}). Give the path of a"
                " class that can be imported, such as examples.gpt.module.GPT."
            ) from error
        return cls(**{key: _instance(one) for key, one in (value.get("init_args") or {}).items()})
    return value
