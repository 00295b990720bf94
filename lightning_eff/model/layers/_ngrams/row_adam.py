"""Adam on the rows of tables that have a gradient, like ``torch.optim.SparseAdam``, for sparse and dense gradients."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override


def touched(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of a gradient that are not all zero: their numbers, ascending, (K,), and their values, (K, D).

    Args:
        gradient: (R, D), sparse by rows or dense.
    """
    if gradient.layout == torch.sparse_coo:
        gradient = gradient.coalesce()
        rows, values = gradient.indices()[0], gradient.values()
        some = (values != 0).any(1)
        return rows[some], values[some]
    rows = (gradient != 0).any(1).nonzero()[:, 0]
    return rows, gradient.index_select(0, rows)


@torch.no_grad()
def row_adam(
    w: Tensor,
    rows: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    *,
    t: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
) -> int:
    """Take one step of Adam in ``rows``, in place; all other rows of ``w``, ``m`` and ``v`` stay unchanged bit for bit.

    The bias is corrected by ``t``, the number of the table's steps, whichever of them a row took part in::

        m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
        w = w - lr sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + eps)

    Args:
        w: the table, (R, D).
        rows: different rows, (K,).
        g: their gradients, (K, D).
        m: the means of gradients, (R, D).
        v: the means of their squares, (R, D).
        t: the number of steps so far, including this one.
        lr: the learning rate.
        betas: (b1, b2).
        eps: keeps the denominator away from zero.

    Returns:
        The number of elements written.
    """
    b1, b2 = betas
    # m := b1 m + (1 - b1) g;  v := b2 v + (1 - b2) g^2
    m_rows = m.index_select(0, rows).lerp_(g, 1 - b1)
    v_rows = v.index_select(0, rows).mul_(b2).addcmul_(g, g, value=1 - b2)
    # w := w - lr sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + eps)
    size = lr * (1 - b2**t) ** 0.5 / (1 - b1**t)
    w_rows = w.index_select(0, rows).addcdiv_(m_rows, v_rows.sqrt().add_(eps), value=-size)
    for whole, part in ((m, m_rows), (v, v_rows), (w, w_rows)):
        whole.index_copy_(0, rows, part)
    return m_rows.numel() + v_rows.numel() + w_rows.numel()


class RowAdam(Optimizer):
    """Adam for tables: a step updates only the rows that have a gradient, and reads and writes no others.

    With sparse gradients it is ``torch.optim.SparseAdam``, except that rows whose gradient is all zero count as rows without
    one. A dense gradient therefore gives the same steps. The means of rows without a gradient do not decay.

    Args:
        params: tables, (R, D).
        lr: the learning rate, >= 0.
        betas: the decay of the means of gradients and of their squares, each in [0, 1).
        eps: > 0, keeps the denominator away from zero.

    Attributes:
        written: the number of elements written in the last step.
        rows: the number of rows updated in it.

    Raises:
        ValueError: for other values, or a tensor that is not a table.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        if not lr >= 0.0 or not all(0.0 <= beta < 1.0 for beta in betas) or not eps > 0.0:
            raise ValueError(f"RowAdam({lr=}, {betas=}, {eps=}): expected lr >= 0, betas in [0, 1), eps > 0.")
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps})
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.ndim != 2:
                raise ValueError(f"RowAdam: got a tensor of shape {tuple(p.shape)}; expected tables, (rows, features).")
        self.written = self.rows = 0

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.written = self.rows = 0
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["step"] += 1
                rows, g = touched(p.grad)
                self.rows += rows.numel()
                self.written += row_adam(
                    p,
                    rows,
                    g,
                    state["exp_avg"],
                    state["exp_avg_sq"],
                    t=state["step"],
                    lr=float(group["lr"]),
                    betas=group["betas"],
                    eps=group["eps"],
                )
        return loss
