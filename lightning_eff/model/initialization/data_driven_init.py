"""Weights computed from training data: token frequencies and bigrams for texts, whitened patches for images."""

from collections.abc import Mapping
from contextlib import closing
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_eff._core import rng
from lightning_eff._core._arguments.kinds import Count, Number
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
_SHARES = (1.0, 0.5, 0.25, 0.0)  # the fractions of the head's fit to try


def log_frequencies(counts: Tensor, *, smoothing: float) -> Tensor:
    """Return ``b_y = log((n_y + s) / (N + s C))``, of shape (C,), for tokens that occur ``n_y`` times of ``N``."""
    smoothed = counts.double() + smoothing
    return (smoothed / smoothed.sum()).log()


def associations(pairs: Tensor, times: Tensor, classes: int) -> Tensor:
    """Return ``M[x, y] = max(0, log(n_xy N / (n_x n_y)))``, positive pointwise mutual information: sparse, (C, C),
    coalesced.

    Args:
        pairs: ``x C + y`` for each pair that occurs.
        times: ``n_xy``, how often.
        classes: C.
    """
    x, y, n = pairs // classes, pairs % classes, times.double()
    first, second = (torch.zeros(classes, dtype=n.dtype).index_add_(0, at, n) for at in (x, y))
    values = (n * n.sum() / (first[x] * second[y])).log().clamp_min(0.0).float()
    return torch.sparse_coo_tensor(torch.stack([x, y]), values, (classes, classes), check_invariants=True).coalesce()


