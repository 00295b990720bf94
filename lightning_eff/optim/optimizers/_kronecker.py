"""The base of update rules that multiply a matrix from both sides.

It finds the matrices, folds their tensors into pieces stacked by shape, and computes products of all sides. Other parameters
use Adam.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff.optim.optimizers import _lists as lists
from lightning_eff.optim.optimizers._first_order import FirstOrder, count, held, keep_dtypes
from lightning_eff.optim.optimizers._matrices import Layout, Split, layout_by_name, layouts_of
from lightning_eff.optim.optimizers._runs import STACKED, limit_of, runs


@dataclass(frozen=True)
class Fold:
    """Folds the tensor of one parameter into pieces with one side per dimension.

    Attributes:
        layout: matrices in the tensor; None uses the tensor unchanged.
        merge: largest product up to which a convolution's kernel is merged into its inputs; otherwise it is a separate side.
        block: largest side of a piece; None means no limit.
    """

    layout: Layout | None
    merge: int
    block: int | None = None

    def apart(self, tensor: Tensor) -> list[Tensor]:
        """Return the pieces, which are views of ``tensor`` if it is contiguous."""
        if self.layout is None:
            pieces = [tensor]
        elif self.layout.form == "convolution":
            pieces = [tensor.reshape(merged(tuple(tensor.shape), self.merge))]
        else:
            pieces = self.layout.apart(tensor)
        if self.block is None:
            return pieces
        for dim in range(pieces[0].ndim):
            pieces = [part for piece in pieces for part in piece.split(self.block, dim)]
        return pieces


def merged(shape: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """Merge (out, in, h, w, ...) to (out, in * h * w ...) if the product is at most ``limit``.

    Otherwise merge it to (out, in, h * w ...). Kernel sides with a larger product are not merged.
    """
    found: list[int] = []
    for size in reversed(shape[1:]):
        if found and found[0] * size <= limit:
            found[0] *= size
        else:
            found.insert(0, size)
    return (shape[0], *found)


def unfolded(stack: Tensor, dim: int) -> Tensor:
    """Return pieces (n, d_0, d_1, ...) as matrices (n, d_dim, product of the rest)."""
    return stack.movedim(dim + 1, 1).flatten(2) if stack.ndim > 2 else stack.unsqueeze(-1)


def multiplied(stack: Tensor, matrices: Mapping[int, Tensor], *, transposed: bool = False) -> Tensor:
    """Multiply each side of each piece by its matrix: for two sides ``A^T X B``, or ``A X B^T`` if ``transposed``.

    Args:
        stack: pieces ``X``, (n, d_0, d_1, ...).
        matrices: matrices (n, d, d) by side.
        transposed: see above.
    """
    for dim, matrix in matrices.items():
        last = stack.movedim(dim + 1, -1)
        flat = last.reshape(last.shape[0], -1, last.shape[-1])
        done = torch.bmm(flat, matrix.mT if transposed else matrix)
        stack = done.view(last.shape).movedim(-1, dim + 1)
    return stack


def outer(stack: Tensor, sides: Iterable[int]) -> dict[int, Tensor]:
    """Return ``X X^T`` for each of ``sides``, summed over the others: (n, d, d) for pieces (n, d_0, d_1, ...)."""
    found: dict[int, Tensor] = {}
    for dim in sides:
        x = unfolded(stack, dim)
        found[dim] = torch.bmm(x, x.mT)
    return found


def together(pieces: list[Tensor]) -> Tensor:
    """Return pieces of one shape as one tensor: a copy, or a view if there is one piece."""
    return pieces[0].unsqueeze(0) if len(pieces) == 1 else torch.stack(pieces)


def weight(piece: Tensor) -> int:
    """Return the bytes of a piece and of one matrix for each of its sides."""
    return (piece.numel() + sum(side * side for side in piece.shape)) * working(piece.dtype).itemsize


def working(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for products and roots."""
    return torch.promote_types(dtype, torch.float32)


