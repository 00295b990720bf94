"""SwapActivation: replace the activation functions of a module.

``_activations.functions`` holds their equations: GELU (Hendrycks & Gimpel 2016), SwiGLU (Shazeer 2020), ISRLU (Carlile et al.
2017), ELU (Clevert et al. 2015), SELU (Klambauer et al. 2017), squared ReLU (So et al. 2021).
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.naming import by_reason
from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._architecture.technique import Architecture, Change
from lightning_eff._core._arguments.kinds import Count, OneOf
from lightning_eff._core._resume.marks import device_of
from lightning_eff._core.search_space import Choice, SearchSpace, needs_matrices
from lightning_eff._core.technique import Control
from lightning_eff.model.layers._activations.finding import between, computes, is_activation, is_rectifier
from lightning_eff.model.layers._activations.functions import ELEMENTWISE, GATED, NAMES
from lightning_eff.model.layers._activations.gated import Activation, gating
from lightning_eff.model.layers._shared.arguments import Paths
from lightning_eff.model.layers._shared.choosing import ByName, select
from lightning_eff.model.layers._shared.fast_paths import REASON, read_in_evaluation

WHO = "SwapActivation"


class SwapActivation(ByName, Architecture):
    """Replace the activation functions of a module with another one.

    It replaces modules that are rectifier-like activations of torch or transformers: ReLU, GELU, SiLU and similar ones. It
    replaces tanh and sigmoid, which are usually gates, only if you name them. It skips activations that are this function
    already. Functions that ``forward`` calls, such as ``F.relu``, are not modules and cannot be replaced.

    ``to="swiglu"`` turns feed-forward networks ``W_b f(W_a x)`` into gated ones, ``W_3 (SiLU(W_1 x) * W_2 x)``, with two
    thirds of the width: as many weights and products as before, up to rounding of the widths. A pass on a made-up input shows
    the two linear layers around each activation, with dropout between them allowed. W_1 and W_2 form one layer with the name
    of W_a. All three are **initialised anew**, with the standard deviation of the weights that they replace and biases of
    zero, so what these layers had learned is lost. Networks that are gated already are skipped.

    Use it when you train from scratch. **It changes the model**: the new function takes as long as the old one, so compare it
    with the baseline for the same time. SwiGLU and squared ReLU lowered the loss of their authors' language models by some
    percent. ELU, SELU and ISRLU were designed for networks without norms. Checkpoints have a mark next to each function,
    ``lightning_eff_mark``, so that the plain module does not load them. Load them into ``lightning_eff.apply(plain,
    SwapActivation(...))``. ``export`` refuses. It logs ``swapped``, the number of activations.

    Args:
        to: the new activation function. "relu2" is squared ReLU, "gelu_tanh" the tanh approximation of GELU, "selu" has the
            paper's alpha and lambda, and "isrlu" has alpha 1.
        names: dotted paths of the activations to replace, their last parts, or patterns, such as ``["blocks.*.act"]``. None
            looks for activations, ``[]`` is plain training.
        multiple: the number that widths are a multiple of with "swiglu". 64 or more suits the matrix units of accelerators.

    Raises:
        ValueError: for a wrong value. At setup or in ``apply``, if there is no activation to replace, a name matches none, or
            a named one cannot be replaced.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[SwapActivation("swiglu", multiple=64)])

    References:
        Shazeer 2020, "GLU Variants Improve Transformer", arXiv:2002.05202.
        So et al. 2021, "Primer: Searching for Efficient Transformers for Language Modeling", arXiv:2109.08668.
        Hendrycks & Gimpel 2016, "Gaussian Error Linear Units (GELUs)", arXiv:1606.08415.
        Carlile et al. 2017, "Improving Deep Learning by Inverse Square Root Linear Units (ISRLUs)", arXiv:1710.09967.
        Clevert et al. 2015, "Fast and Accurate Deep Network Learning by Exponential Linear Units (ELUs)", arXiv:1511.07289.
        Klambauer et al. 2017, "Self-Normalizing Neural Networks", arXiv:1706.02515.
    """

    saves = "steps, if the model learns faster with another function; no time per step"
    paper = "Shazeer 2020, arXiv:2002.05202; So et al. 2021, arXiv:2109.08668"
    constraints = "activations that are modules; for swiglu, between two linear layers"
    search_space = SearchSpace({"to": Choice(("relu2", "swiglu"))}, needs_matrices)
    control = Control(
        "the baseline for the same time: the activations cost about the same, and swiglu has as many weights"
    )
    conflicts: ClassVar[Mapping[str, str]] = {}
    change_at = Change.SWAP
    stays = "it computes another function, which no weights of the plain module reproduce"
    _count = 0

    def __init__(
        self,
        to: Annotated[str, OneOf(*NAMES)],
        *,
        names: Paths = None,
        multiple: Annotated[int, Count()] = 8,
    ) -> None:
        self.to, self.multiple = to, multiple
        self._take_names(names)

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
                    " out of `names`."
                )
            self._check_any(root, bool(parts.activations), left)
            surgeon.swap(
                lambda path, m: id(m) in parts.activations or id(m) in parts.first or id(m) in parts.last,
                lambda m: Activation(self.to, where) if id(m) in parts.activations else parts.build(m),
                what="an activation between two linear layers",
            )
            self._count = len(parts.activations)
            told = f", with {parts.after:,} new weights instead of {parts.before:,} in the layers around them"
        else:
            self._check_any(root, bool(chosen), left)
            ids = {id(m) for m in chosen.values()}
            surgeon.swap(lambda path, m: id(m) in ids, lambda m: Activation(self.to, where), what="an activation")
            self._count, told = len(ids), ""
        surgeon.leave(left)
        rank_zero_info(f"{WHO}: replaced {self._count} activations with {self.to}{told}.")

    def _chosen(self, root: nn.Module) -> tuple[dict[str, nn.Module], dict[str, str]]:
        """The activations to replace, by path, and why others are left."""
        meant = is_rectifier if self.names is None else is_activation
        every = {path: m for path, m in root.named_modules() if path and meant(m)}
        read = read_in_evaluation(root)

        def unfit(path: str, m: nn.Module) -> str | None:
            if any(True for _ in m.parameters()):
                return "it has parameters, which would be lost"
            if self.to in ELEMENTWISE and computes(m, ELEMENTWISE[self.to]):
                return f"it is {self.to} already"
            return REASON if id(m) in read else None

        return select(every, self.names, unfit, who=WHO, what="activations", root=root)

    def _check_any(self, root: nn.Module, found: bool, left: Mapping[str, str]) -> None:
        if found:
            return
        kinds = sorted({type(m).__name__ for m in root.modules() if is_activation(m) and not is_rectifier(m)})
        unnamed = f" {', '.join(kinds)} must be named in `names`." if kinds else ""
        raise ValueError(
            f"{WHO}(to={self.to!r}): {type(root).__name__} has no activation module to act on.{by_reason(left)}{unnamed}"
            " Replace functions such as F.relu in forward by modules, such as self.act = nn.ReLU(), or remove the callback."
        )

    # -- reports

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"swapped": self._count}

    @override
    def summary(self) -> str:
        return f"{self._count} activations are {self.to}" if self._count else f"the module already had {self.to}"