def factors(table: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return ``(U sqrt(S), V sqrt(S))`` of the leading part ``U S V^T`` of a sparse table: two matrices of shape (C,
    rank).

    For a large table the decomposition is randomised (Halko et al. 2011) and draws from the global generator.
    """
    if len(table) <= _DENSE:
        u, s, vt = torch.linalg.svd(table.to_dense(), full_matrices=False)
        u, s, v = u[:, :rank], s[:rank], vt[:rank].mT
    else:
        u, s, v = torch.svd_lowrank(table, q=rank, niter=2)
    return u * s.sqrt(), v * s.sqrt()


def fitted(table: Tensor, left: Tensor, right: Tensor, frequencies: Tensor) -> Tensor:
    """Return ``c right``, with the number c that fits ``h_x . c right_y`` to ``table[x, y]`` with rows weighted by
    frequency.

    ``h_x`` is row x of ``left``, scaled to a mean square of one, as a norm before the head returns it.
    """
    h = left / left.square().mean(dim=1, keepdim=True).sqrt().clamp_min(1e-12)
    x, y = table.indices()
    p = frequencies.to(h.dtype)
    on = (p[x] * table.values() * (h[x] * right[y]).sum(dim=1)).sum()
    of = ((h * p[:, None]).mT @ h).mul(right.mT @ right).sum()
    return right * (on / of.clamp_min(1e-12))


class DataDrivenInit(Initialization):
    """Start from statistics of the training data: token frequencies and bigrams for texts, whitened patches for images.

    At the first batch of a fresh fit, the callback reads ``batches`` batches of the run's own training loader. The
    running epoch keeps its order and random state. Use it to save the first steps of pretraining, which otherwise learn
    these statistics. Steps cost the same afterwards.

    For a language model (a module whose loss is over the tokens that it looks up), the head's bias becomes the
    logarithm of the token frequencies. With ``bigram``, the embedding becomes the left factor of the table of mutual
    information between neighbouring tokens, at the root mean square that it had. An untied head becomes the right
    factor, at the scale with the lowest loss on the first batch. A tied embedding becomes the factor of the table's
    symmetric part. Without ``bigram``, an untied head becomes zero, so the first loss is the entropy of the
    frequencies, and a tied one stays unchanged.

    The text is found from the labels of the loss: following tokens, or masked tokens, which are filled in. Ignored
    labels, padding, and tokens that do not occur stay unchanged. If the head has no bias, the frequencies go into the
    bias of the LayerNorm before it, if its weights are all equal and the head is not tied; otherwise they are left out,
    and a log line says so.

    For an image model, the first layer (a convolution, or a linear layer on patches) becomes the eigenvectors of the
    patch covariance, each divided by the square root of its eigenvalue, the largest first. If there is room, each
    eigenvector appears again with the opposite sign; further outputs keep their weights. The bias subtracts the mean.

    Logged: ``numbers``, how many numbers were set.

    Args:
        batches: the number of training batches to read, on each rank; fewer if an epoch has fewer. 0 is plain training.
        bigram: whether to set embedding and head from bigrams.
        smoothing: the number added to each token's count, since log 0 is not finite.
        eps: the number added to eigenvalues before the root, in squared units of the input. 5e-4 is airbench's.
        force: whether to also set weights that were loaded or trained before.

    Raises:
        ValueError: for a value out of range. At setup, for a pretrained module without ``force``. At the first batch,
            if the module is neither a language model nor has a first layer on images, or the labels of a language model
            are in no tensor of its batches.

    Example:
        >>> trainer = L.Trainer(max_steps=10_000, callbacks=[DataDrivenInit(batches=100)])

    References:
        Jordan 2024, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", arXiv:2404.00498 (airbench: patch whitening);
        Levy & Goldberg 2014, "Neural Word Embedding as Implicit Matrix Factorization" (word vectors as factors of
        mutual information). The combination follows speed runs (modded-nanogpt, airbench), not a paper.
    """

    saves = "steps: simple statistics of the data need not be learnt"
    paper = "Jordan 2024, arXiv:2404.00498 (whitening); Levy & Goldberg 2014 (bigrams)"
    constraints = "texts and images"
    search_space = SearchSpace(
        {"bigram": Choice((True, False))},
        pointless=lambda profile: (
            None if profile.sequence_length or profile.image_side else "samples are neither texts nor images"
        ),
    )
    control = Control(
        "the baseline for as many seconds, including the counting, with its learning rate decayed to zero"
    )

    turn: ClassVar[Turn] = Turn.DATA
    needs_all: ClassVar[bool] = True
    refuses: ClassVar[Reasons] = TOGETHER
    neutral_at: ClassVar[Mapping[str, Any]] = {"batches": 0}

    def __init__(
        self,
        *,
        batches: Annotated[int, Count(at_least=0)] = 100,
        bigram: bool = True,
        smoothing: Annotated[float, Number(above=0)] = 0.5,
        eps: Annotated[float, Number(at_least=0)] = 5e-4,
        force: bool = False,
    ) -> None:
        self.batches, self.bigram, self.smoothing, self.eps, self.force = batches, bigram, smoothing, eps, force
        self._said: list[str] = []

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
                f"{WHO}: {type(session.module).__name__} is neither a language model (a classification loss over the tokens"
                f" that it looks up; heads found: {', '.join(h.weight for h in heads_of(graph)) or 'none'}) nor starts with a"
                f" convolution or a linear layer on images. Remove {WHO}."
            )
        rank_zero_info(f"{WHO}: {'; '.join(self._said)}")
        return numbers

    @override
    def summary(self) -> str:
        return "; ".join(self._said) or f"set {self._numbers:,} numbers from the data"

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
            self._said.append(
                f"set {embedding}{f' and {head.weight}' if own else ''} from {int(counts.times.sum()):,} bigrams"
            )
        elif own:
            self._said.append(f"set {head.weight} to zero")
        table.copy_(left)
        if own:
            weight.zero_()
        numbers += self._frequencies(graph, head, parameters, counts, own=own)
        if own and self.bigram:
            self._at_best_share(session, weight, right.to(weight), batch, batch_idx)
        return numbers

    def _bigrams(self, session: Session, table: Tensor, counts: Counts) -> tuple[Tensor, Tensor]:
        """Return the embedding and the head that bigrams give, both of the embedding's shape."""
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
        """Set the first logits to the tokens' log-frequencies, and return how many numbers that changed."""
        logp = log_frequencies(counts.single, smoothing=self.smoothing)
        biases = [name for name in head.biases if parameters[name].shape == logp.shape]
        of = f"the frequencies of {int((counts.single > 0).sum())} of {counts.classes} tokens"
        if biases:
            parameters[biases[0]].copy_(logp)
            self._said.append(f"set {biases[0]} to {of}")
            return len(logp)
        norm = _centred(graph, head, parameters) if own else None
        if norm is None:
            self._said.append(f"left out {of}, because {head.weight} has no bias for them")
            return 0
        # the outputs of a LayerNorm with equal weights and bias 1 add up to D, so weights of 1/D read a constant 1
        weight, bias = parameters[head.weight], parameters[norm]
        bias.fill_(1.0)
        weight += (logp / len(bias)).to(weight)[:, None]
        self._said.append(f"set {norm} and {head.weight} to {of}")
        return len(bias)

    def _at_best_share(self, session: Session, weight: Tensor, right: Tensor, batch: Any, batch_idx: int) -> None:
        """Add the fraction of a fit to the head that gives the lowest loss on the first batch, as the mean over ranks."""
        right = right - right.mean(
            dim=1, keepdim=True
        )  # so that a bias of the norm that is equal in all features has no effect
        begun, found = weight.clone(), dict[float, float]()
        for share in _SHARES:
            weight.copy_(begun + share * right)
            with unseen(session):
                loss = loss_of(session, batch, batch_idx, whole=True)
            losses = [one for one in session.gather(loss) if one is not None]
            found[share] = sum(losses) / max(len(losses), 1)
        best = min(found, key=lambda share: (not found[share] < float("inf"), found[share]))
        weight.copy_(begun + best * right)
        self._said.append(f"first loss {found[best]:.4f} with {best:g} of the bigram fit, {found[0.0]:.4f} without")

    # -- images

    def _of_patches(self, session: Session, image: FirstMap) -> int:
        """Whiten the patches of the first layer."""
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
    """Return rows ``v_i / sqrt(lambda_i + eps)`` of the eigenvectors of a covariance (p, p), the largest first: (p, p).

    Directions without variance, up to rounding, give rows of zeros.
    """
    values, vectors = torch.linalg.eigh(covariance.double())
    values, vectors = values.flip(0), vectors.flip(1)
    alive = values > values[0] * len(values) * torch.finfo(torch.float32).eps
    scales = torch.where(alive, (values.clamp_min(0.0) + eps).rsqrt(), torch.zeros_like(values))
    return (vectors * scales).mT


def _language(graph: Graph) -> tuple[Head | None, str | None]:
    """Return the head whose classes are the tokens that the module looks up, and the embedding; None for other networks."""
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
    """Count the tokens and pairs of the run's training data, on all ranks; also return whether labels are masked tokens."""
    text = next(
        (found for call in losses.calls if call.classes == classes and (found := text_in(batch, call)) is not None),
        None,
    )
    if text is None:
        raise ValueError(
            f"{WHO}: training_step of {type(session.module).__name__} computes a loss over {classes} tokens whose labels are in"
            " no tensor (B, T) of the batch, neither unchanged nor shifted by one. Put the labels, or the tokens that they are"
            f" made from, into the batch, or remove {WHO}."
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
    """Return the bias of the LayerNorm that the head reads, if its weights are all equal and nothing else uses the bias."""
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
