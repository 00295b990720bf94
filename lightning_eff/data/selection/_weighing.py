"""Draw samples of a batch by their scores, and train on the weighted mean of their losses."""

from typing import Any

import torch
from torch import Tensor

from lightning_eff._core._samples.functions import SampleLoss
from lightning_eff._core._samples.scoring import Scores, sample_losses
from lightning_eff._core.losses import WeighLosses
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Around, Proceed


def probabilities(scores: Tensor) -> Tensor:
    """Compute ``p_i = g_i / sum_j g_j``, or ``1/B`` if all scores are 0, shape (B,), float64."""
    g = scores.double()
    return g / g.sum() if g.sum() > 0 else torch.full_like(g, 1 / len(g))


def draw(p: Tensor, b: int, generator: torch.Generator) -> Tensor:
    """Draw ``b`` indices with replacement and probabilities ``p``, long. An index with ``p = 0`` is never drawn."""
    cdf = p.double().cumsum(0)
    u = torch.rand(b, dtype=torch.float64, generator=generator) * cdf[-1]
    return torch.searchsorted(cdf, u, right=True).clamp_max(int(p.nonzero().max()))


def negative(who: str, losses: Tensor, mend: str) -> ValueError | None:
    """The error if a loss is negative, because no probability can be proportional to it."""
    if not (losses < 0).any():
        return None
    at = ", ".join(map(str, (losses < 0).nonzero().flatten().tolist()[:16]))
    return ValueError(
        f"{who}: the loss of sample(s) {at} of {len(losses)} is negative; expected losses >= 0 to draw in proportion to them."
        f" {mend}"
    )


def weighing(
    session: Session,
    w: Tensor,
    size: int,
    scores: Scores,
    sample_loss: SampleLoss | None,
) -> Around:
    """Wrap the step so that its loss is ``(1/b) sum_j w_j l_j`` over the ``b`` samples drawn from ``size``."""
    w = w.to(session.module.device)

    def here() -> Tensor:
        """The weights of this part of the batch, scaled up if its loss counts less in the batch than its samples do."""
        (index, number), share = session.part, session.share_of_part
        return w.chunk(number)[index] / (number * share) if share else torch.zeros_like(w.chunk(number)[index])

    if sample_loss is None:

        def around(run: Proceed, batch: Any) -> Any:
            with WeighLosses(here(), size=size, totals=scores.totals):
                return run(batch)
    else:

        def around(run: Proceed, batch: Any) -> Any:
            weights = here()
            losses = sample_losses(sample_loss, session.module, batch)
            return (weights * losses.reshape(len(weights), -1).mean(dim=1)).mean()

    return around
