"""The token embedding with a table of n-grams, and the row of the table for each n-gram.

A row is the n-gram's number in base ``vocabulary`` if the table has a row for each, and a hash otherwise: a linear function
as in Carter & Wegman 1979 (J. Comput. Syst. Sci. 18), mixed, in integers that fit in 64 bits and are the same on every
device.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

from lightning_eff._core._architecture.derived import Derived, derived
from lightning_eff._core._architecture.folding import CannotFold

PRIME = 2**31 - 1
#: A primitive root of it whose powers spread n-tuples evenly up to n = 6 (Fishman & Moore 1986, SIAM J. Sci. Stat. Comput. 7).
MULTIPLIER = 950_706_376


def mixed(x: Tensor) -> Tensor:
    """A permutation of the numbers below 2^32 that breaks up the lattice of multiples of a constant (by Mueller)."""
    for _ in range(2):
        x = (((x >> 16) ^ x) * 0x45D9F3B) & 0xFFFFFFFF
    return (x >> 16) ^ x


def ngram_rows(ids: Tensor, n: int, rows: int, *, vocabulary: int, padding: int | None = None, dim: int = 1) -> Tensor:
    """The row of the n-gram that ends at each position; ``rows``, one past the last, where there is none.

    With the n-gram ``x[t-n+1 .. t]``, the vocabulary V, R rows, and the constants p and a of this file::

        row = sum_k x[t-k] V^k                            if V^n <= R
        row = mix(sum_k (a^(k+1) mod p) x[t-k] mod p) mod R   else

    There is none at the first n - 1 positions, nor where one of the n ids is ``padding``.

    Args:
        ids: in [0, V), of any integer dtype.
        n: the number of ids in an n-gram, >= 1.
        rows: R.
        vocabulary: V.
        padding: the id that stands for no token, or None.
        dim: the dimension along which tokens follow one another.

    Returns:
        int64, the shape of ``ids``.
    """
    x = ids.long()
    length = x.shape[dim] - n + 1
    if length < 1:
        return torch.full_like(x, rows)
    exact = vocabulary**n <= rows
    row = torch.zeros_like(x.narrow(dim, 0, length))
    absent = torch.zeros_like(row, dtype=torch.bool)
    for k in range(n):
        part = x.narrow(dim, n - 1 - k, length)  # x[t-k]
        row = row + (part * vocabulary**k if exact else part * pow(MULTIPLIER, k + 1, PRIME) % PRIME)
        if padding is not None:
            absent = absent | (part == padding)
    if not exact:
        row = mixed(row % PRIME) % rows
    if padding is not None:
        row = row.masked_fill(absent, rows)
    before = [0, 0] * (x.ndim - 1 - dim) + [n - 1, 0]
    return F.pad(row, before, value=rows)


class RowLookup(torch.autograd.Function):
    """``weight[rows]`` with a sparse gradient that has each row once, equal to the dense gradient bit for bit.

    Sparse gradients therefore change only the cost. Torch's sparse gradients have a row for each look-up, and add them up in
    another order.
    """

    @staticmethod
    @override
    def forward(ctx: Any, weight: Tensor, rows: Tensor, padding: int) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape, ctx.padding = weight.shape, padding
        return F.embedding(rows, weight)

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (rows,) = ctx.saved_tensors
        met, place = rows.unique(return_inverse=True)  # ascending
        values = torch.ops.aten.embedding_dense_backward(gradient, place, met.numel(), -1, False)
        kept = met != ctx.padding
        values, met = values[kept], met[kept]
        return (
            torch.sparse_coo_tensor(met[None], values, ctx.shape, check_invariants=False, is_coalesced=True),
            None,
            None,
        )


class NgramTable(nn.Embedding):
    """Rows for n-grams, and a last one that stays zero for positions without an n-gram.

    With ``sparse`` set, gradients are those of :class:`RowLookup`.
    """

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__(rows + 1, dim, padding_idx=rows)

    @override
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    @override
    def forward(self, input: Tensor) -> Tensor:
        if self.sparse and torch.is_grad_enabled():
            return cast(Tensor, RowLookup.apply(self.weight, input, self.padding_idx))
        return super().forward(input)


class Ngrams(Derived, nn.Embedding):
    """An embedding that adds the row of each n-gram to its output.

    N-grams of several orders share one table, with the rows of each order after those of the order before.
    """

    prefix = "Ngram"
    as_before = ("weight",)  # heads keep using it

    ngrams: NgramTable
    orders: tuple[int, ...]
    rows: tuple[int, ...]  #: the number of rows of each order
    batch_first: bool

    @override
    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        plain = super().forward(input, *args, **kwargs)
        if input.ndim != 2:
            raise ValueError(
                f"NgramEmbedding: the token embedding got ids of shape {tuple(input.shape)}; expected (B, T), to know the order"
                " of the tokens. Do not flatten ids before the embedding."
            )
        added = self.ngrams(self.rows_of(input, 1 if self.batch_first else 0))
        return plain + (added[0] if len(self.orders) == 1 else added.sum(0)).to(plain.dtype)

    def rows_of(self, ids: Tensor, dim: int) -> Tensor:
        """The table's row of each n-gram, (K, B, T) for K orders and ids (B, T)."""
        none, found, first = self.ngrams.num_embeddings - 1, [], 0
        for n, rows in zip(self.orders, self.rows, strict=True):
            row = ngram_rows(ids, n, rows, vocabulary=self.num_embeddings, padding=self.padding_idx, dim=dim)
            found.append(torch.where(row == rows, none, row + first))
            first += rows
        return torch.stack(found)

    def exact(self, order: int) -> bool:
        """Whether each n-gram of an order has its own row; ``order`` is an index into ``orders``."""
        return self.num_embeddings ** self.orders[order] <= self.rows[order]

    def fold(self) -> Mapping[str, Tensor]:
        """The plain embedding's weight, if n is 1."""
        if max(self.orders) > 1:
            raise CannotFold(
                f"its output depends on {max(self.orders)} tokens, and that of nn.Embedding on one. Keep the module, and"
                " build it with lightning_eff.apply(plain, NgramEmbedding(...)) to load its checkpoints"
            )
        if self.max_norm is not None or type(self).__bases__[1].forward is not nn.Embedding.forward:
            raise CannotFold(f"the output of {type(self).__bases__[1].__name__} is not just rows of its weight")
        ids = torch.arange(self.num_embeddings, device=self.weight.device)[None]
        added = self.ngrams.weight[self.rows_of(ids, 1)[0, 0]]
        return {"weight": self.weight + added.to(self.weight.dtype) if bool(added.any()) else self.weight}

    @override
    def extra_repr(self) -> str:
        kinds = ", ".join(f"n={n} {'exact' if self.exact(k) else 'hashed'}" for k, n in enumerate(self.orders))
        return f"{super().extra_repr()}, {kinds}"


def beside(
    plain: nn.Embedding, table: NgramTable, orders: Sequence[int], rows: Sequence[int], *, batch_first: bool
) -> Ngrams:
    """An embedding with ``plain``'s class, parameters and settings that adds ``table``.

    Args:
        plain: the embedding.
        table: has as many rows as all orders together.
        orders: the number of tokens of each n-gram, without repetitions.
        rows: the number of rows of each order.
        batch_first: whether ids have shape (B, T).
    """
    made = derived(Ngrams, plain, orders=tuple(orders), rows=tuple(rows), batch_first=batch_first)
    made.ngrams = table
    return made
