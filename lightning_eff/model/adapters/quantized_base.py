"""QuantizedBase: frozen linear maps in NF4 or int8; with LoRA beside it, QLoRA (Dettmers et al. 2023).

The rule is ``h = deq(q(W)) x + b`` for W frozen, with q bitsandbytes' NF4 in blocks of 64 or int8 by rows; gradients go
through to x, as those of the rounded weight.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.linear_maps import LinearMap, linear_maps, unfit
from lightning_eff._core._architecture.naming import check_met, check_names, meets
from lightning_eff._core._architecture.record import swapped
from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._architecture.technique import Architecture, Change
from lightning_eff._core._needs.needs import Part, Reasons
from lightning_eff._core._stack.finding import candidates
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey, needs_memory_bound
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.adapters._adapter import folded
from lightning_eff.model.adapters._optional import imported, needed
from lightning_eff.model.adapters._pieces import check_strategy

WHO = "QuantizedBase"
KINDS = {4: "NF4", 8: "int8"}
_COPIES = "it makes blocks copies of others, and here some of their weights are frozen as they were loaded"
_FACTORS = "it puts factors in the place of maps, which train, and weights that train are not rounded"
_ARITHMETIC = "it runs linear maps in an arithmetic of its own, and rounded weights are no such maps"


def _pointless(profile: RunProfile) -> str | None:
    return needs_memory_bound(profile) if profile.num_matrices else "there is no hidden linear map"


class QuantizedBase(Architecture):
    """Keep the weights of linear maps that do not train in 4 or 8 bits: with ``LoRA`` beside it, this is QLoRA.

    ``callbacks=[QuantizedBase(bits=4), LoRA(rank=8)]``, in either order, trains factors beside a base that takes about an
    eighth of its memory. Rounded are the linear maps of the stacks of repeated blocks, or of the whole module where it has
    no stack, whose weights do not train: because an adapter froze them (``LoRA``, ``BitFit``, ...), or the module itself did.
    Embeddings, norms, biases and the head stay as they are. Which maps were rounded is printed.

    The rounding is bitsandbytes': NF4 with one scale for 64 numbers, which is itself in 8 bits, or int8 with one scale for
    each row. A map's weight is made anew in the forward and in the backward pass, in the dtype of its input, and is not
    kept between the two; inputs are not rounded. A step takes more time for it. The codes are buffers, which DDP sends to all
    processes at each step unless it is told not to: ``DDPStrategy(broadcast_buffers=False)``.

    Strategies that divide parameters do not divide codes, which lie whole on each process: with more than eight processes,
    weights of 32 bits in pieces take less.

    What is trained is trained beside the rounded weights. ``lightning_eff.export`` therefore does not merge into them:
    ``lightning_eff.dequantize(module)`` gives the module with the rounded weights in plain maps, which ``export`` merges.
    Checkpoints hold the codes, or, beside an adapter with ``save="adapter"``, nothing of them.

    Logged: ``maps``, how many; ``base_bytes``, what their weights take; ``saved_bytes``, what they took more before.

    Args:
        bits: 4 for NF4, 8 for int8.
        names: dotted paths of maps, their last parts or patterns, which are frozen if they train; a pattern passes over
            maps that cannot be replaced, which is printed. None takes those that do not train, ``[]`` is plain training.
            What other techniques put in, as LoRA's factors, is never meant.

    Raises:
        ValueError: for other values; at setup or in ``apply``, where no map is frozen; for a name that means no map, with
            the nearest ones, or one that cannot be replaced, with the reason; where nothing is left to train; under
            strategies that divide parameters otherwise than by FSDP2, or before they have numbers on each process
            (``init_on``).
        ImportError: where bitsandbytes is not installed.

    Sources:
        Dettmers et al. 2023, arXiv:2305.14314 (QLoRA); Dettmers et al. 2022, arXiv:2208.07339 (LLM.int8).
    """

    saves: ClassVar[str] = "seven eighths (NF4) or three quarters (int8) of the memory of frozen maps in 32 bits"
    paper: ClassVar[str] = "Dettmers et al. 2023, arXiv:2305.14314"
    constraints: ClassVar[str] = "maps that do not train, as beside LoRA; needs bitsandbytes"
    survey: ClassVar[Survey | None] = Survey("parameter-efficient tuning (QLoRA)", zhuang="3")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"bits": Choice((4, 8))}, _pointless)
    control: ClassVar[Control] = Control(
        "the baseline of the same adapter beside the base as it is, for as many seconds"
    )
    change_at: ClassVar[Change] = Change.FREEZE
    stays: ClassVar[str] = (
        "its weights are rounded to few bits, and what was learnt beside them is not merged into those; first let"
        " lightning_eff.dequantize(module) give a module with the rounded weights in plain maps, which export takes"
    )
    refuses: ClassVar[Reasons] = {
        **Architecture.refuses,
        Part.FLAT: "the technique's codes cannot be joined with numbers of other types",
    }
    conflicts: ClassVar[Mapping[str, str]] = {
        "ApproximateRandomDropout": "it drops hidden units from the weights of maps, which are codes here",
        **dict.fromkeys(("LowRankLinear", "ButterflyLinear"), _FACTORS),
        **dict.fromkeys(("FP8Precision", "INT8Precision", "S2FP8Precision", "Wang2018FP8Precision"), _ARITHMETIC),
        "Fixup": "it puts scalars before and behind each map, which is then no plain one whose weight could be rounded",
        **dict.fromkeys(("ProgressiveStacking", "ShallowToDeep", "CompoundGrowth", "AutoProg"), _COPIES),
    }
    _maps = 0
    _bytes = 0
    _saved = 0

    def __init__(self, bits: Literal[4, 8] = 4, names: Sequence[str] | None = None) -> None:
        if bits not in KINDS or isinstance(bits, bool):
            raise ValueError(f"{WHO}({bits=}): expected 4, for NF4, or 8, for int8.")
        needed("bitsandbytes", extra="bitsandbytes", who=WHO)
        self.bits = bits
        self.names = check_names(names, who=WHO, what="linear maps", example="blocks.*.mlp.*")

    @property
    @override
    def neutral(self) -> bool:
        return self.names == []

    @override
    def check(self, session: Session) -> None:
        super().check(session)
        check_strategy(session, who=WHO, save="all")
        where = getattr(session.trainer.strategy, "init_on", "all")
        if where != "all":
            raise ValueError(
                f"{WHO} under {type(session.trainer.strategy).__name__}(init_on={where!r}): weights are rounded where the"
                " module is made, and lie nowhere on some processes; expected init_on='all', with which each process has them."
            )

    # -- the change

    @override
    def change(self, surgeon: Surgeon) -> None:
        imported("bitsandbytes", extra="bitsandbytes", who=WHO)
        from lightning_eff.model.adapters._quantized.layers import QuantizedLinear

        root = surgeon.root
        chosen = {id(m.module): m for m in self._places(surgeon)}
        weights = {id(m.module.weight): m for m in chosen.values()}
        for m in chosen.values():
            if m.module.weight.is_meta:  # pyright: ignore[reportAttributeAccessIssue]
                raise ValueError(
                    f"{WHO}: the weight of {m} lies nowhere (meta device); expected numbers that can be rounded. Load the"
                    " weights before."
                )
        surgeon.freeze(lambda name, p: id(p) in weights)
        if not any(p.requires_grad for p in root.parameters()):
            raise ValueError(
                f"{WHO}: nothing of {type(root).__name__} is left to train; expected parameters that do. Put an adapter such as"
                " LoRA() beside it."
            )
        before = sum(cast(Tensor, m.module.weight).nbytes for m in chosen.values())
        made: list[QuantizedLinear] = []

        def build(plain: nn.Module) -> nn.Module:
            made.append(new := QuantizedLinear(chosen[id(plain)], self.bits))
            if not new.weight.isfinite().all():
                raise ValueError(
                    f"{WHO}(bits={self.bits}): the weight of {chosen[id(plain)]} has numbers that are not finite, or too large"
                    " for 16 bits, as int8's rounding takes them; expected finite ones. Leave the map out by names=, or look"
                    " at what was loaded."
                )
            return new

        surgeon.swap(lambda path, m: id(m) in chosen, build, what="a linear map")
        self._maps = len(made)
        self._bytes = sum(t.nbytes for m in made for t in m.stored.values())
        self._saved = before - self._bytes
        rank_zero_info(
            f"{WHO}: {len(made)} frozen linear maps in {KINDS[self.bits]}:"
            f" {folded([_plain(m.path) for m in chosen.values()])}; {before:,} bytes of weights became {self._bytes:,}."
        )

    def _places(self, surgeon: Surgeon) -> list[LinearMap]:
        """The maps to act on."""
        root = surgeon.root
        new = _new(root)
        maps = [m for m in linear_maps(root) if id(m.module.weight) not in new]
        who = type(root).__name__
        if self.names is not None:
            check_met(self.names, [_plain(m.path) for m in maps], who=WHO, what="linear maps", root=who)
            named: list[LinearMap] = []
            passed: dict[str, str] = {}
            for m in maps:
                met = [name for name in self.names if meets(_plain(m.path), name)]
                reason = _unfit(root, m) if met else None
                if reason is not None and any("*" not in name for name in met):
                    raise ValueError(f"{WHO}: {m} cannot be acted on: {reason}. Leave it out of the names.")
                if reason is not None:
                    passed[str(m)] = reason
                elif met:
                    named.append(m)
            if not named:
                reasons = "".join(f" {name}: {reason}." for name, reason in passed.items())
                raise ValueError(
                    f"{WHO}(names={self.names}): none of the maps that they mean can be acted on.{reasons} Name others."
                )
            surgeon.leave(passed)
            return named
        stacks = [f"{stack.path}." for stack in candidates(root) if stack.composite and stack.path]
        left: dict[str, str] = {}
        found: list[LinearMap] = []
        for m in maps:
            if m.module.weight.requires_grad:
                continue
            reason = _unfit(root, m)
            if reason is None and stacks and not m.path.startswith(tuple(stacks)):
                reason = "it lies outside of the blocks"
            if reason is None:
                found.append(m)
            else:
                left[str(m)] = reason
        if not found:
            reasons = "".join(f" {name}: {reason}." for name, reason in left.items())
            raise ValueError(
                f"{WHO}: no linear map of {who} that could be rounded is frozen, among {len(maps)}.{reasons} Expected maps"
                " whose weights do not train. Put an adapter such as LoRA() beside it, freeze them in the module, or name them,"
                " names=[...], which freezes them."
            )
        surgeon.leave(left)
        return found

    # -- what is told

    @override
    def report(self) -> "dict[str, float | int | Tensor]":
        return {"maps": self._maps, "base_bytes": self._bytes, "saved_bytes": self._saved}

    @override
    def summary(self) -> str:
        if not self._maps:
            return "the module was rounded already"
        was = self._bytes + self._saved
        return f"{self._maps} frozen maps in {KINDS[self.bits]}, {self._bytes:,} bytes in the place of {was:,}"


def _plain(path: str) -> str:
    """The path that a map has without an adapter around it."""
    return path.removesuffix(".base_layer")


def _new(root: nn.Module) -> set[int]:
    """Ids of parameters that other techniques put in, as LoRA's factors, and which train."""
    return {
        id(p)
        for _, m, swap in swapped(root)
        for name, p in m.named_parameters()
        if name not in swap.tensors and p.requires_grad
    }


def _unfit(root: nn.Module, m: LinearMap) -> str | None:
    weight: Any = m.module.weight
    users = [path for path, one in root.named_modules() if any(p is weight for p in one.parameters(recurse=False))]
    if len(users) > 1:
        return f"its weight is that of {' and '.join(path for path in users if path != m.path)} too"
    return unfit(m)
