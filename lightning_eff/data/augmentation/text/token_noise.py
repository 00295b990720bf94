"""Token noise: some tokens of each text become blanks, or others as frequent (Xie et al. 2017)."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Generator, Tensor
from typing_extensions import override

from lightning_eff._core._needs.needs import Need
from lightning_eff._core._run.ranks import on_all_ranks
from lightning_eff._core._targets.window import Targets
from lightning_eff._core.batches import map_tensors, tensors
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Step
from lightning_eff._core.technique import Control
from lightning_eff.data.augmentation._arguments import check_names, check_number, too_few_epochs
from lightning_eff.data.augmentation._engine import Augmentation
from lightning_eff.data.augmentation._tokens import attended, check_ids, configured_special_tokens, found_tokens

WHO = "TokenNoise"
NOISES = ("unigram", "blank")


def noised(ids: Tensor, open_: Tensor, rate: float, blank: int | None, generator: Generator) -> Tensor:
    """Each token ``x_t`` that may change is, with the chance ``gamma``, the blank, or a draw of the unigram frequencies ``q``.

    ``q(x)`` is how often ``x`` stands among those of ``ids`` that may change: a draw is the token at one of these places.

    Args:
        ids: tokens (B, T), of integers.
        open_: which may change, (B, T), of bool.
        rate: ``gamma``, in [0, 1].
        blank: the token that stands for none; None draws of ``q``.
        generator: on the CPU.
    """
    chosen = (torch.rand(ids.shape, generator=generator, dtype=torch.float32) < rate).to(ids.device) & open_
    if blank is not None:
        return ids.masked_fill(chosen, blank)
    draws = torch.rand(ids.shape, generator=generator, dtype=torch.float64).to(ids.device)
    held = ids[open_]
    if not len(held):
        return ids
    # x~ ~ q
    return torch.where(chosen, held[(draws * len(held)).long().clamp(max=len(held) - 1)], ids)


def _pointless(profile: RunProfile) -> str | None:
    return "samples are no sequences" if profile.sequence_length is None else too_few_epochs(profile)


class TokenNoise(Augmentation):
    """Let some tokens of each training text be noise, and the targets what they were.

    Each token is, with the chance ``rate`` and by itself, another one: a draw of the unigram frequencies, which are those of
    the micro-batch, or a blank. Labels stay as they are, so that a language model predicts the true text from one with noise
    in it, which smooths as interpolated n-gram models do (the paper), and a classifier learns not to hang on one word.
    Special tokens, and what the attention mask hides, never change. Techniques that choose samples or tokens see the noise.

    It regularises and costs nothing that shows; it pays where texts are seen over and over.

    Logged: ``share``, the share of the last micro-batch's tokens that are others now, and ``milliseconds``, what it took of
    the host.

    Args:
        rate: ``gamma``, the chance of a token to be noise, in [0, 1]: 0.1 to 0.3 in the paper. 0 is plain training.
        noise: "unigram" for draws of the frequencies, "blank" for the blank.
        blank_token_id: the blank; None takes the mask token of a Hugging Face config in the module.
        special_tokens: tokens that never change; None takes those that a Hugging Face config names.
        until: the share of the budget in [0, 1] from which on texts are left alone; 0 is plain training.
        keys: names or positions of the tokens (B, T) in the batch; None takes ``input_ids``, or the only tensor (B, T) of
            integers that is no label, and not called a mask, a position or a type.
        labels: names or positions of the labels in the batch; None looks for what the step's losses have as targets.

    Raises:
        ValueError: if an argument is out of its range; at setup, for ``until`` below 1 in a run without an end, or where no
            blank is known; at the first batch, before any weight has changed, if it holds no such tokens, if they are the
            step's labels, too, or if the step's loss on labels cannot be seen.

    Sources:
        Xie et al. 2017, arXiv:1703.02573.
    """

    saves: ClassVar[str] = "nothing of a step: it regularises, for a better end of training on few texts"
    paper: ClassVar[str] = "Xie et al. 2017, arXiv:1703.02573"
    constraints: ClassVar[str] = (
        "automatic optimization; tokens (B, T) of integers, and labels apart from them; a loss of torch.nn.functional"
    )
    needs: ClassVar[Need] = Need.CALLS | Need.STEP
    survey: ClassVar[Survey | None] = None
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"rate": Uniform(0.02, 0.3, log=True), "until": Choice((0.8, 1.0))}, _pointless
    )
    control: ClassVar[Control] = Control("no augmentation: the baseline for as many seconds")
    conflicts: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("SpanMasking", "MaskRateSchedule"), "what it hides, and asks for, would be noise"
    )

    def __init__(
        self,
        rate: float = 0.1,
        *,
        noise: str = "unigram",
        blank_token_id: int | None = None,
        special_tokens: Sequence[int] | None = None,
        until: float = 1.0,
        keys: Sequence[str | int] | None = None,
        labels: Sequence[str | int] | None = None,
    ) -> None:
        check_number(rate, who=WHO, name="rate", low=0, high=1, what="the chance of a token; 0 is plain training")
        if noise not in NOISES:
            raise ValueError(f"{WHO}({noise=}): expected one of {', '.join(map(repr, NOISES))}.")
        check_ids(blank_token_id, who=WHO, name="blank_token_id")
        check_ids(special_tokens, who=WHO, name="special_tokens")
        if blank_token_id is not None and noise != "blank":
            raise ValueError(
                f"{WHO}({noise=}, {blank_token_id=}): noise of this kind has no blank; expected noise='blank', or no blank."
            )
        check_names(labels, who=WHO, name="labels")
        super().__init__(prob=1.0, until=until, keys=keys)
        self.rate = rate
        self.noise = noise
        self.blank_token_id = blank_token_id
        self.special_tokens = None if special_tokens is None else list(special_tokens)
        self.labels = None if labels is None else list(labels)
        self._blank: int | None = None
        self._special = torch.tensor([], dtype=torch.int64)

    @override
    def _reset(self) -> None:
        super()._reset()
        self._checked = False

    @property
    @override
    def neutral(self) -> bool:
        return super().neutral or self.rate == 0.0

    # -- the run

    @override
    def attach(self, session: Session) -> None:
        super().attach(session)
        self._targets = Targets(session, WHO, self.labels)

    @override
    def on_model(self, session: Session) -> None:
        configs = [m.config for m in session.module.modules() if hasattr(m, "config")]
        if self.noise == "blank":
            found = [self.blank_token_id, *(getattr(config, "mask_token_id", None) for config in configs)]
            self._blank = next((t for t in found if isinstance(t, int)), None)
            if self._blank is None:
                raise ValueError(
                    f"{WHO}(noise='blank'): no config in {type(session.module).__name__} names a mask_token_id; expected the"
                    " token that stands for none. Give blank_token_id=, such as the tokenizer's for unknown words."
                )
        named = configured_special_tokens(session.module) if self.special_tokens is None else self.special_tokens
        self._special = torch.tensor(named, dtype=torch.int64)
        rank_zero_info(f"{WHO}: never changed are {named or 'no'} tokens.")

    @override
    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        if not self._checked:
            on_all_ranks(self.session, lambda: found_tokens(batch, self.keys, who=WHO))
            labels = self._targets.labels(step, batch)
            if not labels:  # the step skips this batch
                self._note(0.0)
                return proceed(batch)
            on_all_ranks(self.session, lambda: self._apart(batch, labels))
            self._checked = True
        return super()._link(step, batch, proceed)

    def _apart(self, batch: Any, labels: Mapping[str, Tensor]) -> None:
        """Raise ``ValueError`` if tokens are labels, too."""
        shared = [path for path, _ in found_tokens(batch, self.keys, who=WHO) if path in labels]
        if shared:
            raise ValueError(
                f"{WHO}: the tokens {', '.join(p or 'the batch itself' for p in shared)} are the labels of training_step, too,"
                " which would be asked for the noise; expected labels apart. Let the loader give the tokens once more, as"
                " labels, or take the technique out."
            )

    @override
    def change(self, step: Step, batch: Any, generator: Generator) -> tuple[Any, float] | None:
        named, found = tensors(batch), dict(found_tokens(batch, self.keys, who=WHO))
        made: dict[str, Tensor] = {}
        others = total = 0
        for path, ids in found.items():
            open_ = attended(ids, named)
            if len(self._special):
                open_ &= ~torch.isin(ids, self._special.to(ids.device))
            made[path] = noised(ids, open_, self.rate, self._blank, generator)
            others += int((made[path] != ids).sum())
            total += ids.numel()
        each = iter([made.get(path, t) for path, t in named])  # by place, since tokens and labels may be one tensor
        return map_tensors(batch, lambda t: next(each)), others / max(total, 1)