class Kronecker(FirstOrder):
    """A rule that multiplies each side of a matrix by a separate matrix; a subclass implements :meth:`update_folded`.

    Args:
        params: a module, its ``named_parameters()`` or ``parameters()``, or groups of them.
        defaults: defaults of the groups, with ``lr``, ``betas`` (two), ``eps``, ``weight_decay`` and ``algorithm`` for Adam.
        split: as in :class:`Muon`.
        merge: see :class:`Fold`.
        block: see :class:`Fold`.
        vectors: whether to fold tensors of one dimension too.

    Raises:
        ValueError: if no parameter is a matrix, a parameter is a DTensor, or a group's algorithm is unknown.
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        defaults: dict[str, Any],
        *,
        split: Split,
        merge: int,
        block: int | None = None,
        vectors: bool = False,
    ) -> None:
        who = type(self).__name__
        if not (split is None or split == "auto" or isinstance(split, Mapping)):
            raise ValueError(f"{who}({split=}): expected 'auto', None, or a mapping of patterns of names to parts.")
        self._split: Split = split
        self._merge, self._block, self._vectors = merge, block, vectors
        self._folds: dict[Tensor, Fold] = {}
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
            if hasattr(p, "full_tensor"):
                raise ValueError(
                    f"{who}: {name or 'a parameter'} of shape {tuple(p.shape)} is a DTensor, divided over ranks; expected whole"
                    " parameters, because each side of a matrix is multiplied as a whole. Use DDP, or Muon, which gathers."
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

    @override
    def update(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]
    ) -> None:
        for folds in (False, True):
            chosen = [i for i, p in enumerate(params) if (p in self._folds) == folds]
            # matrices in chunks that bound the memory of a step
            for some in self._chunks(params, chosen) if folds else [chosen] if chosen else []:
                act, settings = (self.update_folded, group) if folds else (adam, self.adam_settings(group))
                act(settings, [params[i] for i in some], [grads[i] for i in some], [states[i] for i in some])

    def _chunks(self, params: list[Tensor], chosen: list[int]) -> Iterator[list[int]]:
        """Split the indices of matrices into chunks. Parameters of one shape are adjacent."""
        first: dict[torch.Size, int] = {}
        for i in chosen:
            first.setdefault(params[i].shape, i)
        ordered = sorted(chosen, key=lambda i: first[params[i].shape])
        sizes = [sum(map(weight, self._folds[params[i]].apart(params[i]))) for i in ordered]
        return runs(ordered, sizes, limit_of(params[chosen[0]], STACKED) if chosen else 0)

    def adam_settings(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return Adam's settings for a group."""
        return group

    def update_folded(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]
    ) -> None:
        """Update matrices and their ``states`` in place."""
        raise NotImplementedError

    def buckets(self, params: list[Tensor], keys: list[Any]) -> Iterator[tuple[Any, list[tuple[int, int]]]]:
        """Group pieces that can be stacked: (parameter, piece) by shape, dtype, device and the parameter's key.

        A key comes several times if its pieces are too large for one stack.
        """
        found: dict[Any, list[tuple[int, int]]] = {}
        sizes: dict[tuple[int, ...], int] = {}
        for i, (p, key) in enumerate(zip(params, keys, strict=True)):
            for j, piece in enumerate(self._folds[p].apart(p)):
                found.setdefault((tuple(piece.shape), p.dtype, p.device, key), []).append((i, j))
                sizes[tuple(piece.shape)] = weight(piece)
        for key, members in found.items():
            for some in runs(members, [sizes[key[0]]] * len(members), limit_of(params[0], STACKED)):
                yield key, some

    # -- state that torch.optim.Optimizer would lose

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, with each tensor in its saved dtype."""
        super().load_state_dict(state_dict)
        keep_dtypes(self, state_dict)

    def __getstate__(self) -> dict[str, Any]:
        own = ("_split", "_merge", "_block", "_vectors", "_folds", "_known")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}


def adam(group: dict[str, Any], params: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]) -> None:
    """Do AdamW's step on ``params`` in place."""
    (b1, b2), lr, steps = group["betas"], group["lr"], count(states)
    for p, state in zip(params, states, strict=True):
        if "exp_avg" not in state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
    m, v = held(states, "exp_avg"), held(states, "exp_avg_sq")
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


def sides(shape: tuple[int, ...], max_dim: int | None = None) -> list[int]:
    """Return the sides of a piece that have a matrix: those longer than one and at most ``max_dim``."""
    return [dim for dim, size in enumerate(shape) if size > 1 and (max_dim is None or size <= max_dim)]
