"""SwapActivation: another activation function in the place of those that a module has.

The functions stand under their equations in ``_activations.functions``: GELU (Hendrycks & Gimpel 2016), SwiGLU (Shazeer 2020),
ISRLU (Carlile et al. 2017), ELU (Clevert et al. 2015), SELU (Klambauer et al. 2017), squared ReLU (So et al. 2021).
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.naming import check_met, check_names, meets
from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._architecture.technique import Architecture, Change
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey
from lightning_eff._core.technique import Control
from lightning_eff.model.layers._activations.finding import between, computes, is_activation, is_rectifier
from lightning_eff.model.layers._activations.functions import ELEMENTWISE, GATED, NAMES
from lightning_eff.model.layers._activations.gated import Activation, gating
from lightning_eff.model.layers._fast_paths import REASON, read_in_evaluation
from lightning_eff.model.layers._marks import device_of

WHO = "SwapActivation"


def _pointless(profile: RunProfile) -> str | None:
    return None if profile.num_matrices else "there is no hidden linear map between which an activation could stand"


class SwapActivation(Architecture):
    """Put one activation function in the place of those that a module has.

    Found are modules that are activations of torch or of transformers and of the rectifiers' kind: ReLU, GELU, SiLU and the
    like; tanh and sigmoids, which are mostly gates, only where they are named. Those that are this function already are left.
    What ``forward`` calls as a function, such as ``F.relu``, is no module and cannot be exchanged from outside.

    ``to="swiglu"`` makes gated networks of feed-forward ones, ``W_3 (SiLU(W_1 x) * W_2 x)`` of ``W_b f(W_a x)``, with two
    thirds of the width: as many weights and products as before, to the rounding of widths. The two maps around each
    activation are told by a pass over an input that is made up, dropout between them allowed; W_1 and W_2 lie in one map,
    in W_a's place and under its name. All three are **drawn anew**, as far spread as what they replace, with biases of
    zero: nothing is kept of what those layers had learnt. Networks that are gated already are left.

    **Another model**: these compute other functions, in no less time. Hold it against the baseline for as many seconds;
    SwiGLU and squared ReLU gained some percent of loss in their authors' language models, ELU, SELU and ISRLU were made for
    networks without norms. Checkpoints have a mark beside each function, ``lightning_eff_mark``, so that the plain module
    does not load them; they load into ``lightning_eff.apply(plain, SwapActivation(...))``, and ``export`` refuses.

    Logged: ``swapped``, how many activations.

    Args:
        to: "relu", "relu2" (its square), "gelu", "gelu_tanh" (its approximation), "silu", "elu", "selu" (alpha and lambda
            of the source), "isrlu" (alpha 1) or "swiglu".
        names: dotted paths of activations, their last parts or patterns, such as ``["blocks.*.act"]``; None looks for them,
            ``[]`` is plain training.
        multiple: of "swiglu", what widths are multiples of, >= 1: 64 and more suit matrix units of accelerators.

    Raises:
        ValueError: for other values; at setup or in ``apply``, where no activation is left to act on, with the reason for each;
            for a name that means none, with the nearest ones, and for a named one that cannot be replaced, with the reason.

    Sources:
        Hendrycks & Gimpel 2016, arXiv:1606.08415; Shazeer 2020, arXiv:2002.05202; Carlile et al. 2017, arXiv:1710.09967;
        Clevert et al. 2015, arXiv:1511.07289; Klambauer et al. 2017, arXiv:1706.02515; So et al. 2021, arXiv:2109.08668.
    """

    saves: ClassVar[str] = "steps, where a model learns more with another function; no time of a step"
    paper: ClassVar[str] = "Shazeer 2020, arXiv:2002.05202; So et al. 2021, arXiv:2109.08668"
    constraints: ClassVar[str] = "activations that are modules; for swiglu, between two linear maps"
    survey: ClassVar[Survey | None] = Survey("activation functions (ELU, SELU, GELU, ISRLU, SwiGLU)", shen="4.1")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"to": Choice(("relu2", "swiglu"))}, _pointless)
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds: the activations cost about the same, and swiglu has as many weights"
    )
    conflicts: ClassVar[Mapping[str, str]] = {}
    change_at: ClassVar[Change] = Change.SWAP
    stays: ClassVar[str] = "it computes another function, which no weights of the plain module make up for"
    _count = 0

    def __init__(self, to: str, *, names: Sequence[str] | None = None, multiple: int = 8) -> None:
        if to not in NAMES:
            raise ValueError(f"{WHO}({to=}): expected one of {', '.join(map(repr, NAMES))}.")
        if not isinstance(multiple, int) or isinstance(multiple, bool) or multiple < 1:
            raise ValueError(f"{WHO}({multiple=}): expected an integer >= 1, of which widths are multiples.")
        self.to, self.multiple = to, multiple
        self.names = check_names(names, who=WHO, what="activations", example="blocks.*.act")

    @property
    @override
    def neutral(self) -> bool:
        return self.names == []

    # -- the change

    @override
    def change(self, surgeon: Surgeon) -> None:
        root = surgeon.root
        chosen, left = self._chosen(root)
        where = device_of(root)
        if self.to in GATED and chosen:
            seen = between(root, chosen, who=WHO, batch=surgeon.batch)
            parts = gating(root, chosen, seen, self.multiple)
            left |= parts.left
            if self.names is not None and parts.left:
                path, reason = next(iter(parts.left.items()))
                raise ValueError(
                    f"{WHO}(to={self.to!r}): {path} ({type(chosen[path]).__name__}) cannot be replaced: {reason}. Leave it"
                    " out of the names."
                )
            self._check_any(root, bool(parts.activations), left)
            surgeon.swap(
                lambda path, m: id(m) in parts.activations or id(m) in parts.first or id(m) in parts.last,
                lambda m: Activation(self.to, where) if id(m) in parts.activations else parts.build(m),
                what="an activation between two linear maps",
            )
            self._count = len(parts.activations)
            told = f", with {parts.after:,} weights drawn anew for {parts.before:,} in the maps around them"
        else:
            self._check_any(root, bool(chosen), left)
            ids = {id(m) for m in chosen.values()}
            surgeon.swap(lambda path, m: id(m) in ids, lambda m: Activation(self.to, where), what="an activation")
            self._count, told = len(ids), ""
        surgeon.leave(left)
        rank_zero_info(f"{WHO}: {self._count} activations are {self.to}{told}.")

    def _chosen(self, root: nn.Module) -> tuple[dict[str, nn.Module], dict[str, str]]:
        """The activations that are meant, by path, and why others stay."""
        every = {path: m for path, m in root.named_modules() if path and is_activation(m)}
        if self.names is not None:
            check_met(self.names, every, who=WHO, what="activations", root=type(root).__name__)
        read = read_in_evaluation(root)
        chosen: dict[str, nn.Module] = {}
        left: dict[str, str] = {}
        for path, m in every.items():
            named = self.names is not None and any(meets(path, name) for name in self.names)
            if not named and (self.names is not None or not is_rectifier(m)):
                continue
            reason = REASON if id(m) in read else ""
            if any(True for _ in m.parameters()):
                reason = "it has parameters, which would be lost"
            elif self.to in ELEMENTWISE and computes(m, ELEMENTWISE[self.to]):
                reason = f"it is {self.to} already"
            if reason and named:
                raise ValueError(
                    f"{WHO}(to={self.to!r}): {path} ({type(m).__name__}) cannot be replaced: {reason}. Leave it"
                    " out of the names."
                )
            if reason:
                left[path] = reason
            else:
                chosen[path] = m
        return chosen, left

    def _check_any(self, root: nn.Module, found: bool, left: Mapping[str, str]) -> None:
        if found:
            return
        reasons = "; ".join(f"{path}: {reason}" for path, reason in left.items())
        kinds = sorted({type(m).__name__ for m in root.modules() if is_activation(m)})
        raise ValueError(
            f"{WHO}(to={self.to!r}): {type(root).__name__} has no activation module to act on. "
            + (f"Left as they are: {reasons}. " if left else "")
            + (f"It has modules of {', '.join(kinds)}. " if kinds else "")
            + "Functions that forward calls, such as F.relu, cannot be exchanged from outside: make them modules, such as"
            " self.act = nn.ReLU(), or name other modules by names=[...]."
        )

    # -- what is told

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"swapped": self._count}

    @override
    def summary(self) -> str:
        return f"{self._count} activations are {self.to}" if self._count else f"the module was {self.to} already"
