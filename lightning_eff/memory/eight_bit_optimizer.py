"""Optimizer states of one byte per element for the module's own optimizer (Dettmers et al. 2021, arXiv:2110.02861)."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Alias, Count
from lightning_eff._core._needs.needs import Part, Reasons
from lightning_eff._core._optim.combined import CombinedOptimizer, Following, Origins, group_of, take_groups
from lightning_eff._core._optim.scheduled import optimizers_of, put_around, reference_rates, schedulers_of
from lightning_eff._core.optimizers import rewrite_configured
from lightning_eff._core.search_space import RunProfile, SearchSpace
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control, Technique
from lightning_eff.memory._eight_bit.equivalents import eight_bit, equivalent_of, four_bit, imported

WHO = "EightBitOptimizer"


def tables(module: nn.Module) -> set[int]:
    """Return the ids of the weights of embeddings, also of those tied to a head."""
    owners = (m for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    return {id(m.weight) for m in owners}  # not other parameters in them, such as prompts


def state_bytes(optimizer: Optimizer, parameters: list[Tensor]) -> tuple[int, int]:
    """Return the bytes and elements of the states that have one element per element of a parameter.

    Values stored per block of elements (scales, and the shared code map) are left out.
    """
    size = elements = 0
    for p in parameters:
        for value in optimizer.state.get(p, {}).values():
            if isinstance(value, Tensor) and value.shape == p.shape and value.ndim > 0:
                codes = getattr(value, "codes", value)  # torchao packs two 4-bit codes into a byte
                size += codes.numel() * codes.element_size()
                elements += value.numel()
    return size, elements


def _pointless(profile: RunProfile) -> str | None:
    if not profile.optimizer_states:
        return "the optimizer has no states"
    return (
        None
        if profile.memory_bound
        else "memory does not limit the batch or the model, and 8-bit states are not faster"
    )


class EightBitOptimizer(Technique):
    """Store the optimizer states in 8 bits per element, a quarter of their memory.

    The bitsandbytes optimizer with the same update rule replaces the module's own. States are stored in blocks of 256 elements,
    each with its own scale, as codes of a map that is dense near zero. It takes over the module's parameter groups, with their
    learning rates, betas and weight decay, and schedulers continue to work. Embeddings, whose gradients are sparse and uneven,
    and tensors of fewer than ``min_size`` elements stay with the module's own optimizer in 32 bits. Both step as one optimizer.
    ``LAMB`` is scaled by the norms as in its paper, which bitsandbytes' own class does not do.

    Use it when optimizer states do not fit into memory. It needs bitsandbytes (or torchao for 4 bits) and saves no time.

    These optimizers have an equivalent: torch.optim's Adam (without weight decay), AdamW, SGD with momentum, RMSprop and
    Adagrad, and this package's Lion and LAMB. With ``bits=4``, torchao's Adam and AdamW, which compile one step per tensor size
    at first use. All others are refused at setup.

    It logs ``state_bytes``, the size of the 8-bit states, and ``saved_bytes``, the difference from 32 bits.

    Args:
        bits: the bits per element of the states. 4 needs torchao, and 32 is plain training.
        min_size: the smallest number of elements of a tensor with quantized states. torchao has its own limit of 4096.
            Also accepted as ``min_8bit_size``.

    Raises:
        ValueError: for a value out of range. At setup, for an optimizer, or settings of it, without an equivalent, and if no
            tensor is large enough.
        ImportError: at setup, if bitsandbytes (``bits=8``) or torchao (``bits=4``) is not installed.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[EightBitOptimizer()])

    References:
        Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861.
        Li et al. 2023, arXiv:2309.01507 (4 bits).
    """

    saves: ClassVar[str] = "three quarters of the memory of optimizer states (seven eighths with bits=4)"
    paper: ClassVar[str] = "Dettmers et al. 2021, arXiv:2110.02861"
    constraints: ClassVar[str] = "needs bitsandbytes, and an optimizer with an 8-bit equivalent"
    refuses: ClassVar[Reasons] = {
        Part.PIPELINE: "each process sorts its own weights into 8 and 32 bits, so a checkpoint fits no other process"
    }
    search_space: ClassVar[SearchSpace | None] = SearchSpace(pointless=_pointless)
    control: ClassVar[Control] = Control("the baseline with 32-bit states, at the batch size that fits")
    needs_automatic_optimization: ClassVar[bool] = False
    conflicts: ClassVar[Mapping[str, str]] = {
        "ReplaceOptimizer": "both replace the module's optimizer",
        "OptimizerOffload": "it needs a single optimizer of torch.optim, but here two optimizers step as one",
        "StochasticRoundingBF16": "it needs a single optimizer of torch.optim, but here two optimizers step as one",
    }
    neutral_at: ClassVar[Mapping[str, Any]] = {"bits": 32}

    def __init__(
        self, bits: Literal[8, 4, 32] = 8, *, min_size: Annotated[int, Count(), Alias("min_8bit_size")] = 4096
    ) -> None:
        if bits == 4 and min_size < 4096:
            raise ValueError(
                f"{WHO}(bits=4, {min_size=}): torchao keeps 32 bits below 4096 elements. Set min_size=4096 or more."
            )
        self.bits: Literal[8, 4, 32] = bits
        self.min_size = min_size

    def _reset(self) -> None:
        self._small: list[Optimizer] = []  # the optimizers with quantized states
        self._last: dict[str, int] = {}
        self._names: list[str] = []

    @override
    def check(self, session: Session) -> None:
        package = "bitsandbytes" if self.bits == 8 else "torchao"
        imported(package, package, f"{WHO}(bits={self.bits})")

    @override
    def check_checkpoint(self, session: Session, state: dict[str, Any] | None) -> None:
        if session.fitting and state is None:
            raise ValueError(
                f"{WHO}: the checkpoint was saved without it, so its optimizer state has other groups and 32 bits. Resume"
                f" without {WHO}, or start a new run from the checkpoint's weights."
            )

    @override
    def attach(self, session: Session) -> None:
        configure = session.module.configure_optimizers

        def configure_optimizers() -> Any:
            configured = configure()
            schedulers = schedulers_of(configured)
            if not optimizers_of(configured):
                raise ValueError(
                    f"{WHO}: {type(session.module).__name__}.configure_optimizers returned no optimizer. Return one, or"
                    f" remove {WHO}."
                )
            rewritten = rewrite_configured(configured, lambda own: self._replaced(session.module, own, schedulers))
            if not self._small:
                largest = max(p.numel() for o in optimizers_of(configured) for g in o.param_groups for p in g["params"])
                raise ValueError(
                    f"{WHO}(min_size={self.min_size}): the optimizers of {type(session.module).__name__} hold no tensor as"
                    f" large outside its embeddings (the largest of all has {largest} elements). Lower min_size, or remove"
                    f" {WHO}."
                )
            return rewritten

        session.patches.set(session.module, "configure_optimizers", configure_optimizers)

    def _replaced(self, module: nn.Module, own: Optimizer, schedulers: list[Any]) -> Optimizer:
        """Combine ``own`` and the quantized optimizer into one, and attach the schedulers of ``own`` to it."""
        found = equivalent_of(own, self.bits)
        around = [one for one in schedulers if getattr(one, "optimizer", None) is own]
        kept, references, origins = tables(module), reference_rates(own, around), Origins(own)
        stay, go = _divided(own.param_groups, lambda p: id(p) in kept or p.numel() < self.min_size)
        if not go:
            return own
        groups = [group for _, group in go]
        other = eight_bit(found, groups, min_size=self.min_size) if self.bits == 8 else four_bit(found, groups)
        for made, group in zip(
            other.param_groups, groups, strict=True
        ):  # schedulers need the entries of the module's groups
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
            f"{WHO}: {type(other).__name__} steps {len(tensors)} tensors ({sum(p.numel() for p in tensors):,} weights),"
            f" {type(own).__name__} the other {sum(len(group['params']) for _, group in stay)} in 32 bits."
        )
        return combined

    # -- reports

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        if not self._last:
            self._last = self._count()

    def _count(self) -> dict[str, int]:
        held = [(o, [p for group in o.param_groups for p in group["params"]]) for o in self._small]
        counts = [state_bytes(optimizer, parameters) for optimizer, parameters in held]
        size, elements = (sum(values) for values in zip(*counts, strict=True)) if counts else (0, 0)
        return {"state_bytes": size, "saved_bytes": 4 * elements - size} if elements else {}

    @override
    def detach(self, session: Session) -> None:
        self._last = self._last or self._count()
        self._small = []

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return dict(self._last)

    @override
    def summary(self) -> str:
        if not self._last:
            return "made no step"
        mib = [self._last[name] / 2**20 for name in ("state_bytes", "saved_bytes")]
        return f"{' and '.join(self._names)}: states take {mib[0]:,.2f} MiB, {mib[1]:,.2f} less than in 32 bits"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self.neutral else {"bits": self.bits}


def _divided(groups: list[dict[str, Any]], stays: Any) -> tuple[list[tuple[int, dict[str, Any]]], ...]:
    """Split each group into what stays and what goes, with its index; empty parts are left out."""
    found: tuple[list[tuple[int, dict[str, Any]]], ...] = ([], [])
    for at, group in enumerate(groups):
        for part, side in enumerate((True, False)):
            share = group_of(group, lambda p, side=side: stays(p) is side)
            if share["params"]:
                for name in ("lr", "initial_lr", "max_lr", "min_lr"):
                    if isinstance(share.get(name), Tensor) and side is False:
                        share[name] = float(share[name])
                found[part].append((at, share))
    return found
