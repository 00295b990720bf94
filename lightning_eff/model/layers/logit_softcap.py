"""LogitSoftcap: logits that end at a cap, which they come near smoothly (Bello et al. 2016; Gemma 2, 2024).

The rule is ``y = c tanh(z / c)`` for the logits z of a head.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.linear_maps import LinearMap, linear_maps, unfit
from lightning_eff._core._architecture.naming import check_met, check_names, meets
from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._architecture.technique import Architecture, Change
from lightning_eff._core._branches.probing import Divided, probed
from lightning_eff._core._stack.finding import candidates
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey
from lightning_eff._core.technique import Control
from lightning_eff.model.layers._marks import Marked

WHO = "LogitSoftcap"


def softcap(z: Tensor, cap: float) -> Tensor:
    """``c tanh(z / c)``: z where it is small, and between -c and c wherever it is."""
    return cap * torch.tanh(z / cap)


class CappedLinear(Marked, nn.Linear):
    """A head whose logits are capped, with the plain one's own weight and bias.

    Args:
        plain: the head.
        cap: c.
    """

    #: Its weight is what it was, also to an embedding that is tied to it.
    as_before = ("weight", "bias")

    def __init__(self, plain: nn.Linear, cap: float) -> None:
        super().__init__(plain.in_features, plain.out_features, plain.bias is not None, device="meta")  # pyright: ignore[reportCallIssue]
        self.weight, self.bias, self.cap = plain.weight, plain.bias, cap
        self.mark(cap, f"logits capped at {cap:g}", plain.weight.device)

    @override
    def forward(self, input: Tensor) -> Tensor:
        return softcap(nn.Linear.forward(self, input), self.cap)

    @override
    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, cap={self.cap:g}"


def _pointless(profile: RunProfile) -> str | None:
    return None if profile.num_matrices else "there is no hidden linear map before a head"


class LogitSoftcap(Architecture):
    """Cap the logits of a module's head smoothly: ``c tanh(z / c)``.

    Logits of the size of c and beyond have small gradients, so that they do not run away, as they do with large rates or in
    low precision. A head is found by a pass over an input that is made up: the linear map that computes what the module
    returns or what its loss is taken of. It is said which one it is.

    **Another model**, which costs an elementwise operation over all logits, forward and backward: with a large vocabulary
    that shows, unless it is fused with the loss, as ``FusedLinearCrossEntropy`` does. It saves steps where logits would run
    away, and nothing where they stay small. Checkpoints have a mark beside the head, ``lightning_eff_mark``, so that the
    plain module does not load them; they load into ``lightning_eff.apply(plain, LogitSoftcap(...))``, and ``export``
    refuses.

    Logged: ``heads``, how many; ``cap``.

    Args:
        cap: c, > 0, in units of logits; ``math.inf`` is plain training.
        names: dotted paths of heads, their last parts or patterns, such as ``["lm_head"]``; None looks for it.

    Raises:
        ValueError: for other values; at setup or in ``apply``, where no head is found, or several, which must be named; for a
            name that means no linear map, with the nearest ones; for a head that cannot be replaced, or whose model caps
            its logits already.

    Sources:
        Bello et al. 2016, arXiv:1611.09940 (section 4); Gemma Team 2024, arXiv:2408.00118, and modded-nanogpt (30 and less).
    """

    saves: ClassVar[str] = "steps, where logits would run away; costs an operation over all logits"
    paper: ClassVar[str] = "Gemma Team 2024, arXiv:2408.00118"
    constraints: ClassVar[str] = "heads that are an nn.Linear; models of large vocabularies pay for it in time"
    survey: ClassVar[Survey | None] = None
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"cap": Choice((15.0, 30.0))}, _pointless)
    control: ClassVar[Control] = Control("the baseline for as many seconds with its learning rate decayed to zero")
    conflicts: ClassVar[Mapping[str, str]] = {}
    change_at: ClassVar[Change] = Change.SWAP
    stays: ClassVar[str] = "a plain head has no cap"
    _count = 0

    def __init__(self, cap: float = 30.0, *, names: Sequence[str] | None = None) -> None:
        number = isinstance(cap, int | float) and not isinstance(cap, bool)
        if not number or not cap > 0.0:
            raise ValueError(
                f"{WHO}({cap=}): expected a number > 0 in units of logits, such as 30; math.inf is plain training."
            )
        self.cap = float(cap)
        self.names = check_names(names, who=WHO, what="heads", example="lm_head")

    @property
    @override
    def neutral(self) -> bool:
        return math.isinf(self.cap) or self.names == []

    # -- the change

    @override
    def change(self, surgeon: Surgeon) -> None:
        root = surgeon.root
        for path, m in root.named_modules():
            has = getattr(getattr(m, "config", None), "final_logit_softcapping", None)
            if has:
                raise ValueError(
                    f"{WHO}: {path or type(m).__name__} caps its logits at {has} already; expected a head without. Set"
                    " config.final_logit_softcapping instead, or take the technique out."
                )
        heads = self._heads(root, surgeon.batch)
        for m in heads:
            reason = unfit(m) or ("it is Conv1D" if m.transposed else None)
            if reason is not None:
                raise ValueError(f"{WHO}: the head {m} cannot be replaced: {reason}. Take the technique out.")
        ids = {id(m.module) for m in heads}

        def build(plain: nn.Module) -> nn.Module:
            assert isinstance(plain, nn.Linear)
            return CappedLinear(plain, self.cap)

        surgeon.swap(lambda path, m: id(m) in ids, build, what="a head")
        self._count = len(ids)
        rank_zero_info(f"{WHO}: the logits of {', '.join(m.path for m in heads)} are capped at {self.cap:g}.")

    def _heads(self, root: nn.Module, batch: Any) -> list[LinearMap]:
        maps = linear_maps(root)
        if not maps:
            raise ValueError(
                f"{WHO}: {type(root).__name__} has no linear map that could be a head. Take the technique out."
            )
        if self.names is not None:
            check_met(self.names, [m.path for m in maps], who=WHO, what="linear maps", root=type(root).__name__)
            return [m for m in maps if any(meets(m.path, name) for name in self.names)]
        ways = _ways(root, maps)
        try:
            found = probed(root, who=WHO, batch=batch).heads
        except Divided:
            raise
        except ValueError as e:
            raise ValueError(
                f"{WHO}: the head of {type(root).__name__} cannot be told, since no pass over an input that is made up shows"
                f" one ({str(e).partition('. ')[0]}). {ways}."
            ) from e
        parameters = dict(root.named_parameters())
        weights = {id(parameters[name]) for name in found}
        heads = [m for m in maps if id(m.module.weight) in weights]
        if len(heads) != 1:
            told = ", ".join(map(str, heads)) or "none"
            if heads:
                ways = f"Name those whose logits shall be capped, such as {WHO}(names={[m.path for m in heads]})"
            raise ValueError(
                f"{WHO}: of the linear maps of {type(root).__name__}, these compute what it returns: {told}; expected one."
                f" {ways}."
            )
        return heads

    # -- what is told

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"heads": self._count, "cap": self.cap}

    @override
    def summary(self) -> str:
        return f"logits are capped at {self.cap:g}"


def _ways(root: nn.Module, maps: Sequence[LinearMap]) -> str:
    """How to name the head, where it is not found: what has an embedding's weight, or its vocabulary, is likely to be one."""
    tables = [m for m in root.modules() if isinstance(m, nn.Embedding)]
    tied = [m for m in maps if any(m.module.weight is table.weight for table in tables)]
    sized = [m for m in maps if m.out_features in {table.num_embeddings for table in tables}]
    for likely, why in (
        (tied, "shares the weight of an embedding"),
        (sized, "has as many outputs as an embedding has rows"),
    ):
        if likely:
            return f"Name it, such as {WHO}(names=['{likely[-1].path}']), which {why}"
    stacks = [f"{stack.path}." for stack in candidates(root) if stack.composite and stack.path]
    outside = [m for m in maps if not m.path.startswith(tuple(stacks))] if stacks else maps
    listed = ", ".join(map(str, (outside or maps)[-6:]))
    return f"Name the one whose outputs are logits, {WHO}(names=[...]), of {listed}"
