"""RemoveQKVBias: remove biases of keys and values, which do not change the function (Geiping & Goldstein 2022).

A key's bias adds ``q_i b_k`` to all logits of a query, which softmax ignores. A value's bias adds ``b_v`` to each result,
because a query's weights sum to one: ``W_o (A V + 1 b_v) + b_o = W_o A V + (b_o + W_o b_v)``. ``_attention.rebiased.moved``
computes the new bias.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.linear_maps import LinearMap
from lightning_eff._core._architecture.naming import check_met
from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._architecture.technique import Architecture, Change
from lightning_eff._core._arguments.kinds import SomeOf
from lightning_eff._core._branches.attention import Attention, Part
from lightning_eff._core.passes import restoring
from lightning_eff._core.patches import hook_behind
from lightning_eff._core.search_space import SearchSpace, needs_attention
from lightning_eff._core.technique import Control
from lightning_eff.model.layers._attention.parts import attended, is_meant, maps_by_weight, problem
from lightning_eff.model.layers._attention.rebiased import moved, rebiased
from lightning_eff.model.layers._shared.arguments import Paths
from lightning_eff.model.layers._shared.choosing import ByName

WHO = "RemoveQKVBias"
KINDS = ("key", "value")


class RemoveQKVBias(ByName, Architecture):
    """Remove the biases of attention's keys and values if the module computes the same without them.

    A key's bias changes no output: it shifts all logits of a query equally. A value's bias is moved into the bias of the
    linear layer after attention, which computes the same in evaluation. If attention weights are dropped in training, the
    value's bias is no longer dropped with them. The layer after attention also gets another gradient than before, because its
    inputs lack the bias. A query's bias does change outputs and is never removed.

    This does not hold for rotary embeddings, normalised keys, or a layer whose outputs are both keys and values. The
    technique therefore tests it: with random biases, the module must compute the same before and after the change, on a
    made-up input. Otherwise the technique refuses and changes nothing. Gradients show which outputs of which layers are keys
    and values, also if one layer computes queries, keys and values.

    Use it to drop parameters without effect. **It saves almost nothing**: a few parameters with their optimizer state, and
    some time if a bias is a separate kernel. The gradient of a key's bias is only rounding error, which Adam scales to full
    steps without any effect. ``lightning_eff.export`` returns the plain module with biases of zero. It logs ``removed``, the
    number of parameters.

    Args:
        of: the biases to remove. ``[]`` is plain training.
        names: dotted paths of the linear layers that compute keys or values, their last parts, or patterns, such as
            ``["layers.3.*"]``. None takes all, ``[]`` is plain training.

    Raises:
        ValueError: for a wrong value. At setup or in ``apply``, if there is no attention or no such bias, the module would
            compute something else, no bias can take up a value's bias, or a name matches no layer of keys or values.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[RemoveQKVBias(["key", "value"])])

    References:
        Geiping & Goldstein 2022, "Cramming: Training a Language Model on a Single GPU in One Day", arXiv:2212.14034.
    """

    saves = "some parameters without effect; almost no time"
    paper = "Geiping & Goldstein 2022, arXiv:2212.14034"
    constraints = "attention without rotary embeddings and without normalised keys; no tensor parallelism"
    search_space = SearchSpace({}, needs_attention)
    control = Control("the baseline for the same time, which computes the same function")
    conflicts: ClassVar[Mapping[str, str]] = {}
    change_at = Change.SWAP
    _removed = 0

    def __init__(
        self,
        of: Annotated[
            Sequence[str], SomeOf(KINDS, once=True, hint="A query's bias changes the output, so it stays.")
        ] = KINDS,
        *,
        names: Paths = None,
    ) -> None:
        self.of = list(of)
        self._take_names(names)

    @property
    @override
    def neutral(self) -> bool:
        return not self.of or super().neutral

    # -- the change

    @override
    def change(self, surgeon: Surgeon) -> None:
        root = surgeon.root
        every = attended(root, who=WHO, batch=surgeon.batch)
        parts = {id(one): self._parts(one) for one in every}
        weights = dict.fromkeys(p.weight for _, p in (part for found in parts.values() for part in found))
        if self.names is not None:
            paths = [w.removesuffix(".weight") for w in weights]
            check_met(self.names, paths, who=WHO, what="layers of keys or values", root=type(root).__name__)
        maps = maps_by_weight(root)
        gone: dict[str, Tensor] = {}
        moves: dict[str, list[Part]] = {}
        for one in every:
            for role, p in parts[id(one)]:
                if not is_meant(p.weight, self.names):
                    continue
                reason = problem(p.weight, maps)
                if reason is not None:
                    raise ValueError(
                        f"{WHO}: cannot remove the bias of {p.weight}: {reason}. Name other layers, or remove the callback."
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
                f"{WHO}(of={self.of}): the layers of {type(root).__name__} that compute these have no bias to remove:"
                f" {', '.join([*weights][:5]) or 'there are none'}. Remove the callback."
            )
        self._check_same(surgeon, every, maps, gone, moves)
        self._removed = sum(int(mask.sum()) for mask in gone.values())
        rank_zero_info(
            f"{WHO}: removed {self._removed:,} biases of {' and '.join(self.of)}s, in {', '.join([*gone][:4])}."
        )

    def _parts(self, one: Attention) -> list[tuple[str, Part]]:
        return [(role, p) for role in self.of for p in (one.key if role == "key" else one.value)]

    def _taker(self, one: Attention, part: Part, maps: Mapping[str, LinearMap]) -> str:
        """The weight of the linear layer whose bias takes up those of the values."""
        where = f"{WHO}: the biases of {part.weight}'s values"
        if len(one.output) != 1 or one.output[0] not in maps:
            raise ValueError(f"{where} cannot move, because no single linear layer follows attention. Give of=['key'].")
        taker = maps[one.output[0]]
        count = int(part.outputs.sum())
        if taker.module.bias is None or problem(one.output[0], dict(maps)) is not None:
            raise ValueError(f"{where} cannot move to {taker}, which has no bias. Give of=['key'].")
        if count != taker.in_features:
            raise ValueError(f"{where} are {count}, but {taker} has {taker.in_features} inputs. Give of=['key'].")
        return one.output[0]

    def _check_same(
        self,
        surgeon: Surgeon,
        every: Sequence[Attention],
        maps: Mapping[str, LinearMap],
        gone: Mapping[str, Tensor],
        moves: Mapping[str, Sequence[Part]],
    ) -> None:
        """Make the change, and verify that random biases in those places would have made no difference."""
        root, outputs = surgeon.root, dict.fromkeys(name for one in every for name in one.output if name in maps)
        paths = [maps[name].path for name in outputs]
        biases = {name: _bias(maps[name]) for name in gone}
        saved = {name: b.detach().clone() for name, b in biases.items()}
        generator = torch.Generator().manual_seed(0)
        with restoring(biases.values()):
            with torch.no_grad():
                for name, b in biases.items():
                    drawn = torch.randn(b.shape, generator=generator).to(b)
                    b.copy_(torch.where(gone[name].to(b.device), drawn, b))
            before = _results(root, paths, surgeon.batch)
            drawn_move = {name: self._moved(maps, name, parts) for name, parts in moves.items()}
        true_move = {name: self._moved(maps, name, parts) for name, parts in moves.items()}
        new = {name: rebiased(maps[name], saved[name], ~gone[name].to(saved[name].device)) for name in gone}
        for name, b in true_move.items():
            if name in new:
                raise ValueError(f"{WHO}: {name} computes values and also takes up their biases. Give of=['key'].")
            new[name] = rebiased(maps[name], b, torch.ones_like(b, dtype=torch.bool))
        by_id = {id(maps[name].module): m for name, m in new.items()}
        surgeon.swap(lambda path, m: id(m) in by_id, lambda m: by_id[id(m)], what="a layer of keys or values")
        with _values(new, drawn_move):
            after = _results(root, paths, surgeon.batch)
        for path, was, now in zip(paths, before, after, strict=True):
            if not _alike(was, now):
                raise ValueError(
                    f"{WHO}(of={self.of}): without these biases, {path} of {type(root).__name__} would compute something else:"
                    " its keys have rotary embeddings, are normalised, or are values as well. Remove the callback."
                )

    def _moved(self, maps: Mapping[str, LinearMap], name: str, parts: Sequence[Part]) -> Tensor:
        bias = _bias(maps[name])
        for p in parts:
            values = p.of(_bias(maps[p.weight]).detach())
            bias = bias + (moved(maps[name], values) - _bias(maps[name]))
        return bias.detach()

    # -- reports

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"removed": self._removed}

    @override
    def summary(self) -> str:
        return f"removed {self._removed:,} biases of attention" if self._removed else "the module already had none"


def _bias(m: LinearMap) -> Tensor:
    assert isinstance(m.module.bias, Tensor)
    return m.module.bias


def _results(root: nn.Module, paths: Sequence[str], batch: Any) -> list[list[Tensor]]:
    """The outputs of the linear layers after attention, in a pass on a made-up input."""
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
    """Set these biases until the context ends."""
    held = {name: next(p for key, p in new[name].named_parameters() if key != "weight") for name in biases}
    with restoring(held.values()):
        with torch.no_grad():
            for name, p in held.items():
                p.copy_(biases[name])
        yield


def _alike(was: Sequence[Tensor], now: Sequence[Tensor]) -> bool:
    if len(was) != len(now) or not was:
        return False
    rough = 1e-4 if was[0].dtype in (torch.float32, torch.float64) else 5e-2
    return all(
        a.shape == b.shape and bool((a - b).abs().max() <= rough * (1.0 + a.abs().max()))
        for a, b in zip(was, now, strict=True)
    )
