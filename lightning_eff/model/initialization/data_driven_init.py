"""Weights that the training data's statistics give: word frequencies and bigrams for texts, whitening for images."""

from collections.abc import Mapping
from contextlib import closing
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_eff._core import rng
from lightning_eff._core._branches.finding import Head, heads_of
from lightning_eff._core._branches.graph import SHAPES, Graph, kind
from lightning_eff._core._needs.needs import Reasons
from lightning_eff._core.passes import loss_of, training_batches, unseen
from lightning_eff._core.search_space import Choice, SearchSpace
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.initialization._data.counting import Counts, LossesSeen, text_in
from lightning_eff.model.initialization._data.patches import FirstMap, first_map
from lightning_eff.model.initialization._once import TOGETHER, Initialization, Turn, traced

WHO = "DataDrivenInit"
_DENSE = 2048  # classes up to which a table of all pairs is decomposed in full
_SHARES = (1.0, 0.5, 0.25, 0.0)  # of the head's fit that are tried


def log_frequencies(counts: Tensor, *, smoothing: float) -> Tensor:
    """``b_y = log((n_y + s) / (N + s C))``, of shape (C,), for tokens that were met ``n_y`` times of ``N``."""
    smoothed = counts.double() + smoothing
    return (smoothed / smoothed.sum()).log()


def associations(pairs: Tensor, times: Tensor, classes: int) -> Tensor:
    """``M[x, y] = max(0, log(n_xy N / (n_x n_y)))``, positive pointwise mutual information: sparse, (C, C), coalesced.

    Args:
        pairs: ``x C + y`` for each pair that was met.
        times: ``n_xy``, how often.
        classes: C.
    """
    x, y, n = pairs // classes, pairs % classes, times.double()
    first, second = (torch.zeros(classes, dtype=n.dtype).index_add_(0, at, n) for at in (x, y))
    values = (n * n.sum() / (first[x] * second[y])).log().clamp_min(0.0).float()
    return torch.sparse_coo_tensor(torch.stack([x, y]), values, (classes, classes), check_invariants=True).coalesce()


