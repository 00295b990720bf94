"""Token embeddings that also look up rows of other tables, and the search for the embedding that feeds a stack of blocks."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.derived import Derived, derived
from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._attention.inside import Place
from lightning_eff._core._branches.probing import aside
from lightning_eff._core._tokens.embeddings import token_embeddings
from lightning_eff._core.blocks import Candidate
from lightning_eff._core.patches import hook_behind
from lightning_eff.model.shortcuts._carried import Carried, rerunning
from lightning_eff.model.shortcuts._valued import attention_of_each

TABLE = "value_table"


class Tabled(Derived):
    """A token embedding with tables of values for attention.

    Attributes:
        carried: gets the rows (B, H, T, E) of each call, by the table's index.
        heads: H of each table.
        batch_first: whether ids have shape (B, T) instead of (T, B).
        undecayed: the tables' names, because they have no weight decay.
    """

    prefix = "Tabled"
    as_before = ("weight",)  # heads keep using it

    carried: Carried
    heads: tuple[int, ...]
    batch_first: bool
    undecayed: tuple[str, ...]

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not rerunning():
            self._look_up(cast(Tensor, args[0] if args else next(iter(kwargs.values()))))
        return super().forward(*args, **kwargs)

    def _look_up(self, ids: Tensor) -> None:
        if ids.ndim != 2:
            raise ValueError(
                f"{self.carried.who}: the token embedding got ids of shape {tuple(ids.shape)}; expected (B, T), to know which"
                f" values are theirs. Do not flatten ids before the embedding, or remove {self.carried.who}."
            )
        self.carried.begin()
        for i, heads in enumerate(self.heads):
            rows = F.embedding(ids if self.batch_first else ids.T, cast(Tensor, self._parameters[f"{TABLE}_{i}"]))
            self.carried.put(i, rows.unflatten(-1, (heads, -1)).transpose(1, 2))  # (B, H, T, E)


def tabled(plain: nn.Module, carried: Carried, tables: Sequence[tuple[int, Tensor]], *, batch_first: bool) -> Tabled:
    """Return an embedding with ``plain``'s class, parameters and settings, and tables: H and the first values, (V, H E)."""
    names = [f"{TABLE}_{i}" for i in range(len(tables))]
    made = derived(
        Tabled,
        plain,
        carried=carried,
        heads=tuple(heads for heads, _ in tables),
        batch_first=batch_first,
        undecayed=(*getattr(plain, "undecayed", ()), *names),
    )
    for name, (_, first) in zip(names, tables, strict=True):
        made.register_parameter(name, nn.Parameter(first))
    return made


class _LookUp(NamedTuple):
    """A call of an embedding."""

    path: str
    ids: Any
    output: Any


class Source(NamedTuple):
    """An embedding and the attentions whose values are those of its ids.

    Attributes:
        path: the embedding's path.
        batch_first: whether its ids have shape (B, T) instead of (T, B).
        attentions: by the block's index, the path and the call.
    """

    path: str
    batch_first: bool
    attentions: dict[int, tuple[str, Place]]


def source_of(surgeon: Surgeon, found: Candidate, names: str | Sequence[str] | None, *, who: str) -> Source:
    """Return the token embedding that feeds a chain of blocks, from a pass and its gradients.

    Args:
        surgeon: the technique's surgeon.
        found: the chain.
        names: the embeddings to choose from; None finds them.
        who: the technique's name.

    Raises:
        ValueError: if no token embedding is found, or it is ambiguous; if blocks attend at several places; if the values of the
            first block do not belong to the ids of the pass's last look-up, one by one.
    """
    modules = {id(m): (path, m) for path, m in token_embeddings(surgeon.root, names, who=who).items()}
    calls: list[_LookUp] = []

    def noting(path: str) -> Any:
        def note(m: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            calls.append(_LookUp(path, args[0] if args else next(iter(kwargs.values())), output))

        return note

    with ExitStack() as scope:
        for path, m in modules.values():
            scope.callback(hook_behind(m, noting(path), with_kwargs=True).remove)
        group = attention_of_each(surgeon, found, who=who)
    _, path, place = group[0]
    value = place.call.value  # (B, H, S, E)
    with aside(surgeon.root):  # as in the pass, because blocks may run again for the gradients
        used, why = _used(value, calls)
    if used is None:
        raise ValueError(
            f"{who}: the values of {path} {why}, in {place.of}, and {who} needs the id of each value. Name another embedding by"
            f" embeddings= or another stack by layers=, or remove {who}."
        )
    for _, other, its in group:
        have, want = (its.call.value.shape[0], its.tokens), (value.shape[0], value.shape[2])
        if have != want:
            raise ValueError(
                f"{who}: {path} has values of {want} samples and tokens, but {other} of {have}. Name another stack by layers=,"
                f" or remove {who}."
            )
    return Source(used[0], used[1], {i: (path, place) for i, path, place in group})


def _used(value: Tensor, calls: Sequence[_LookUp]) -> tuple[tuple[str, bool] | None, str]:
    """Return the path of the embedding of whose ids ``value`` is, and whether its ids are (B, T); or None and why not."""
    calls = [one for one in calls if isinstance(one.output, Tensor) and one.output.requires_grad]
    if not value.requires_grad or not calls:
        return None, "were not seen to follow from a look-up of tokens"
    drawn = torch.Generator().manual_seed(0)
    weights = torch.rand(value[0, :, -1].shape, generator=drawn, dtype=torch.float32).to(value)
    last = (value[0, :, -1] * weights).sum()
    gradients = torch.autograd.grad(last, [one.output for one in calls], allow_unused=True, retain_graph=True)
    those = [(one, g) for one, g in zip(calls, gradients, strict=True) if g is not None]
    if not those:
        return None, "do not follow from a look-up of tokens"
    if len(those) > 1 or those[0][0] is not calls[-1]:
        return None, f"follow from {len(those)} of {len(calls)} look-ups of tokens, and not from the last one alone"
    (path, ids, _), g = those[0]
    samples, _, tokens, _ = value.shape
    if not isinstance(ids, Tensor) or ids.ndim != 2 or g.ndim != 3:
        return None, "follow from ids that are not (B, T)"
    own = g.abs().amax(-1) > 0  # the ids on which the last value of the first sample depends
    told = bool(own.any())  # first weights of zero tell nothing
    fits = [
        first
        for first, (at, shape) in {True: ((0, -1), (samples, tokens)), False: ((-1, 0), (tokens, samples))}.items()
        if tuple(ids.shape) == shape and (own[at] or not told)
    ]
    if not fits:
        return None, f"of shape {tuple(value.shape)} are not those of its ids of shape {tuple(ids.shape)}, one by one"
    if tokens > 2 and int(own.sum()) >= tokens:
        return None, "each depend on all tokens"
    return (path, fits[0]), ""
