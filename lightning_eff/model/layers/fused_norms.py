"""FusedNorms: LayerNorm and RMSNorm by one kernel forward and one backward (Ba et al. 2016; Zhang & Sennrich 2019).

The rule and its gradients stand in ``kernels.norm``, which computes them.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, cast

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.naming import check_met, check_names, meets
from lightning_eff._core._needs.needs import Need
from lightning_eff._core._stack.showing import Worn, put_on, take_off, worn_by
from lightning_eff._core.search_space import RunProfile, SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control, Technique
from lightning_eff.kernels import _launch
from lightning_eff.model.layers._fused_norms.finding import Kind, norms

WHO = "FusedNorms"


class Fused(Worn):
    """A norm that a kernel computes."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The kernel's result, of the input's dtype; a call with further arguments is the module's own."""
        assert isinstance(self, nn.Module)
        if args or kwargs or not x.numel():
            return self._plain.forward(self, x, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        kind: Kind = worn_by(cast(Any, self))
        return kind(self, x)


def _pointless(profile: RunProfile) -> str | None:
    if profile.accelerator != "cuda":
        return "the kernels run on CUDA, and elsewhere torch's own functions do"
    return None if profile.num_blocks >= 1 else "no repeated blocks were found, in which norms could take time"


class FusedNorms(Technique):
    """Compute LayerNorm and RMSNorm by the package's own kernels in training: one forward and one backward, in float32.

    RMSNorm as Hugging Face models have it is six operations, each of which reads and writes all of a hidden state; here it is
    one, which keeps the input and a number for each row for its backward pass. ``nn.LayerNorm`` and ``nn.RMSNorm`` are found
    by their class, others by what they compute on rows that are made up: ``(x / sqrt(mean(x^2) + eps)) g``, also with a gain
    of 1 + g as in Gemma, or LayerNorm. What computes something else is left; so are norms over several dimensions, and over
    rows of more than 8192 elements, which is said with the reason.

    The numbers are those of plain training up to rounding. The result is of the dtype of what a norm is given, and rounded to
    it once: under autocast, where torch's own LayerNorm returns float32, a bfloat16 input gives a bfloat16 output, which
    saves memory and is what the next product would make of it. Evaluation is the plain module's, and so are parameters and
    checkpoints. A backward pass cannot be differentiated again.

    **Whether it is faster has not been measured**: torch's fused kernels are good, and what there is to gain is in RMSNorm
    that is written in single operations, and in backward. Compare by ``bench``. **On a CPU** no Triton kernel runs: the same
    norms are then computed by ``torch.nn.functional.layer_norm`` and ``rms_norm``, which leaves nn.LayerNorm as it was to the
    bit.

    Logged: ``norms``, how many.

    Args:
        names: dotted paths of norms, their last parts or patterns, such as ``["layers.*.input_layernorm"]``; None takes all
            that are found, ``[]`` is plain training.

    Raises:
        ValueError: for other values; at setup, if no norm is found, with what there is, for a name that means none, with the
            nearest ones, and for a named one that no kernel computes, with the reason.
        ImportError: at setup, on CUDA without triton.

    Sources:
        Ba et al. 2016, arXiv:1607.06450; Zhang & Sennrich 2019, arXiv:1910.07467; Hsu et al. 2024, arXiv:2410.10989 (Liger).
    """

    saves: ClassVar[str] = "time and memory of norms that are written in single operations; not measured on a GPU"
    paper: ClassVar[str] = "Zhang & Sennrich 2019, arXiv:1910.07467; Hsu et al. 2024, arXiv:2410.10989"
    constraints: ClassVar[str] = "kernels on CUDA with triton, torch's functions elsewhere"
    needs: ClassVar[Need] = Need.LAYERS
    survey: ClassVar[Survey | None] = None
    search_space: ClassVar[SearchSpace | None] = SearchSpace({}, _pointless)
    control: ClassVar[Control] = Control("the baseline for as many seconds: the numbers are the same to rounding")
    conflicts: ClassVar[Mapping[str, str]] = {}
    needs_automatic_optimization: ClassVar[bool] = False
    sparse_gradients: ClassVar[bool] = True

    def __init__(self, names: Sequence[str] | None = None) -> None:
        self.names = check_names(names, who=WHO, what="norms", example="layers.*.input_layernorm")
        self._reset()

    def _reset(self) -> None:
        self._kinds: list[tuple[nn.Module, Kind]] = []
        self._count = 0

    @property
    @override
    def neutral(self) -> bool:
        return self.names == []

    @override
    def check(self, session: Session) -> None:
        if session.trainer.strategy.root_device.type == "cuda":
            _launch.triton_module("norm")

    @override
    def attach(self, session: Session) -> None:
        self._reset()

    @override
    def on_model(self, session: Session) -> None:
        if not session.fitting:
            return
        root = session.module
        every = norms(root)
        if self.names is not None and every:
            check_met(self.names, every, who=WHO, what="norms", root=type(root).__name__)
        left: dict[str, str] = {}
        for path, (m, kind) in every.items():
            named = self.names is not None and any(meets(path, name) for name in self.names)
            if self.names is not None and not named:
                continue
            if isinstance(kind, str) and named:
                raise ValueError(f"{WHO}: {path} ({type(m).__name__}) is left: {kind}. Leave it out of the names.")
            if isinstance(kind, str):
                left[path] = kind
            else:
                self._kinds.append((m, kind))
        if not self._kinds:
            reasons = "".join(f" {path}: {reason}." for path, reason in left.items())
            kinds = sorted({type(m).__name__ for m in root.modules() if "norm" in type(m).__name__.lower()})
            raise ValueError(
                f"{WHO}: {type(root).__name__} has no LayerNorm or RMSNorm to act on;{reasons} expected one at least. There are"
                f" norms of {', '.join(kinds) or 'no kind'}. Take the technique out."
            )
        self._count = len(self._kinds)
        session.views.append(self._view)
        if left:
            listed = "; ".join(f"{path} ({reason})" for path, reason in left.items())
            rank_zero_info(f"{WHO}: left as they are: {listed}")
        on = "Triton kernels" if session.trainer.strategy.root_device.type == "cuda" else "torch's own functions"
        rank_zero_info(f"{WHO}: {self._count} norms are computed by {on}.")

    @contextmanager
    def _view(self, training: bool) -> Iterator[None]:
        worn = [(m, kind) for m, kind in self._kinds if not isinstance(m, Worn)] if training else []
        for m, kind in worn:
            put_on(m, Fused, cast(Any, kind))
        try:
            yield
        finally:
            for m, _ in worn:
                take_off(m)

    @override
    def detach(self, session: Session) -> None:
        self._kinds = []

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"norms": self._count}

    @override
    def summary(self) -> str:
        return f"{self._count} norms by one kernel forward and one backward"