def factors(table: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """``(U sqrt(S), V sqrt(S))`` of the leading part ``U S V^T`` of a sparse table: two of shape (C, rank).

    A randomised decomposition (Halko et al. 2011) where the table is large, which draws from the global generator.
    """
    if len(table) <= _DENSE:
        u, s, vt = torch.linalg.svd(table.to_dense(), full_matrices=False)
        u, s, v = u[:, :rank], s[:rank], vt[:rank].mT
    else:
        u, s, v = torch.svd_lowrank(table, q=rank, niter=2)
    return u * s.sqrt(), v * s.sqrt()


def fitted(table: Tensor, left: Tensor, right: Tensor, frequencies: Tensor) -> Tensor:
    """``c right``, with the number c for which ``h_x . c right_y`` is next to ``table[x, y]``, rows weighed by frequency.

    ``h_x`` is row x of ``left`` at a mean square of one, as a norm before the head hands it on.
    """
    h = left / left.square().mean(dim=1, keepdim=True).sqrt().clamp_min(1e-12)
    x, y = table.indices()
    p = frequencies.to(h.dtype)
    on = (p[x] * table.values() * (h[x] * right[y]).sum(dim=1)).sum()
    of = ((h * p[:, None]).mT @ h).mul(right.mT @ right).sum()
    return right * (on / of.clamp_min(1e-12))


class DataDrivenInit(Initialization):
    """Begin at what counting tells: words' frequencies and bigrams in a language model, whitened patches in an image model.

    At the first batch of a fresh fit, batches of the run's own training loader are gone over, beside the running epoch,
    whose order and random state stay as they are.

    A language model is a module whose loss is over the tokens that it looks up. Its head's bias becomes the logarithm of
    the tokens' frequencies. With ``bigram``, the embedding becomes the left factor of the table of mutual information of
    neighbours, with the root mean square that the module's own had, and a head of its own the right factor, at that scale
    at which the first batch's loss is lowest; a tied one has the factor of the table's symmetric part. Without it, a head of
    its own becomes zero, so that the first loss is the entropy of the frequencies, and what is tied stays as it is. Texts are
    found by what the loss is taken of: labels that follow upon tokens, or masked ones, whose text is filled in. Labels that
    are ignored, padding, and tokens that were not met are left as they are. A head without a bias takes the frequencies from
    the bias of a LayerNorm before it, where that has all weights alike and the head is not tied; else they are left out,
    which is said at the start.

    In an image model, the first map (a convolution, or a linear map of patches) becomes the eigenvectors of the covariance
    of its patches, each over the square root of its eigenvalue, the largest first, and once more with the other sign where
    there is room; what room is left keeps its weights. Its bias takes the mean away.

    Logged: ``numbers``, how many were set.

    Args:
        batches: how many of the training loader's are gone over, on each rank; fewer where an epoch has fewer.
        bigram: whether embedding and head are made of bigrams.
        smoothing: what is added to each token's count, above 0.
        eps: what is added to eigenvalues before the root, in squares of the input's unit, at least 0.
        force: also set weights that were loaded or trained before.

    Raises:
        ValueError: for arguments outside of these ranges; at setup, for a pretrained module without ``force``; at the first
            batch, where there is neither a language model nor a first map of images, or where the labels of a language model
            stand in no tensor of its batches.

    Sources:
        Jordan 2024, arXiv:2404.00498 (airbench: patch whitening); Levy & Goldberg 2014 (word vectors as factors of a table of
        mutual information). That both pay together is a reading of speed runs (modded-nanogpt, airbench), and not a paper's.
    """

    saves: ClassVar[str] = "steps: what counting tells need not be learnt"
    paper: ClassVar[str] = "Jordan 2024, arXiv:2404.00498 (whitening); Levy & Goldberg 2014 (bigrams)"
    constraints: ClassVar[str] = "texts and images"
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"bigram": Choice((True, False))},
        pointless=lambda profile: (
            None if profile.sequence_length or profile.image_side else "samples are neither texts nor images"
        ),
    )
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds with its learning rate decayed to zero, counting included: a step costs the same"
    )

    turn: ClassVar[Turn] = Turn.DATA
    needs_all: ClassVar[bool] = True
    refuses: ClassVar[Reasons] = TOGETHER

    def __init__(
        self,
        *,
        batches: int = 100,
        bigram: bool = True,
        smoothing: float = 0.5,
        eps: float = 5e-4,
        force: bool = False,
    ) -> None:
        if batches < 0:
            raise ValueError(
                f"DataDrivenInit(batches={batches}): expected how many batches are counted, at least 1. 0 is plain training."
            )
        if not 0.0 < smoothing < float("inf"):
            raise ValueError(
                f"DataDrivenInit(smoothing={smoothing}): expected a number above 0 that is added to each token's count, since"
                " the logarithm of 0 is no bias. 0.5 is the default."
            )
        if not 0.0 <= eps < float("inf"):
            raise ValueError(
                f"DataDrivenInit(eps={eps}): expected a number of at least 0 that is added to eigenvalues. 5e-4 is airbench's."
            )
        self.batches, self.bigram, self.smoothing, self.eps, self.force = batches, bigram, smoothing, eps, force
        self._said: list[str] = []

    @property
    @override
    def neutral(self) -> bool:
        return self.batches == 0

    @override
    def initialize(self, session: Session, batch: Any, batch_idx: int) -> int | None:
        with LossesSeen() as losses, first_map(session.module) as inputs:
            graph = traced(session, batch, batch_idx, who=WHO)
        if graph is None:
            return None
        self._said = []
        numbers = 0
        head, embedding = _language(graph)
        image = inputs.chosen(graph, batch)
        if head is not None and embedding is not None:
            numbers += self._of_text(session, graph, losses, batch, batch_idx, head, embedding)
        if image is not None:
            numbers += self._of_patches(session, image)
        if not numbers:
            raise ValueError(
                f"{WHO}: {type(session.module).__name__} is neither a language model (a loss of classes over the tokens that"
                f" are looked up; heads found: {', '.join(h.weight for h in heads_of(graph)) or 'none'}) nor does a convolution"
                " or a linear map of patches read its images first. Expected one of the two. Take the technique out."
            )
        rank_zero_info(f"{WHO}: {'; '.join(self._said)}")
        return numbers

    @override
    def summary(self) -> str:
        return "; ".join(self._said) or f"{self._numbers} numbers were set from the data"

    # -- texts

    def _of_text(
        self, session: Session, graph: Graph, losses: LossesSeen, batch: Any, batch_idx: int, head: Head, embedding: str
    ) -> int:
        parameters = dict(session.module.named_parameters())
        weight, table = parameters[head.weight], parameters[embedding]
        counts, masked = _counted(session, losses, batch, len(table), self.batches)
        own = weight is not table
        left, right = table.detach().clone(), torch.zeros_like(weight)
        numbers = weight.numel() if own else 0
        if self.bigram and counts.times.numel():
            pairs = counts.both_ways() if masked or not own else counts
            left, right = self._bigrams(session, table.detach(), pairs)
            numbers += int((left != table).sum())
            self._said.append(f"{embedding}{f' and {head.weight}' if own else ''} of {int(counts.times.sum())} bigrams")
        elif own:
            self._said.append(f"{head.weight} is zero")
        table.copy_(left)
        if own:
            weight.zero_()
        numbers += self._frequencies(graph, head, parameters, counts, own=own)
        if own and self.bigram:
            self._at_best_share(session, weight, right.to(weight), batch, batch_idx)
        return numbers

    def _bigrams(self, session: Session, table: Tensor, counts: Counts) -> tuple[Tensor, Tensor]:
        """The embedding and the head that bigrams give: each of the embedding's shape."""
        found = associations(counts.pairs, counts.times, counts.classes)
        with rng.keyed(session.seed, WHO, "factors"):
            left, right = factors(found, min(table.shape))
        met = left.ne(0).any(dim=1)
        new = table.float().cpu().clone()
        scale = new[met].square().mean().sqrt() / left[met].square().mean().sqrt().clamp_min(1e-12)
        rank = left.shape[1]
        new[met, :rank] = left[met] * scale
        head = torch.zeros_like(new)
        frequencies = counts.single.double() / counts.single.sum().clamp_min(1)
        head[:, :rank] = fitted(found, new[:, :rank], right, frequencies)
        return new.to(table), head.to(table)

    def _frequencies(
        self, graph: Graph, head: Head, parameters: Mapping[str, Tensor], counts: Counts, *, own: bool
    ) -> int:
        """Let the logits begin at the tokens' log-frequencies; returns how many numbers that set."""
        logp = log_frequencies(counts.single, smoothing=self.smoothing)
        biases = [name for name in head.biases if parameters[name].shape == logp.shape]
        of = f"the frequencies of {int((counts.single > 0).sum())} of {counts.classes} tokens"
        if biases:
            parameters[biases[0]].copy_(logp)
            self._said.append(f"{biases[0]} of {of}")
            return len(logp)
        norm = _centred(graph, head, parameters) if own else None
        if norm is None:
            self._said.append(f"{head.weight} has no bias that could hold {of}, which are left out")
            return 0
        # features of a LayerNorm whose weights are alike add to 0 and, with a bias of 1, to D: 1/D each reads that as 1
        weight, bias = parameters[head.weight], parameters[norm]
        bias.fill_(1.0)
        weight += (logp / len(bias)).to(weight)[:, None]
        self._said.append(f"{norm} and {head.weight} of {of}")
        return len(bias)

    def _at_best_share(self, session: Session, weight: Tensor, right: Tensor, batch: Any, batch_idx: int) -> None:
        """Add that share of a fit to the head at which the first batch's loss is lowest, the mean over the ranks."""
        right = right - right.mean(dim=1, keepdim=True)  # so that a bias of the norm alike in all features is not read
        begun, found = weight.clone(), dict[float, float]()
        for share in _SHARES:
            weight.copy_(begun + share * right)
            with unseen(session):
                loss = loss_of(session, batch, batch_idx, whole=True)
            losses = [one for one in session.gather(loss) if one is not None]
            found[share] = sum(losses) / max(len(losses), 1)
        best = min(found, key=lambda share: (not found[share] < float("inf"), found[share]))
        weight.copy_(begun + best * right)
        self._said.append(f"at {best:g} of the bigrams' fit the first loss is {found[best]:.4f}, at 0 {found[0.0]:.4f}")

    # -- images

    def _of_patches(self, session: Session, image: FirstMap) -> int:
        """Whiten the first map's patches."""
        with closing(training_batches(session, self.batches, epoch=0)) as every:
            mean, covariance, count = image.moments(session, every)
        parts = session.gather((mean * count, covariance, count))
        total = sum(n for _, _, n in parts)
        mean = sum((m for m, _, _ in parts), torch.zeros_like(mean)) / total
        second = sum((c for _, c, _ in parts), torch.zeros_like(covariance)) / total
        rows = whitening(second - mean.outer(mean), eps=self.eps)
        weight, bias = image.weight, image.bias
        flat = weight.detach().flatten(1).clone()
        size = min(len(rows), len(flat))
        signs = 2 if len(flat) >= 2 * len(rows) else 1
        for k in range(signs):
            part = slice(k * size, (k + 1) * size)
            flat[part] = rows[:size].to(flat) * (-1) ** k
            if bias is not None:
                bias[part] = -(flat[part].double().cpu() @ mean).to(bias)
        weight.copy_(flat.view_as(weight))
        both = ", of both signs" if signs == 2 else ""
        self._said.append(f"{image.name} whitens {total} patches in {size} of {len(flat)} outputs{both}")
        return signs * size * (flat.shape[1] + (bias is not None))


