"""ValueResiduals: mix the values of each attention with those of the first block (Zhou et al. 2024).

The rule is ``V'_n = lambda_{n,1} V_1 + lambda_{n,2} V_n`` for the values V_n of block n > 1, with two learned numbers per
attention. Attention then reads V'_n in place of V_n, with the same queries, keys and mask.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._arguments.kinds import Fraction, Layers
from lightning_eff._core.search_space import Choice, SearchSpace, needs_attention
from lightning_eff.model.shortcuts._carried import Carried
from lightning_eff.model.shortcuts._fed import chain, weights
from lightning_eff.model.shortcuts._technique import CONFLICTS, Blocks, Shortcuts
from lightning_eff.model.shortcuts._valued import ValueFeed, attentions, value_modules

WHO = "ValueResiduals"
LAMBDAS = "value_lambdas"


def mixed_values(first: Tensor, value: Tensor, lambdas: Tensor) -> Tensor:
    """Return ``lambda_{n,1} V_1 + lambda_{n,2} V_n``.

    Args:
        first: V_1, shape (B, H, S, E).
        value: V_n, the same shape.
        lambdas: shape (2,).
    """
    return lambdas[0] * first + lambdas[1] * value


class FromFirst(ValueFeed):
    """An attention's part in the rule.

    Args:
        carried: the pass's V_1, shared by the attentions of one kind.
        first: whether this is the first block's, whose values are V_1.
        last: whether no later attention needs them.
    """

    who = WHO

    def __init__(self, carried: Carried, *, first: bool, last: bool) -> None:
        self.carried, self.first, self.last = carried, first, last

    @override
    def enter(self, module: nn.Module, value: Tensor) -> Tensor:
        if self.first:
            self.carried.begin()
            self.carried.put(0, value)
            return value
        lambdas = weights(module, LAMBDAS)
        return mixed_values(self.carried.get(0, value, lambdas, last=self.last), value, lambdas)


class ValueResiduals(Shortcuts):
    """Mix the values that each attention reads with those of the first block, by two learned numbers per attention.

    Values of the first block are close to the tokens, and deep layers tend to lose them. In the paper, a model reaches the
    same loss with 16 % fewer parameters or 20 % fewer tokens. If blocks attend several times, as decoders with
    cross-attention, each attention is paired with the one at the same place in the first block. The mix is computed within the
    call of attention, so masks, dropout, grouped heads and caches of keys and values stay as they are.

    Use it to pretrain transformers. The paper starts with ``init=0.5``, which changes the function: use ``init=0`` to train on
    from a pretrained module, which then first computes the same as before, bit for bit. It costs two products of a number with
    the values per attention, and keeps the first values during a pass. The numbers have no weight decay. **It changes the
    model**: checkpoints load into ``lightning_eff.apply(plain, ValueResiduals(...))``, and ``export`` refuses. It logs
    ``connections``, the number of attentions that read mixed values.

    Args:
        init: the first lambda_{n,1}, in [0, 1]. The first lambda_{n,2} is ``1 - init``.
        blocks: the indices of blocks whose values are mixed, from 1 on. None is all of them, ``[]`` is plain training. The
            paper's sparse variant has only later ones.
        layers: the blocks, as a dotted path, a pattern or a list of paths. None finds the longest stack.

    Raises:
        ValueError: for a value out of range. At setup or in ``apply``, if no stack of blocks is found, its blocks do not run
            once each on the output of the one before, or their attention is not ``scaled_dot_product_attention`` or
            ``nn.MultiheadAttention`` without weights, or has values of several shapes. In a step, if blocks are recomputed
            with ``use_reentrant=True``.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[ValueResiduals()])

    References:
        Zhou et al. 2024, "Value Residual Learning", arXiv:2410.17897.
    """

    saves = "steps: deep attention reads the values of the first block; costs two products per attention"
    paper = "Zhou et al. 2024, arXiv:2410.17897"
    constraints = "transformers whose attention is scaled_dot_product_attention or nn.MultiheadAttention, not compiled"
    search_space = SearchSpace({"init": Choice((0.0, 0.5))}, needs_attention)
    stays = "a plain attention has no place for the values of another one"
    conflicts: ClassVar[Mapping[str, str]] = {
        **CONFLICTS,
        **dict.fromkeys(
            ("DOTAAttention", "Fastformer", "GatedPositionalAttention", "Linformer", "PrefixTuning"),
            "it gives attention other keys and values before they could be mixed",
        ),
        "RegionalCompilation": "compiled code hides the attention whose values are mixed",
        "SequencePacking": "it tries single blocks without those before them, from which values come",
    }
    neutral_at: ClassVar[Mapping[str, Any]] = {"blocks": ()}

    def __init__(
        self, init: Annotated[float, Fraction()] = 0.5, *, blocks: Blocks = None, layers: Layers | None = None
    ) -> None:
        self.init = init
        self.blocks: Sequence[int] | None = blocks
        self.layers = layers

    @override
    def change(self, surgeon: Surgeon) -> None:
        found = chain(surgeon, self.layers, who=WHO)
        takes = self.chosen(self.blocks, range(1, found.length))
        feeds: dict[str, tuple[ValueFeed, Mapping[str, nn.Parameter]]] = {}
        count = 0
        for group in attentions(surgeon, found, who=WHO).values():
            (at, path, place), *others = sorted(group)
            others = [one for one in others if one[0] in takes]
            if at != 0 or not others:
                continue
            for _, other, its in others:
                if its.call.value.shape != place.call.value.shape:
                    raise ValueError(
                        f"{WHO}: {path} has values of shape {tuple(place.call.value.shape)} and {other} of"
                        f" {tuple(its.call.value.shape)}, which cannot be mixed. Leave its block out of blocks=, or remove"
                        f" {WHO}."
                    )
            carried = Carried(WHO)
            feeds[path] = FromFirst(carried, first=True, last=False), {}
            for i, (_, other, _) in enumerate(others):
                lambdas = nn.Parameter(torch.tensor([self.init, 1.0 - self.init]))
                feeds[other] = FromFirst(carried, first=False, last=i == len(others) - 1), {LAMBDAS: lambdas}
            count += len(others)
        if not feeds:
            raise ValueError(
                f"{WHO}: the blocks of {found} have no attention at the same place as in the first block. Name another stack by"
                f" layers=, or remove {WHO}."
            )
        value_modules(surgeon, feeds)
        self._count = count
        first = f" With init={self.init:g} the module first computes something else." if self.init else ""
        rank_zero_info(f"{WHO}: {count} attentions in {found} read values mixed with those of the first block.{first}")
