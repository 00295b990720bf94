"""The base of update rules that multiply a matrix from both sides.

It finds the matrices, folds their tensors into pieces stacked by shape, computes products of all sides, and divides the work
over ranks. Other parameters use Adam.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_eff.optim.optimizers import _lists as lists
from lightning_eff.optim.optimizers._division.shards import aligned, local
from lightning_eff.optim.optimizers._first_order import count, held, keep_dtypes
from lightning_eff.optim.optimizers._matrices import Layout, Split, layout_by_name, layouts_of
from lightning_eff.optim.optimizers._runs import STACKED, limit_for, limit_of, runs
from lightning_eff.optim.optimizers._two_sided.folding import Fold, together, weight
from lightning_eff.optim.optimizers._two_sided.pieces import InPieces


class Kronecker(InPieces):
    """A rule that multiplies each side of a matrix by a separate matrix.

    A subclass implements :meth:`moments` and :meth:`directions`, or :meth:`update_folded` if it sets ``divides`` to False.

    The work is divided over ranks: all of it for DTensors (:class:`InPieces`), and the decompositions (:meth:`each`) for
    parameters that all ranks have whole with equal gradients, as under DDP.

    Attributes:
        divides: whether the rule does so. Otherwise DTensors are refused.
        first_step: the ``step`` of a new state.

    Args:
        params: a module, its ``named_parameters()`` or ``parameters()``, or groups of them.
        defaults: defaults of the groups, with ``lr``, ``betas`` (two), ``eps``, ``weight_decay`` and ``algorithm`` for Adam.
        split: as in :class:`Muon`.
        merge: see :class:`Fold`.
        block: see :class:`Fold`.
        vectors: whether to fold tensors of one dimension too.
        distributed: whether to divide decompositions of whole parameters.

    Raises:
        ValueError: if no parameter is a matrix, a parameter is a DTensor without ``divides``, or a group's algorithm is
            unknown.
    """

    first_step: ClassVar[int] = 0

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        defaults: dict[str, Any],
        *,
        split: Split,
        merge: int,
        block: int | None = None,
        vectors: bool = False,
        distributed: bool = True,
    ) -> None:
        who = type(self).__name__
        if not (split is None or split == "auto" or isinstance(split, Mapping)):
            raise ValueError(f"{who}({split=}): expected 'auto', None, or a mapping of patterns of names to parts.")
        self._split: Split = split
        self._merge, self._block, self._vectors = merge, block, vectors
        self._start(distributed=distributed)
        self._known = layouts_of(params if isinstance(params, nn.Module) else None, split)
        if isinstance(params, nn.Module):
            params = [(name, p) for name, p in params.named_parameters() if p.requires_grad]
        super().__init__(params, {**defaults, "algorithm": None})
        self._known = None
        if not self._folds:
            shapes = [tuple(p.shape) for group in self.param_groups for p in group["params"]]
            raise ValueError(
                f"{who}: no hidden matrix among {len(shapes)} parameters (shapes {shapes[:6]}"
                f"{' ...' if len(shapes) > 6 else ''}); expected weights of linear layers or convolutions, without embeddings"
                f' and heads. Use AdamW, or name the matrices in a parameter group with "algorithm": "{who.lower()}".'
            )

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, and find its matrices by names and shapes."""
        super().add_param_group(param_group)
        group, who = self.param_groups[-1], type(self).__name__
        if group["algorithm"] not in (None, who.lower(), "adamw"):
            raise ValueError(
                f'{who}: a parameter group has "algorithm": {group["algorithm"]!r}; expected "{who.lower()}", "adamw" or none.'
            )
        names = group.get("param_names") or [None] * len(group["params"])
        for name, p in zip(names, group["params"], strict=True):
            if isinstance(p, DTensor) and not self.divides:
                raise ValueError(
                    f"{who}: {name or 'a parameter'} of shape {tuple(p.shape)} is a DTensor, divided over ranks; expected whole"
                    " parameters, because each side of a matrix is multiplied as a whole. Use DDP, or Muon, SOAP or"
                    " Shampoo, which divide the work."
                )
            if p.is_complex():
                raise ValueError(
                    f"{who}: {name or 'a parameter'} of shape {tuple(p.shape)} is complex; expected real numbers."
                )
            fold = self._fold_of(name, p, group["algorithm"])
            if fold is not None:
                self._folds[p] = fold

    def _fold_of(self, name: str | None, p: Tensor, algorithm: str | None) -> Fold | None:
        if algorithm == "adamw" or not p.numel():
            return None
        if p.ndim < 2:
            if algorithm is not None and not self._vectors:
                raise ValueError(
                    f'{type(self).__name__}: a group with "algorithm": {algorithm!r} holds {name or "a parameter"} of shape'
                    f" {tuple(p.shape)}; expected two dimensions or more. Put it into another group."
                )
            return Fold(None, self._merge, self._block) if self._vectors and p.ndim else None
        known = self._known
        layout = known[id(p)] if known is not None and id(p) in known else layout_by_name(name, p, self._split)
        if layout is None and algorithm is not None:
            layout = Layout("matrix" if p.ndim == 2 else "convolution")
        return None if layout is None else Fold(layout, self._merge, self._block)

    # -- a step

    @override
    def begin(self, p: Tensor) -> dict[str, Any]:
        if p not in self._folds:
            return {"step": 0}
        return {"step": self.first_step, **({} if isinstance(p, DTensor) else self.moments(p))}

    @override
    def update(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]
    ) -> None:
        def of(chosen: list[int]) -> tuple[list[Tensor], list[Tensor], list[dict[str, Any]]]:
            return [params[i] for i in chosen], [grads[i] for i in chosen], [states[i] for i in chosen]

        apart = [i for i, p in enumerate(params) if p not in self._folds]
        if apart:
            adam(self.adam_settings(group), *of(apart))
        whole: list[int] = []
        spread: dict[DeviceMesh, list[int]] = {}
        for i, p in enumerate(params):
            if p in self._folds:
                (spread.setdefault(p.device_mesh, []) if isinstance(p, DTensor) else whole).append(i)
        # matrices in chunks that bound the memory of a step
        for some in self._chunks(params, whole, self._division.share):
            self.update_folded(group, *of(some))
        for mesh, chosen in spread.items():
            for some in self._chunks(params, chosen, mesh.size()):
                self.update_pieces(mesh, group, *of(some))

    def _chunks(self, params: list[Tensor], chosen: list[int], ranks: int) -> Iterator[list[int]]:
        """Split the indices of matrices into chunks for a number of ranks. Parameters of one shape are adjacent."""
        if not chosen:
            return iter(())
        first: dict[torch.Size, int] = {}
        for i in chosen:
            first.setdefault(params[i].shape, i)
        ordered = sorted(chosen, key=lambda i: first[params[i].shape])
        stand_ins = [(p, torch.empty(p.shape, dtype=p.dtype, device="meta")) for p in (params[i] for i in ordered)]
        sizes = [sum(map(weight, self._folds[p].apart(like))) for p, like in stand_ins]
        return runs(ordered, sizes, limit_for(params[chosen[0]], STACKED, sizes, ranks))

    def adam_settings(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return Adam's settings for a group."""
        return group

    def update_folded(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]
    ) -> None:
        """Update whole matrices and their ``states`` in place."""
        for state in states:
            state["step"] += 1
        updates = self.directions(group, [self._folds[p] for p in params], grads, states)
        moving = [i for i, state in enumerate(states) if self.moves(state["step"])]
        if moving:
            self.move(group, [params[i] for i in moving], [updates[i] for i in moving])

    @override
    def move(self, group: dict[str, Any], targets: list[Tensor], updates: list[Tensor]) -> None:
        """``W := W - lr lambda W - lr U``."""
        lr = group["lr"]
        if group["weight_decay"]:
            lists.mul_(targets, 1 - lr * group["weight_decay"])
        lists.add_(targets, [u.to(p.dtype) for u, p in zip(updates, targets, strict=True)], alpha=-lr)

    def each(self, matrices: list[Tensor], work: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Return ``work`` of each matrix (d, d), which is divided over ranks that have equal matrices.

        Args:
            matrices: the matrices.
            work: computes a stack (n, d, d) of results from one of matrices.
        """

        if not matrices or self._alone or self._division.idle:
            return _each(matrices, work)
        dtypes = [one.dtype for one in matrices]
        return self._division.run(matrices, lambda some: _each(some, work), dtypes)

    def buckets(
        self, folds: Sequence[Fold], grads: Sequence[Tensor], keys: Sequence[Any]
    ) -> Iterator[tuple[Any, list[tuple[int, int]]]]:
        """Group pieces that can be stacked: (gradient, piece) by shape, dtype, device and the gradient's key.

        A key comes several times if its pieces are too large for one stack.
        """
        found: dict[Any, list[tuple[int, int]]] = {}
        sizes: dict[tuple[int, ...], int] = {}
        for i, (fold, grad, key) in enumerate(zip(folds, grads, keys, strict=True)):
            for j, piece in enumerate(fold.apart(grad)):
                found.setdefault((tuple(piece.shape), grad.dtype, grad.device, key), []).append((i, j))
                sizes[tuple(piece.shape)] = weight(piece)
        for key, members in found.items():
            for some in runs(members, [sizes[key[0]]] * len(members), limit_of(grads[0], STACKED)):
                yield key, some

    # -- state that torch.optim.Optimizer would lose

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, with each tensor in its saved dtype."""
        super().load_state_dict(state_dict)
        keep_dtypes(self, state_dict)
        self._division.forget()

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the state in a form that does not depend on the layout; collective if parameters are DTensors."""
        found = super().state_dict()
        spread: dict[Tensor, dict[str, Any]] = {}
        self.show_state(spread)
        for i, p in enumerate(self._parameters()):
            if p in spread:
                found["state"][i] = spread[p]
        return found

    def __getstate__(self) -> dict[str, Any]:
        own = ("_split", "_merge", "_block", "_vectors", "_folds", "_known", "_division", "_alone", "_failure")
        return {
            **super().__getstate__(),
            **{name: getattr(self, name) for name in own},
            "_matrices": {},
            "_planned": {},
        }


def _each(matrices: list[Tensor], work: Callable[[Tensor], Tensor]) -> list[Tensor]:
    if matrices and matrices[0].device.type == "cpu":
        # one by one, as LAPACK does it anyway: where a matrix begins in a stack shows in the last bits of its result
        return [work(one.unsqueeze(0))[0] for one in matrices]
    found = list(matrices)
    for side in dict.fromkeys(len(one) for one in matrices):
        alike = [i for i, one in enumerate(matrices) if len(one) == side]
        for i, one in zip(alike, work(together([matrices[i] for i in alike])).unbind(), strict=True):
            found[i] = one
    return found


def adam(group: dict[str, Any], params: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]) -> None:
    """Do AdamW's step on ``params`` in place."""
    (b1, b2), lr, steps = group["betas"], group["lr"], count(states)
    for p, state in zip(params, states, strict=True):
        if "exp_avg" not in state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
    # element by element, so also on pieces of DTensors
    m, v = ([local(x) for x in held(states, name)] for name in ("exp_avg", "exp_avg_sq"))
    grads, params = [aligned(g, p) for g, p in zip(grads, params, strict=True)], [local(p) for p in params]
    # m := b1 m + (1 - b1) g;  v := b2 v + (1 - b2) g^2
    lists.lerp_(m, grads, 1 - b1)
    lists.mul_(v, b2)
    lists.addcmul_(v, grads, grads, 1 - b2)
    # w := w - lr lambda w - lr m^ / (sqrt(v^) + eps)
    under = lists.sqrt(v)
    lists.div_(under, [(1 - b2**t) ** 0.5 for t in steps])
    lists.add_(under, group["eps"])
    if group["weight_decay"]:
        lists.mul_(params, 1 - lr * group["weight_decay"])
    lists.addcdiv_(params, m, under, [-lr / (1 - b1**t) for t in steps])
