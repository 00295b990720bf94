"""LogitSoftcap: bound the logits smoothly (Bello et al. 2016; Gemma 2, 2024).

The rule is ``y = c tanh(z / c)`` for the logits z of a head.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.linear_maps import LinearMap, linear_maps, unfit
from lightning_eff._core._architecture.naming import check_met
from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._architecture.technique import Architecture, Change
from lightning_eff._core._arguments.kinds import Alias, Either, Number, OneOf
from lightning_eff._core._branches.probing import Divided, probed
from lightning_eff._core._resume.marks import Marked
from lightning_eff._core._stack.finding import candidates
from lightning_eff._core.search_space import Choice, SearchSpace, needs_matrices
from lightning_eff._core.technique import Control
from lightning_eff.model.layers._shared.arguments import Paths
from lightning_eff.model.layers._shared.choosing import ByName, is_named

WHO = "LogitSoftcap"


def softcap(z: Tensor, cap: float) -> Tensor:
    """``c tanh(z / c)``: close to z if z is small, and always between -c and c."""
    return cap * torch.tanh(z / cap)


class CappedLinear(Marked, nn.Linear):
    """A head with capped logits and the plain head's weight and bias.

    Args:
        plain: the head.
        cap: c.
    """

    #: The plain parameters stay, so that an embedding may remain tied to them.
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


class LogitSoftcap(ByName, Architecture):
    """Cap the logits of the module's head smoothly: ``c tanh(z / c)``.

    Logits near the cap and above have small gradients. This keeps them from diverging, as they may with high learning rates
    or in low precision. The technique finds the head in a forward pass on a made-up input: it is the linear layer that
    computes what the module returns or what the loss is computed from. It logs which layer it took.

    Use it if logits grow without bound; it gains nothing if they stay small. **It changes the model**, and costs an
    elementwise operation over all logits, forward and backward. With a large vocabulary this is noticeable, unless the cap is
    fused with the loss, as ``FusedLinearCrossEntropy`` does. Checkpoints have a mark next to the head,
    ``lightning_eff_mark``, so that the plain module does not load them. Load them into ``lightning_eff.apply(plain,
    LogitSoftcap(...))``. ``export`` refuses. It logs ``heads``, the number of heads, and ``cap``.

    Args:
        cap: the largest absolute value of a logit. ``math.inf`` is plain training. Also accepted as
            ``final_logit_softcapping``.
        names: dotted paths of the heads, their last parts, or patterns, such as ``["lm_head"]``. None looks for the head.

    Raises:
        ValueError: for a value out of range. At setup or in ``apply``, if no head is found, several are found, a name matches
            no linear layer, the head cannot be replaced, or the model caps its logits already.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[LogitSoftcap(30.0)])

    References:
        Gemma Team 2024, "Gemma 2: Improving Open Language Models at a Practical Size", arXiv:2408.00118 (caps of 30 and 50).
        Bello et al. 2016, "Neural Combinatorial Optimization with Reinforcement Learning", arXiv:1611.09940 (section 4).
    """

    saves = "steps, if logits would grow without bound; costs an operation over all logits"
    paper = "Gemma Team 2024, arXiv:2408.00118"
    constraints = "heads that are nn.Linear; costs time with large vocabularies"
    search_space = SearchSpace({"cap": Choice((15.0, 30.0))}, needs_matrices)
    control = Control("the baseline for the same time with its learning rate decayed to zero")
    conflicts: ClassVar[Mapping[str, str]] = {}
    change_at = Change.SWAP
    stays = "a plain head has no cap"
    neutral_at: ClassVar[Mapping[str, Any]] = {"cap": math.inf}
    _count = 0

    def __init__(
        self,
        cap: Annotated[float, Either(Number(above=0), OneOf(math.inf)), Alias("final_logit_softcapping")] = 30.0,
        *,
        names: Paths = None,
    ) -> None:
        self.cap = float(cap)
        self._take_names(names)

    # -- the change

    @override
    def change(self, surgeon: Surgeon) -> None:
        root = surgeon.root
        for path, m in root.named_modules():
            has = getattr(getattr(m, "config", None), "final_logit_softcapping", None)
            if has:
                raise ValueError(
                    f"{WHO}(cap={self.cap:g}): {path or type(m).__name__} caps its logits at {has} already. Set"
                    " config.final_logit_softcapping instead, or remove the callback."
                )
        heads = self._heads(root, surgeon.batch)
        for m in heads:
            reason = unfit(m) or ("it is Conv1D" if m.transposed else None)
            if reason is not None:
                raise ValueError(f"{WHO}: the head {m} cannot be replaced: {reason}. Remove the callback.")
        ids = {id(m.module) for m in heads}

        def build(plain: nn.Module) -> nn.Module:
            assert isinstance(plain, nn.Linear)
            return CappedLinear(plain, self.cap)

        surgeon.swap(lambda path, m: id(m) in ids, build, what="a head")
        self._count = len(ids)
        rank_zero_info(f"{WHO}: caps the logits of {', '.join(m.path for m in heads)} at {self.cap:g}.")

    def _heads(self, root: nn.Module, batch: Any) -> list[LinearMap]:
        maps = linear_maps(root)
        if not maps:
            raise ValueError(
                f"{WHO}: {type(root).__name__} has no linear layer that could be a head. Remove the callback."
            )
        if self.names is not None:
            check_met(self.names, [m.path for m in maps], who=WHO, what="linear layers", root=type(root).__name__)
            return [m for m in maps if is_named(m.path, self.names)]
        ways = _ways(root, maps)
        try:
            found = probed(root, who=WHO, batch=batch).heads
        except Divided:
            raise
        except ValueError as e:
            raise ValueError(
                f"{WHO}: found no head in {type(root).__name__}, because no forward pass on a made-up input succeeded"
                f" ({str(e).partition('. ')[0]}). {ways}."
            ) from e
        parameters = dict(root.named_parameters())
        weights = {id(parameters[name]) for name in found}
        heads = [m for m in maps if id(m.module.weight) in weights]
        if len(heads) != 1:
            told = ", ".join(map(str, heads)) or "none"
            if heads:
                ways = f"Name those whose logits to cap, such as {WHO}(names={[m.path for m in heads]})"
            raise ValueError(
                f"{WHO}: expected one linear layer that computes the output of {type(root).__name__}, found {told}. {ways}."
            )
        return heads

    # -- reports

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"heads": self._count, "cap": self.cap}

    @override
    def summary(self) -> str:
        return f"capped logits at {self.cap:g}"


def _ways(root: nn.Module, maps: Sequence[LinearMap]) -> str:
    """How to name a head that is not found: an embedding's weight or vocabulary size marks a likely one."""
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
    listed = ", ".join(map(str, (outside or maps)[-5:]))
    return f"Name the layer whose outputs are logits with {WHO}(names=[...]); candidates: {listed}"
