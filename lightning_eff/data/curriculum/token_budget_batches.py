"""Token-budget batches: as many samples of similar length per batch as a token budget allows (Vaswani et al. 2017)."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from torch import Generator, Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count
from lightning_eff._core._arguments.objects import PerSample
from lightning_eff._core._needs.needs import Need
from lightning_eff._core._samples.by_index import of_each_sample
from lightning_eff._core._samples.technique import Choice, Epoch, SampleChooser
from lightning_eff._core.search_space import RunProfile, SearchSpace, Uniform, needs_sequences
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.data.curriculum._difficulty import sample_length

WHO = "TokenBudgetBatches"


def cost(batch: Sequence[int], lengths: Sequence[int], *, padded: bool) -> int:
    """Count the tokens of a batch: ``B max l_i`` with padding, ``sum l_i`` without."""
    of_batch = [lengths[i] for i in batch]
    return len(batch) * max(of_batch) if padded else sum(of_batch)


def cut(order: Sequence[int], lengths: Sequence[int], budget: int, *, padded: bool) -> list[list[int]]:
    """Cut samples in order into batches of at most ``budget`` tokens, each as large as possible.

    Args:
        order: the samples.
        lengths: the tokens of each sample of the data set, each <= ``budget``.
        budget: the maximum number of tokens.
        padded: whether padding counts.
    """
    batches: list[list[int]] = []
    longest = total = 0
    for i in order:
        longest, total = max(longest, lengths[i]), total + lengths[i]
        size = len(batches[-1]) + 1 if batches else 1
        if not batches or (size * longest if padded else total) > budget:
            batches.append([i])
            longest = total = lengths[i]
        else:
            batches[-1].append(i)
    return batches


def evened(batches: list[list[int]], ranks: int) -> list[list[int]]:
    """Halve the largest batches (or repeat the first) until their number is a multiple of ``ranks``."""
    found = [list(batch) for batch in batches]
    while len(found) % ranks:
        at = max(range(len(found)), key=lambda i: (len(found[i]), -i))
        batch = found[at]
        if len(batch) == 1:
            return found + [list(found[i % len(found)]) for i in range(-len(found) % ranks)]
        half = len(batch) // 2
        found[at : at + 1] = [batch[:half], batch[half:]]
    return found


def budgeted(
    order: Sequence[int],
    lengths: Sequence[int],
    budget: int,
    *,
    window: int,
    ranks: int,
    generator: Generator,
    padded: bool,
) -> list[list[int]]:
    """Build the batches of an epoch. Batch ``j`` is for rank ``j % ranks``; those of one step have similar token counts.

    Args:
        order: the samples in the order of the user's sampler.
        lengths: the tokens of each sample of the data set.
        budget: the maximum number of tokens per batch.
        window: the number of consecutive samples that are sorted by length together.
        ranks: the number of processes.
        generator: draws the order of the steps.
        padded: whether padding counts.
    """
    batches: list[list[int]] = []
    for start in range(0, len(order), window):
        batches += cut(sorted(order[start : start + window], key=lambda i: lengths[i]), lengths, budget, padded=padded)
    batches = sorted(evened(batches, ranks), key=lambda batch: cost(batch, lengths, padded=padded))
    steps = torch.randperm(len(batches) // ranks, generator=generator).tolist()
    found: list[list[int]] = []
    for step in steps:
        turn = torch.randperm(ranks, generator=generator).tolist()
        found += [batches[step * ranks + rank] for rank in turn]
    return found


def _search(cls: Callable[..., Any], values: Mapping[str, Any], profile: RunProfile) -> Any:
    """Set the budget to ``share`` of the positions in the run's batches, but at least to one sample."""
    assert profile.sequence_length is not None, "else it is pointless"
    return cls(max(profile.sequence_length, round(values["share"] * profile.batch_size * profile.sequence_length)))


