"""QuantizedBase: keep frozen linear layers in NF4 or int8; with LoRA, this is QLoRA (Dettmers et al. 2023).

The rule is ``h = deq(q(W)) x + b`` for W frozen, with q bitsandbytes' NF4 in blocks of 64 or int8 by rows. Gradients go
through to x, as those of the rounded weight.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, cast

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.linear_maps import LinearMap, linear_maps, unfit
from lightning_eff._core._architecture.naming import by_reason, check_met, meets
from lightning_eff._core._architecture.record import swapped
from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._architecture.technique import Architecture, Change
from lightning_eff._core._needs.needs import Part, Reasons
from lightning_eff._core._stack.finding import candidates
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, needs_memory_bound
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.adapters._adapter import folded
from lightning_eff.model.adapters._arguments import Paths
from lightning_eff.model.adapters._optional import imported, needed
from lightning_eff.model.adapters._pieces import check_strategy

WHO = "QuantizedBase"
KINDS = {4: "NF4", 8: "int8"}
_COPIES = "it copies blocks, and some of their weights are frozen here as they were loaded"
_FACTORS = "it replaces linear layers with factors that train, and only frozen weights are rounded"
_ARITHMETIC = "the plugin runs linear layers in low precision, and quantised layers are not linear layers"


def _pointless(profile: RunProfile) -> str | None:
    return needs_memory_bound(profile) if profile.num_matrices else "the module has no hidden linear layer"


class QuantizedBase(Architecture):
    """Keep the frozen weights of linear layers in 4 or 8 bits; together with ``LoRA``, this is QLoRA.

    ``callbacks=[QuantizedBase(bits=4), LoRA(rank=8)]``, in either order, trains factors on a base with about an eighth of its
    memory. It rounds the linear layers in the stacks of repeated blocks, or in the whole module if it has no stack, whose
    weights are frozen by an adapter (``LoRA``, ``BitFit``, ...) or by the module itself. Embeddings, norms, biases and the
    head stay unchanged. A log line lists the rounded layers.

    Use it to fine-tune a model whose weights do not fit in memory. A step takes longer: the weight is recomputed in the
    forward and in the backward pass, in the input's dtype, and not kept in between. Inputs are not rounded. The rounding is
    bitsandbytes': NF4 with one scale per 64 weights, itself in 8 bits, or int8 with one scale per row. The codes are buffers,
    which DDP sends to all processes in each step unless you use ``DDPStrategy(broadcast_buffers=False)``. Strategies that
    divide parameters do not divide codes, which are whole on each process. With more than eight processes, divided 32-bit
    weights need less memory.

    Other weights are trained with the rounded weights, so ``lightning_eff.export`` does not merge into them.
    ``lightning_eff.dequantize(module)`` returns the module with the rounded weights in plain layers, which ``export`` merges.
    Checkpoints hold the codes, or none of them with an adapter's ``save="adapter"``. It logs ``maps``, the number of layers,
    ``base_bytes``, the size of their weights, and ``saved_bytes``, the memory saved.

    Args:
        bits: the number of bits per weight. 4 is NF4, 8 is int8.
        names: dotted paths of the linear layers to round, their last parts, or patterns, such as ``["blocks.*.mlp.*"]``. It
            freezes them if they train. A pattern with ``*`` skips layers that cannot be replaced, and logs them. None takes
            the frozen layers, ``[]`` is plain training. Weights that other techniques add, such as LoRA's factors, are never
            rounded.

    Raises:
        ValueError: for a wrong value. At setup or in ``apply``, if no layer is frozen, a name matches none, a named layer
            cannot be replaced, nothing is left to train, or the strategy divides parameters in another way than FSDP2 or
            before each process has them (``init_on``).
        ImportError: if bitsandbytes is not installed.

    Example:
        >>> trainer = L.Trainer(max_epochs=3, callbacks=[QuantizedBase(bits=4), LoRA(8)])

    References:
        Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs", arXiv:2305.14314.
        Dettmers et al. 2022, "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale", arXiv:2208.07339.
    """

    saves = "seven eighths (NF4) or three quarters (int8) of the memory of frozen 32-bit linear layers"
    paper = "Dettmers et al. 2023, arXiv:2305.14314"
    constraints = "frozen linear layers, as with LoRA; needs bitsandbytes"
    search_space = SearchSpace({"bits": Choice((4, 8))}, _pointless)
    control = Control("the baseline with the same adapter on the unrounded base, for the same time")
    change_at = Change.FREEZE
    stays = (
        "its weights are rounded to few bits, and trained factors cannot be merged into them; first call"
        " lightning_eff.dequantize(module), which returns a module with the rounded weights in plain layers"
    )
    refuses: ClassVar[Reasons] = {
        **Architecture.refuses,
        Part.FLAT: "its codes cannot be joined with weights of other types",
    }
    conflicts: ClassVar[Mapping[str, str]] = {
        "ApproximateRandomDropout": "it drops hidden units from weights, which are codes here",
        **dict.fromkeys(("LowRankLinear", "ButterflyLinear"), _FACTORS),
        **dict.fromkeys(("FP8Precision", "INT8Precision", "S2FP8Precision", "Wang2018FP8Precision"), _ARITHMETIC),
        "Fixup": "it adds scalars before and after each linear layer, and the weight of such a layer cannot be rounded",
        **dict.fromkeys(("ProgressiveStacking", "ShallowToDeep", "CompoundGrowth", "AutoProg"), _COPIES),
    }
    neutral_at: ClassVar[Mapping[str, Any]] = {"names": []}
    _maps = 0
    _bytes = 0
    _saved = 0

    def __init__(self, bits: Literal[4, 8] = 4, names: Paths = None) -> None:
        needed("bitsandbytes", extra="bitsandbytes", who=WHO)
        self.bits = bits
        self.names = None if names is None else list(names)

    @override
    def check(self, session: Session) -> None:
        super().check(session)
        check_strategy(session, who=WHO, save="all")
        where = getattr(session.trainer.strategy, "init_on", "all")
        if where != "all":
            raise ValueError(
                f"{WHO}: weights are rounded where the module is made, and with"
                f" {type(session.trainer.strategy).__name__}(init_on={where!r}) some processes have none. Use init_on='all'."
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
                    f"{WHO}: the weight of {m} is on the meta device and has no values. Load the weights first."
                )
        surgeon.freeze(lambda name, p: id(p) in weights)
        if not any(p.requires_grad for p in root.parameters()):
            raise ValueError(
                f"{WHO}: nothing of {type(root).__name__} is left to train. Add an adapter such as LoRA() to the callbacks."
            )
        before = sum(cast(Tensor, m.module.weight).nbytes for m in chosen.values())
        made: list[QuantizedLinear] = []

        def build(plain: nn.Module) -> nn.Module:
            made.append(new := QuantizedLinear(chosen[id(plain)], self.bits))
            if not new.weight.isfinite().all():
                raise ValueError(
                    f"{WHO}(bits={self.bits}): the weight of {chosen[id(plain)]} has values that are not finite, or too large"
                    " for float16, which int8 rounding uses. Check the loaded weights, or name other layers in `names`."
                )
            return new

        surgeon.swap(lambda path, m: id(m) in chosen, build, what="a linear layer")
        self._maps = len(made)
        self._bytes = sum(t.nbytes for m in made for t in m.stored.values())
        self._saved = before - self._bytes
        rank_zero_info(
            f"{WHO}: keeps {len(made)} frozen linear layers in {KINDS[self.bits]}, {self._bytes:,} bytes instead of {before:,}:"
            f" {folded([_plain(m.path) for m in chosen.values()])}."
        )

    def _places(self, surgeon: Surgeon) -> list[LinearMap]:
        """The linear layers to round."""
        root = surgeon.root
        new = _new(root)
        maps = [m for m in linear_maps(root) if id(m.module.weight) not in new]
        who = type(root).__name__
        if self.names is not None:
            check_met(self.names, [_plain(m.path) for m in maps], who=WHO, what="linear layers", root=who)
            named: list[LinearMap] = []
            passed: dict[str, str] = {}
            for m in maps:
                met = [name for name in self.names if meets(_plain(m.path), name)]
                reason = _unfit(root, m) if met else None
                if reason is not None and any("*" not in name for name in met):
                    raise ValueError(f"{WHO}: {m} cannot be rounded: {reason}. Leave it out of `names`.")
                if reason is not None:
                    passed[str(m)] = reason
                elif met:
                    named.append(m)
            if not named:
                raise ValueError(
                    f"{WHO}(names={self.names}): none of these layers can be rounded.{by_reason(passed)} Name others."
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
                reason = "it is outside the blocks"
            if reason is None:
                found.append(m)
            else:
                left[str(m)] = reason
        if not found:
            raise ValueError(
                f"{WHO}: {who} has no frozen linear layer that can be rounded.{by_reason(left)} Add an adapter such as LoRA(),"
                " freeze layers in the module, or name them with names=[...], which freezes them."
            )
        surgeon.leave(left)
        return found

    # -- reports

    @override
    def report(self) -> "dict[str, float | int | Tensor]":
        return {"maps": self._maps, "base_bytes": self._bytes, "saved_bytes": self._saved}

    @override
    def summary(self) -> str:
        if not self._maps:
            return "the module was already rounded"
        was = self._bytes + self._saved
        return f"{self._maps} frozen layers in {KINDS[self.bits]}, {self._bytes:,} bytes instead of {was:,}"


def _plain(path: str) -> str:
    """The path of a layer without an adapter around it."""
    return path.removesuffix(".base_layer")


def _new(root: nn.Module) -> set[int]:
    """Ids of trained parameters that other techniques added, such as LoRA's factors."""
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
        return f"it shares its weight with {' and '.join(path for path in users if path != m.path)}"
    return unfit(m)
