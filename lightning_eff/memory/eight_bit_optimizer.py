"""Optimizer states of one byte an element, in the place of the module's own (Dettmers et al. 2021, arXiv:2110.02861)."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core._needs.needs import Part, Reasons
from lightning_eff._core._optim.combined import CombinedOptimizer, Following, Origins, take_groups
from lightning_eff._core._optim.scheduled import optimizers_of, put_around, reference_rates, schedulers_of
from lightning_eff._core.optimizers import rewrite_configured
from lightning_eff._core.search_space import RunProfile, SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control, Technique
from lightning_eff.memory._eight_bit.equivalents import eight_bit, equivalent_of, four_bit, imported

WHO = "EightBitOptimizer"


def tables(module: nn.Module) -> set[int]:
    """The ids of embeddings' weights, also where one is tied to a head."""
    owners = (m for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    return {id(m.weight) for m in owners}  # and not what stands in it beside, such as prompts


def state_bytes(optimizer: Optimizer, parameters: list[Tensor]) -> tuple[int, int]:
    """Bytes and elements of the states that have an element for each one of a parameter.

    What is kept for blocks of elements (their scales, and the map of codes that all share) is left out.
    """
    size = elements = 0
    for p in parameters:
        for value in optimizer.state.get(p, {}).values():
            if isinstance(value, Tensor) and value.shape == p.shape and value.ndim > 0:
                codes = getattr(value, "codes", value)  # torchao packs two of 4 bits into a byte
                size += codes.numel() * codes.element_size()
                elements += value.numel()
    return size, elements


def _pointless(profile: RunProfile) -> str | None:
    if not profile.optimizer_states:
        return "the optimizer keeps no tensors for parameters"
    return None if profile.memory_bound else "memory limits neither batch nor model, and states of 8 bits are no faster"


class EightBitOptimizer(Technique):
    """Keep the states of the module's optimizer in 8 bits an element, a quarter of their memory.

    bitsandbytes' optimizer of the same rule takes the place of the module's: states lie in blocks of 256 elements, each with
    its own scale, as codes of a map that is dense near zero. It is made from the module's own groups, with their rates, betas
    and decay; schedulers of any kind go on. Embeddings, whose gradients are sparse and uneven, and tensors of fewer than
    ``min_size`` elements, which hold next to nothing, stay with the module's own optimizer, in 32 bits; both step as one.
    ``LAMB``'s steps are scaled by the norms as its paper has it, which bitsandbytes' own class leaves out.

    What has an equivalent: torch.optim's Adam (without decay), AdamW, SGD with momentum, RMSprop and Adagrad, and Lion and
    LAMB of this package. With ``bits=4``, torchao's Adam and AdamW, which compile a step for each size of tensor as they are
    first used. All else is refused at setup, with this list.

    Logged: ``state_bytes`` and ``saved_bytes`` (what 32 bits would take, less that), of the states of few bits.

    Args:
        bits: 8, or 4 where torchao is installed; 32 is plain training.
        min_size: elements of a tensor, >= 1, from which on its states have few bits. torchao has its own limit of 4096.

    Raises:
        ValueError: for other values; at setup, for an optimizer, or settings of it, that has no equivalent, and where no
            tensor is large enough.
        ImportError: at setup, where bitsandbytes (``bits=8``) or torchao (``bits=4``) is not installed.

    Sources:
        Dettmers et al. 2021, arXiv:2110.02861; Li et al. 2023, arXiv:2309.01507 (4 bits).
    """

    saves: ClassVar[str] = "three quarters of the optimizer's memory (7 eighths with bits=4)"
    paper: ClassVar[str] = "Dettmers et al. 2021, arXiv:2110.02861"
    constraints: ClassVar[str] = "optimizers that have an equivalent; needs bitsandbytes"
    refuses: ClassVar[Reasons] = {
        Part.PIPELINE: "each process sorts its own weights into 8 and 32 bits, so a checkpoint's groups are no other process's"
    }
    survey: ClassVar[Survey | None] = Survey("low-precision weights and states", zhuang="3", shen="4.2.1")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(pointless=_pointless)
    control: ClassVar[Control] = Control(
        "the baseline: the same training with states of 32 bits, at the batch it has room for"
    )
    needs_automatic_optimization: ClassVar[bool] = False
    conflicts: ClassVar[Mapping[str, str]] = {
        "ReplaceOptimizer": "both put another optimizer in the place of the module's",
        "OptimizerOffload": "it moves one optimizer of torch.optim's own to the host, and here two step as one",
        "StochasticRoundingBF16": "it makes each step of one of torch.optim's own optimizers, and here two step as one",
    }

    def __init__(self, bits: Literal[8, 4, 32] = 8, *, min_size: int = 4096) -> None:
        if bits not in (8, 4, 32) or isinstance(bits, bool):
            raise ValueError(f"{WHO}({bits=}): expected 8, 4, or 32 for plain training.")
        if isinstance(min_size, bool) or not isinstance(min_size, int) or min_size < 1:
            raise ValueError(f"{WHO}({min_size=}): expected an integer >= 1, a number of elements.")
        if bits == 4 and min_size < 4096:
            raise ValueError(f"{WHO}(bits=4, {min_size=}): expected >= 4096, below which torchao keeps 32 bits.")
        self.bits: Literal[8, 4, 32] = bits
        self.min_size = min_size
        self._reset()

    def _reset(self) -> None:
        self._small: list[Optimizer] = []  # those whose states have few bits
        self._told: dict[str, int] = {}
        self._names: list[str] = []

    @property
    @override
    def neutral(self) -> bool:
        return self.bits == 32

    @override
    def check(self, session: Session) -> None:
        package = "bitsandbytes" if self.bits == 8 else "torchao"
        imported(package, package, f"{WHO}(bits={self.bits})")

    @override
    def check_checkpoint(self, session: Session, state: dict[str, Any] | None) -> None:
        if session.fitting and state is None:
            raise ValueError(
                f"{WHO}: the checkpoint was saved without it, so its optimizer's state is of other groups and of 32 bits;"
                f" expected a checkpoint of a run with the same settings. Resume without {WHO}, or start anew from the"
                " checkpoint's weights alone."
            )

    @override
    def attach(self, session: Session) -> None:
        self._reset()
        configure = session.module.configure_optimizers

        def configure_optimizers() -> Any:
            configured = configure()
            schedulers = schedulers_of(configured)
            if not optimizers_of(configured):
                raise ValueError(
                    f"{WHO}: {type(session.module).__name__}.configure_optimizers returned no optimizer; expected one or more."
                )
            rewritten = rewrite_configured(configured, lambda own: self._replaced(session.module, own, schedulers))
            if not self._small:
                largest = max(p.numel() for o in optimizers_of(configured) for g in o.param_groups for p in g["params"])
                raise ValueError(
                    f"{WHO}(min_size={self.min_size}): the optimizers of {type(session.module).__name__} hold no tensor of at"
                    f" least as many elements outside its embeddings (the largest of all has {largest}); expected one. Lower"
                    " min_size, or take the technique out."
                )
            return rewritten

        session.patches.set(session.module, "configure_optimizers", configure_optimizers)

    def _replaced(self, module: nn.Module, own: Optimizer, schedulers: list[Any]) -> Optimizer:
        """``own`` and the one of few bits as one optimizer, ``own``'s schedulers around it."""
        found = equivalent_of(own, self.bits)
        around = [one for one in schedulers if getattr(one, "optimizer", None) is own]
        kept, references, origins = tables(module), reference_rates(own, around), Origins(own)
        stay, go = _divided(own.param_groups, lambda p: id(p) in kept or p.numel() < self.min_size)
        if not go:
            return own
        groups = [group for _, group in go]
        other = eight_bit(found, groups, min_size=self.min_size) if self.bits == 8 else four_bit(found, groups)
        for made, group in zip(other.param_groups, groups, strict=True):  # schedulers look for what the module's have
            made.update({k: v for k, v in group.items() if k not in made})
        parts: list[Optimizer] = [other]
        if stay:
            take_groups(own, [group for _, group in stay])
            parts.insert(0, own)
        following = [
            Following(at, 1.0 if references[at] is not None else None, references[at], settings=True)
            for at, _ in [*(stay if stay else []), *go]
        ]
        combined = CombinedOptimizer(parts, origins, following)
        put_around(combined, own, around)
        if around:
            combined.follow()
        self._small.append(other)
        self._names.append(type(other).__name__)
        tensors = [p for group in groups for p in group["params"]]
        rank_zero_info(
            f"{WHO}: {type(other).__name__} has {len(tensors)} tensors ({sum(p.numel() for p in tensors):,} weights) of"
            f" {type(own).__name__}'s; {sum(len(group['params']) for _, group in stay)} stay with it, in 32 bits."
        )
        return combined

    # -- what is told

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        if not self._told:
            self._told = self._count()

    def _count(self) -> dict[str, int]:
        held = [(o, [p for group in o.param_groups for p in group["params"]]) for o in self._small]
        counts = [state_bytes(optimizer, parameters) for optimizer, parameters in held]
        size, elements = (sum(values) for values in zip(*counts, strict=True)) if counts else (0, 0)
        return {"state_bytes": size, "saved_bytes": 4 * elements - size} if elements else {}

    @override
    def detach(self, session: Session) -> None:
        self._told = self._told or self._count()
        self._small = []

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return dict(self._told)

    @override
    def summary(self) -> str:
        if not self._told:
            return "no step was made"
        mib = [self._told[name] / 2**20 for name in ("state_bytes", "saved_bytes")]
        return f"{' and '.join(self._names)}: states of {mib[0]:,.2f} MiB, {mib[1]:,.2f} less than in 32 bits"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self.neutral else {"bits": self.bits}


def _divided(groups: list[dict[str, Any]], stays: Any) -> tuple[list[tuple[int, dict[str, Any]]], ...]:
    """Each group's two parts with its index: what stays, and what goes; parts without a parameter are left out."""
    found: tuple[list[tuple[int, dict[str, Any]]], ...] = ([], [])
    for at, group in enumerate(groups):
        for part, side in enumerate((True, False)):
            chosen = [i for i, p in enumerate(group["params"]) if stays(p) is side]
            if chosen:
                share = {**group, "params": [group["params"][i] for i in chosen]}
                if "param_names" in group:
                    share["param_names"] = [group["param_names"][i] for i in chosen]
                for name in ("lr", "initial_lr", "max_lr", "min_lr"):
                    if isinstance(share.get(name), Tensor) and side is False:
                        share[name] = float(share[name])
                found[part].append((at, share))
    return found