class TokenBudgetBatches(SampleChooser):
    """Fill each batch with as many samples of similar length as a token budget allows.

    Batches of a fixed number of samples waste time and memory on padding to the longest. This technique takes the user's own
    order in windows of ``window`` samples, sorts each window by length, and cuts it into batches of at most ``max_tokens``. The
    batches of an epoch come in random order, so short and long ones are mixed. Each sample of the user's order comes once per
    epoch. The user's loader builds the batches, with its workers and its collate function, which must pad a batch only to its
    own longest sample.

    Use it for sequences of very different lengths. The loss of a batch is the module's own mean, so steps on few long samples
    weigh as much as steps on many short ones. Epochs have another number of batches than the loader's own, which is known when
    an epoch begins. Schedules that ask the Trainer for the number of steps count the loader's own, so set ``max_steps``.

    Every rank has the same number of batches: the largest are halved, and if there are fewer samples than ranks, some repeat.
    The batches of one step have similar token counts on all ranks. The choice follows from the seed, the epoch and the sampler,
    and is part of checkpoints, so a run resumes exactly in mid-epoch.

    It logs ``samples`` and ``tokens`` (of the last batch) and ``filled`` (the fraction of the budget that is used).

    Args:
        max_tokens: the maximum number of tokens per batch on one rank. 0 is plain training.
        lengths: the number of tokens of each sample of the data set, shape (N,). None finds them once before the first step:
            the ones of a sample's ``attention_mask``, the length of its ``input_ids``, or of its first sequence of integers.
        padded: whether padding counts towards the budget (the longest sample times the number of samples). Use False together
            with :class:`SequencePacking`.
        window: the number of consecutive samples that are sorted by length together. 1 sorts none.

    Raises:
        ValueError: for a value out of range. Before the first step, on all ranks, if the number of lengths is not that of the
            samples, no lengths are found, or a sample has more tokens than ``max_tokens``.

    Example:
        >>> trainer = L.Trainer(max_steps=10_000, callbacks=[TokenBudgetBatches(max_tokens=16_384)])

    References:
        Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, section 5.1 (batches of about 25,000 tokens).
    """

    saves = "padding, and the memory of the longest batch"
    paper = "Vaswani et al. 2017, arXiv:1706.03762"
    constraints = (
        "needs one DataLoader over a map-style data set, whose collate function pads a batch to its longest sample"
    )
    needs: ClassVar[Need] = Need.BATCH
    search_space = SearchSpace({"share": Uniform(0.25, 1.0, log=True)}, pointless=needs_sequences, make=_search)
    control = Control(
        "the baseline for as many seconds, with as many tokens per batch on average, because the batch size alone changes"
        " training"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "DifficultyPacing": "both choose the samples of an epoch",
        "GradientNoiseScale": "it needs batches of one size",
        "BatchSizeWarmup": "both set the number of samples in a batch",
    }
    needs_automatic_optimization: ClassVar[bool] = False
    sparse_gradients: ClassVar[bool] = True
    neutral_at: ClassVar[Mapping[str, Any]] = {"max_tokens": 0}

    def __init__(
        self,
        max_tokens: Annotated[int, Count(at_least=0)],
        *,
        lengths: Annotated[Sequence[int] | Tensor, PerSample(torch.int64, at_least=0)] | None = None,
        padded: bool = True,
        window: Annotated[int, Count()] = 1000,
    ) -> None:
        self.max_tokens = max_tokens
        self.padded = padded
        self.window = window
        self.given: list[int] | None = lengths.tolist() if isinstance(lengths, Tensor) else None

    def _reset(self) -> None:
        self._found: list[int] | None = None
        self._samples = self._tokens = 0
        self._totals = {"batches": 0, "tokens": 0}

    @override
    def choose(self, epoch: Epoch) -> Choice | None:
        lengths = self._lengths(epoch.size)
        order = epoch.order.tolist()
        long = [i for i in order if lengths[i] > self.max_tokens]
        if long:
            raise ValueError(
                f"{WHO}(max_tokens={self.max_tokens}): {len(long):,} of {len(order):,} samples have more tokens; the first, at"
                f" index {long[0]}, has {lengths[long[0]]}. Use max_tokens={max(lengths[i] for i in long)} or truncate the"
                " samples."
            )
        batches = budgeted(
            order,
            lengths,
            self.max_tokens,
            window=self.window,
            ranks=self.session.replicas.count,
            generator=self.session.generator(WHO, epoch.number),
            padded=self.padded,
        )
        return Choice([i for batch in batches for i in batch], sizes=[len(batch) for batch in batches])

    def _lengths(self, size: int) -> list[int]:
        found = self.given if self.given is not None else self._found
        if found is None:
            asked: Callable[[Any], float] = functools.partial(sample_length, asked=WHO, mend="lengths=")
            found = self._found = [int(n) for n in of_each_sample(self.session, asked, who=WHO).tolist()]
        if len(found) != size:
            raise ValueError(
                f"{WHO}(lengths=...): got {len(found):,} lengths for a data set of {size:,} samples; expected one per sample."
                " Give the lengths of this data set."
            )
        return found

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        indices, lengths = session.sample_indices, self.given if self.given is not None else self._found
        if isinstance(indices, list) and indices and lengths is not None:
            self._samples, self._tokens = len(indices), cost(indices, lengths, padded=self.padded)
            self._totals["batches"] += 1
            self._totals["tokens"] += self._tokens

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"samples": self._samples, "tokens": self._tokens, "filled": self._tokens / self.max_tokens}

    @override
    def summary(self) -> str:
        batches = self._totals["batches"]
        if not batches:
            return "no step taken"
        return f"{self._totals['tokens'] / batches:,.0f} of at most {self.max_tokens:,} tokens per batch on average"

    @override
    def state_dict(self) -> dict[str, Any]:
        found = None if self._found is None else torch.tensor(self._found)
        return {"found": found, "samples": self._samples, "tokens": self._tokens, "totals": dict(self._totals)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._found = None if state_dict["found"] is None else state_dict["found"].tolist()
        self._samples, self._tokens = state_dict["samples"], state_dict["tokens"]
        self._totals = dict(state_dict["totals"])
