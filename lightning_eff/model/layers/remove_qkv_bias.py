"""RemoveQKVBias: attention without the biases of keys and values, which nothing depends on (Geiping & Goldstein 2022).

A key's bias adds ``q_i b_k`` to all logits of a query, to which softmax is blind. A value's bias adds ``b_v`` to each result,
since a query's weights sum up to one: ``W_o (A V + 1 b_v) + b_o = W_o A V + (b_o + W_o b_v)``, which
``_attention.rebiased.moved`` computes.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.linear_maps import LinearMap
from lightning_eff._core._architecture.naming import check_met, check_names
from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._architecture.technique import Architecture, Change
from lightning_eff._core._branches.attention import Attention, Part
from lightning_eff._core.patches import hook_behind
from lightning_eff._core.search_space import RunProfile, SearchSpace, Survey
from lightning_eff._core.technique import Control
from lightning_eff.model.layers._attention.parts import attended, is_named, maps_by_weight, problem
from lightning_eff.model.layers._attention.rebiased import moved, rebiased

WHO = "RemoveQKVBias"
KINDS = ("key", "value")


def _pointless(profile: RunProfile) -> str | None:
    return None if profile.sequence_length is not None or profile.image_side is not None else "samples are no sequences"


class RemoveQKVBias(Architecture):
    """Take out the biases of attention's keys and values where the module computes the same without them.

    A key's bias changes no output: it shifts all logits of a query alike. A value's bias is moved into the bias of the map
    behind attention, which computes the same in evaluation; where attention weights are dropped in training, it is no
    longer dropped with them, and the map behind attention has another gradient than before: its inputs are without it. A
    query's bias does change outputs, and is never taken out.

    None of that holds where keys are turned by their places, as by rotary embeddings, or normed, or where one map makes
    keys that are values too. So it is tried: with biases of random size, the module must compute the same before and after,
    in a pass over an input that is made up, or the technique refuses and changes nothing. Which outputs of which maps are
    keys and values is told by gradients, also where one map makes queries, keys and values.

    **Saves next to nothing**: a few parameters and their optimizer state, and some time where a bias is a kernel of its
    own. A key's bias has a gradient of rounding alone, of which Adam makes whole steps, to no effect.
    ``lightning_eff.export`` gives the plain module back, with biases of zero.

    Logged: ``removed``, how many numbers.

    Args:
        of: which biases: "key", "value" or both; ``[]`` is plain training.
        names: dotted paths of maps that make keys or values, their last parts or patterns; None takes all, ``[]`` is plain
            training.

    Raises:
        ValueError: for other values; at setup or in ``apply``, where no attention is found or its maps have no such bias;
            where the module would compute something else, as with rotary embeddings; where no bias is there that could take
            a value's; for a name that means no map of keys or values, with the nearest ones.

    Sources:
        Geiping & Goldstein 2022, arXiv:2212.14034 (Cramming).
    """

    saves: ClassVar[str] = "some parameters that do nothing; next to no time"
    paper: ClassVar[str] = "Geiping & Goldstein 2022, arXiv:2212.14034"
    constraints: ClassVar[str] = (
        "absolute positions alone: false under rotary embeddings and normed keys; no tensor parallelism"
    )
    survey: ClassVar[Survey | None] = Survey("attention without biases (Cramming)", shen="6")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({}, _pointless)
    control: ClassVar[Control] = Control("the baseline for as many seconds, which computes the same function")
    conflicts: ClassVar[Mapping[str, str]] = {}
    change_at: ClassVar[Change] = Change.SWAP
    _removed = 0

    def __init__(self, of: Sequence[str] = KINDS, *, names: Sequence[str] | None = None) -> None:
        listed = not isinstance(of, str) and isinstance(of, Sequence)
        if listed and "query" in of:
            raise ValueError(
                f"{WHO}({of=}): without a query's bias, each logit is less by b_q k_j, which is another one for each key;"
                " expected 'key' and 'value', of which the module can do without."
            )
        if not listed or not set(of) <= set(KINDS) or len(set(of)) < len(of):
            raise ValueError(f"{WHO}({of=}): expected a list of 'key' and 'value', or [] for plain training.")
        self.of = list(of)
        self.names = check_names(names, who=WHO, what="maps of keys or values", example="layers.3.*")

    @property
    @override
    def neutral(self) -> bool:
        return not self.of or self.names == []

    # -- the change

    @override
    def change(self, surgeon: Surgeon) -> None:
        root = surgeon.root
        every = attended(root, who=WHO, batch=surgeon.batch)
        parts = {id(one): self._parts(one) for one in every}
        weights = dict.fromkeys(p.weight for _, p in (part for found in parts.values() for part in found))
        if self.names is not None:
            paths = [w.removesuffix(".weight") for w in weights]
            check_met(self.names, paths, who=WHO, what="maps of keys or values", root=type(root).__name__)
        maps = maps_by_weight(root)
        gone: dict[str, Tensor] = {}
        moves: dict[str, list[Part]] = {}
        for one in every:
            for role, p in parts[id(one)]:
                if not is_named(p.weight, self.names):
                    continue
                reason = problem(p.weight, maps)
                if reason is not None:
                    raise ValueError(
                        f"{WHO}: {p.weight} cannot do without its bias: {reason}. Name others, or take it out."
                    )
                if maps[p.weight].module.bias is None:
                    continue
                gone[p.weight] = gone.get(p.weight, torch.zeros_like(p.outputs)) | p.outputs
                if role == "value":
                    taken = moves.setdefault(self._taker(one, p, maps), [])
                    if all(p.weight != other.weight for other in taken):  # a layer may run several times
                        taken.append(p)
        if not gone:
            raise ValueError(
                f"{WHO}: the maps of {type(root).__name__} that make {' and '.join(self.of)}s have no bias to take out:"
                f" {', '.join([*weights][:6]) or 'there are none'}. Take the technique out."
            )
        self._check_same(surgeon, every, maps, gone, moves)
        self._removed = sum(int(mask.sum()) for mask in gone.values())
        rank_zero_info(
            f"{WHO}: {self._removed:,} biases of {' and '.join(self.of)}s are gone, in {', '.join([*gone][:4])}."
        )

    def _parts(self, one: Attention) -> list[tuple[str, Part]]:
        return [(role, p) for role in self.of for p in (one.key if role == "key" else one.value)]

    def _taker(self, one: Attention, part: Part, maps: Mapping[str, LinearMap]) -> str:
        """The weight of the map whose bias takes those of the values."""
        where = f"{WHO}: the biases of {part.weight}'s values"
        if len(one.output) != 1 or one.output[0] not in maps:
            raise ValueError(f"{where} have no single linear map behind attention to go to. Give of=['key'].")
        taker = maps[one.output[0]]
        count = int(part.outputs.sum())
        if taker.module.bias is None or problem(one.output[0], dict(maps)) is not None:
            raise ValueError(f"{where} cannot go to {taker}, which has no bias of its own. Give of=['key'].")
        if count != taker.in_features:
            raise ValueError(
                f"{where} are {count}, and {taker} has {taker.in_features} inputs; expected as many, which they are added to."
                " Give of=['key']."
            )
        return one.output[0]

    def _check_same(
        self,
        surgeon: Surgeon,
        every: Sequence[Attention],
        maps: Mapping[str, LinearMap],
        gone: Mapping[str, Tensor],
        moves: Mapping[str, Sequence[Part]],
    ) -> None:
        """Make the change, and see that random biases in those places would have made no difference."""
        root, outputs = surgeon.root, dict.fromkeys(name for one in every for name in one.output if name in maps)
        paths = [maps[name].path for name in outputs]
        biases = {name: _bias(maps[name]) for name in gone}
        saved = {name: b.detach().clone() for name, b in biases.items()}
        generator = torch.Generator().manual_seed(0)
        try:
            with torch.no_grad():
                for name, b in biases.items():
                    drawn = torch.randn(b.shape, generator=generator).to(b)
                    b.copy_(torch.where(gone[name].to(b.device), drawn, b))
            before = _results(root, paths, surgeon.batch)
            drawn_move = {name: self._moved(maps, name, parts) for name, parts in moves.items()}
        finally:
            with torch.no_grad():
                for name, b in biases.items():
                    b.copy_(saved[name])
        true_move = {name: self._moved(maps, name, parts) for name, parts in moves.items()}
        new = {name: rebiased(maps[name], saved[name], ~gone[name].to(saved[name].device)) for name in gone}
        for name, b in true_move.items():
            if name in new:
                raise ValueError(f"{WHO}: {name} makes values and takes them. Give of=['key'].")
            new[name] = rebiased(maps[name], b, torch.ones_like(b, dtype=torch.bool))
        by_id = {id(maps[name].module): m for name, m in new.items()}
        surgeon.swap(lambda path, m: id(m) in by_id, lambda m: by_id[id(m)], what="a map of keys or values")
        with _values(new, drawn_move):
            after = _results(root, paths, surgeon.batch)
        for path, was, now in zip(paths, before, after, strict=True):
            if not _alike(was, now):
                raise ValueError(
                    f"{WHO}: without biases of {' and '.join(self.of)}s, {path} of {type(root).__name__} would put out"
                    " something else: keys are turned by their places or normed, as by rotary embeddings, or are values as"
                    " well. Expected attention to which they make no difference. Take the technique out."
                )

    def _moved(self, maps: Mapping[str, LinearMap], name: str, parts: Sequence[Part]) -> Tensor:
        bias = _bias(maps[name])
        for p in parts:
            values = p.of(_bias(maps[p.weight]).detach())
            bias = bias + (moved(maps[name], values) - _bias(maps[name]))
        return bias.detach()

    # -- what is told

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"removed": self._removed}

    @override
    def summary(self) -> str:
        return f"{self._removed:,} biases of attention are gone" if self._removed else "the module had none already"


def _bias(m: LinearMap) -> Tensor:
    assert isinstance(m.module.bias, Tensor)
    return m.module.bias


def _results(root: nn.Module, paths: Sequence[str], batch: Any) -> list[list[Tensor]]:
    """What the maps behind attention put out, in a pass over an input that is made up."""
    found: list[list[Tensor]] = [[] for _ in paths]
    with ExitStack() as scope:
        for path, kept in zip(paths, found, strict=True):

            def hook(m: nn.Module, args: Any, output: Tensor, kept: list[Tensor] = kept) -> None:
                kept.append(output.detach())

            scope.callback(hook_behind(root.get_submodule(path), hook).remove)
        attended(root, who=WHO, batch=batch)
    return found


@contextmanager
def _values(new: Mapping[str, nn.Module], biases: Mapping[str, Tensor]) -> Iterator[None]:
    """Maps have these biases meanwhile."""
    held = {name: next(p for key, p in new[name].named_parameters() if key != "weight") for name in biases}
    saved = {name: p.detach().clone() for name, p in held.items()}
    with torch.no_grad():
        for name, p in held.items():
            p.copy_(biases[name])
    try:
        yield
    finally:
        with torch.no_grad():
            for name, p in held.items():
                p.copy_(saved[name])


def _alike(was: Sequence[Tensor], now: Sequence[Tensor]) -> bool:
    if len(was) != len(now) or not was:
        return False
    rough = 1e-4 if was[0].dtype in (torch.float32, torch.float64) else 5e-2
    return all(
        a.shape == b.shape and bool((a - b).abs().max() <= rough * (1.0 + a.abs().max()))
        for a, b in zip(was, now, strict=True)
    )