def whitening(covariance: Tensor, *, eps: float) -> Tensor:
    """Rows ``v_i / sqrt(lambda_i + eps)`` of the eigenvectors of a covariance (p, p), the largest first: (p, p).

    Directions in which nothing varies stay what they are to rounding: rows of what has no variance at all are zero.
    """
    values, vectors = torch.linalg.eigh(covariance.double())
    values, vectors = values.flip(0), vectors.flip(1)
    alive = values > values[0] * len(values) * torch.finfo(torch.float32).eps
    scales = torch.where(alive, (values.clamp_min(0.0) + eps).rsqrt(), torch.zeros_like(values))
    return (vectors * scales).mT


def _language(graph: Graph) -> tuple[Head | None, str | None]:
    """The head whose classes are the tokens that are looked up, and the embedding; None for other networks."""
    tables = {
        graph.weight(f): None
        for node in graph.order
        if kind(node).startswith("Embedding")
        for f in graph.inputs[node]
        if graph.weight(f) is not None
    }
    shapes = {name: variable.shape for name, variable in graph.leaves.values()}
    for head in heads_of(graph):
        for name in sorted((n for n in tables if n is not None), key=lambda n: n != head.weight):
            if shapes[name] == shapes[head.weight]:
                return head, name
    return None, None


def _counted(session: Session, losses: LossesSeen, batch: Any, classes: int, batches: int) -> tuple[Counts, bool]:
    """The tokens and pairs of the run's training data, of all ranks, and whether the labels are masked tokens."""
    text = next(
        (found for call in losses.calls if call.classes == classes and (found := text_in(batch, call)) is not None),
        None,
    )
    if text is None:
        raise ValueError(
            f"{WHO}: training_step of {type(session.module).__name__} takes a loss over {classes} tokens whose labels stand in"
            " no tensor (B, T) of the batch, neither as they are nor shifted by one. Expected labels, or the tokens that they"
            " are made of, in the batch. Take the technique out."
        )
    counts = Counts(classes)
    with closing(training_batches(session, batches, epoch=0)) as every:
        for one in every:
            counts.add(*text.of(one, classes))
    counts.merge()
    parts = session.gather((counts.single, counts.pairs, counts.times))
    every_rank = Counts(classes)
    for part in parts:
        every_rank.join(*part)
    return every_rank, text.masked


def _centred(graph: Graph, head: Head, parameters: Mapping[str, Tensor]) -> str | None:
    """The bias of the LayerNorm that the head reads, if that has all weights alike and is nobody else's to read."""
    at = graph.map_at(head.node)
    here = at[1][0] if at is not None and len(at[1]) == 1 else None
    while here is not None and kind(here) in SHAPES and len(graph.inputs[here]) == 1:
        here = graph.inputs[here][0]
    if here is None or kind(here) != "NativeLayerNorm":
        return None
    names = [graph.leaves[f][0] for f in graph.inputs[here] if f in graph.leaves]
    vectors = [parameters[name] for name in names]
    if len(vectors) != 2 or vectors[0].ndim != 1 or not bool((vectors[0] == vectors[0][0]).all()):
        return None
    uses = [
        n for n in graph.order if any(f in graph.leaves and graph.leaves[f][0] == names[1] for f in graph.inputs[n])
    ]
    return names[1] if len(uses) == 1 else None
