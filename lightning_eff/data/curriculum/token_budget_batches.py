"""Batches by tokens instead of samples: as many samples of like length as a budget holds (Vaswani et al. 2017)."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor
from typing_extensions import override

from lightning_eff._core._needs.needs import Need
from lightning_eff._core._samples.by_index import of_each_sample
from lightning_eff._core._samples.technique import Choice, Epoch, SampleChooser
from lightning_eff._core.search_space import RunProfile, SearchSpace, Survey, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.data.curriculum._difficulty import sample_length

WHO = "TokenBudgetBatches"


def cost(batch: Sequence[int], lengths: Sequence[int], *, padded: bool) -> int:
    """The tokens of a batch: ``B max l_i`` with its padding, ``sum l_i`` without."""
    of_batch = [lengths[i] for i in batch]
    return len(batch) * max(of_batch) if padded else sum(of_batch)


def cut(order: Sequence[int], lengths: Sequence[int], budget: int, *, padded: bool) -> list[list[int]]:
    """Samples one after the other in batches of at most ``budget`` tokens, each as large as that allows.

    Args:
        order: samples.
        lengths: tokens of each sample of the data set, each <= ``budget``.
        budget: tokens.
        padded: count a batch's padding, too.
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
    """As many batches as ``ranks`` divide: those of most samples are halved; where all have one, the first come again."""
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
    """The batches of an epoch: batch ``j`` is of rank ``j % ranks``, and those of one step have about as many tokens.

    Args:
        order: samples, as the user's sampler gives them.
        lengths: tokens of each sample of the data set.
        budget: tokens of a batch, at most.
        window: samples that are sorted by length among one another.
        ranks: processes.
        generator: draws the order of the steps.
        padded: count a batch's padding, too.
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


def _pointless(profile: RunProfile) -> str | None:
    return "samples are no sequences" if profile.sequence_length is None else None


def _search(cls: Callable[..., Any], values: Mapping[str, Any], profile: RunProfile) -> Any:
    """Of a budget of ``share`` of the places that a batch of the run's has now, and of one sample's at least."""
    assert profile.sequence_length is not None, "else it is pointless"
    return cls(max(profile.sequence_length, round(values["share"] * profile.batch_size * profile.sequence_length)))


class TokenBudgetBatches(SampleChooser):
    """Make batches by tokens instead of samples: each holds as many samples of like length as ``max_tokens`` allow.

    Of samples of different lengths, batches of a fixed number waste what the longest asks for, in padding and in memory. Here
    the user's own order is taken in windows of ``window`` samples; each window is sorted by length and cut into batches of at
    most ``max_tokens``; and the batches of the epoch come in random order, so that short and long ones are mixed. Each sample
    of the user's order comes once in an epoch. The user's loader makes the batches, with its collate function and workers,
    which must pad a batch to its own longest sample for anything to be saved.

    Every rank has as many batches as every other (the largest are halved for it; where there are fewer samples than ranks,
    some come again), and the ranks' batches of one step are neighbours in their number of tokens. The choice depends on the
    seed, the epoch and the sampler alone and is in checkpoints: a run that resumes in mid-epoch goes on to the bit.

    A batch's loss is the mean that the module takes of it: steps on few long samples weigh as much as those on many short ones.
    Epochs have another number of batches than the user's loader would, which is known as an epoch begins: schedules that ask
    the Trainer before for how many steps there will be count the user's, so say how long the run is by ``max_steps``.

    Logged: ``samples`` of the last batch, ``tokens`` of them, and ``filled``, the share of the budget that they are.

    Args:
        max_tokens: tokens of a batch on one rank, at most, >= 1; 0 is plain training.
        lengths: tokens of each sample of the data set, shape (N,); None finds them once, before the first step: the ones of a
            sample's ``attention_mask``, the length of its ``input_ids``, or of its first sequence of integers.
        padded: count a batch's padding, too (its longest sample times their number); False for its tokens alone, as beside
            :class:`SequencePacking`.
        window: samples that are sorted by length among one another, >= 1; 1 sorts none.

    Raises:
        ValueError: if an argument is out of its range; before the first step, on all ranks, if there are not as many lengths as
            samples, none is found, or a sample has more tokens than ``max_tokens``.

    Sources:
        Vaswani et al. 2017, arXiv:1706.03762 (section 5.1: batches of about 25,000 tokens, by approximate length).
    """

    saves: ClassVar[str] = "padding, and memory that the longest batch alone would ask for"
    paper: ClassVar[str] = "Vaswani et al. 2017, arXiv:1706.03762"
    constraints: ClassVar[str] = (
        "one DataLoader over a map-style data set, whose collate function pads a batch to its longest sample"
    )
    needs: ClassVar[Need] = Need.BATCH
    survey: ClassVar[Survey | None] = None
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"share": Uniform(0.25, 1.0, log=True)}, pointless=_pointless, make=_search
    )
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds, with as many tokens in a batch on average, since the batch's size alone"
        " changes training"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "DifficultyPacing": "both say which samples an epoch has",
        "GradientNoiseScale": "it measures batches of one size",
        "BatchSizeWarmup": "both say how many samples a batch has",
    }
    needs_automatic_optimization: ClassVar[bool] = False
    sparse_gradients: ClassVar[bool] = True

    def __init__(
        self,
        max_tokens: int,
        *,
        lengths: Sequence[int] | Tensor | None = None,
        padded: bool = True,
        window: int = 1000,
    ) -> None:
        for name, value, least in (("max_tokens", max_tokens, 0), ("window", window, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                what = "tokens of a batch; 0 is plain training" if name == "max_tokens" else "samples"
                raise ValueError(f"{WHO}({name}={value!r}): expected an integer >= {least}, {what}.")
        self.max_tokens = max_tokens
        self.padded = padded
        self.window = window
        self.given = None if lengths is None else _checked(lengths)
        self._reset()

    def _reset(self) -> None:
        self._found: list[int] | None = None
        self._samples = self._tokens = 0
        self._totals = {"batches": 0, "tokens": 0}

    @property
    @override
    def neutral(self) -> bool:
        return self.max_tokens == 0

    @override
    def attach(self, session: Session) -> None:
        self._reset()

    @override
    def choose(self, epoch: Epoch) -> Choice | None:
        lengths = self._lengths(epoch.size)
        order = epoch.order.tolist()
        long = [i for i in order if lengths[i] > self.max_tokens]
        if long:
            raise ValueError(
                f"{WHO}(max_tokens={self.max_tokens}): {len(long):,} of {len(order):,} samples have more tokens, the first at"
                f" index {long[0]} has {lengths[long[0]]}; expected a budget that holds each. Raise max_tokens to"
                f" {max(lengths[i] for i in long)}, or cut such samples."
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
                f"{WHO}: got {len(found):,} lengths for a data set of {size:,} samples; expected one for each, in the order of"
                " their indices. Give as many, or train on the data set that they are of."
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
        return f"{self._totals['tokens'] / batches:,.0f} of at most {self.max_tokens:,} tokens in a batch on average"

    @override
    def state_dict(self) -> dict[str, Any]:
        found = None if self._found is None else torch.tensor(self._found)
        return {"found": found, "samples": self._samples, "tokens": self._tokens, "totals": dict(self._totals)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._found = None if state_dict["found"] is None else state_dict["found"].tolist()
        self._samples, self._tokens = state_dict["samples"], state_dict["tokens"]
        self._totals = dict(state_dict["totals"])


def _checked(lengths: Sequence[int] | Tensor) -> list[int]:
    """The lengths as integers.

    Raises:
        ValueError: if they are no integers >= 0 in a row.
    """
    try:
        found = torch.as_tensor(lengths).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{WHO}(lengths=...): expected the tokens of each sample of the data set; {error}.") from error
    if found.ndim != 1 or not len(found) or found.is_floating_point() or found.is_complex() or int(found.min()) < 0:
        raise ValueError(
            f"{WHO}(lengths=...): got {found.dtype} values of shape {tuple(found.shape)}; expected integers >= 0, the tokens of"
            " each sample of the data set, shape (N,)."
        )
    return found.tolist()
