"""Token noise: replace some tokens of each text by blanks or by tokens of the same frequency (Xie et al. 2017)."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Generator, Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Fraction
from lightning_eff._core.search_space import Choice, SearchSpace, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Step
from lightning_eff.data.augmentation._arguments import Keys, SpecialTokens, TokenId, Until, no_text
from lightning_eff.data.augmentation._tokens import attended, configs, found_tokens
from lightning_eff.data.augmentation.text._texts import TextAugmentation

WHO = "TokenNoise"


def noised(ids: Tensor, open_: Tensor, rate: float, blank: int | None, generator: Generator) -> Tensor:
    """Replace each token ``x_t`` that may change, with probability ``gamma``, by the blank or by a draw from ``q``.

    ``q(x)`` is the frequency of ``x`` among the tokens of ``ids`` that may change. A draw copies the token at a random one of
    these positions.

    Args:
        ids: tokens (B, T), integers.
        open_: which tokens may change, (B, T), bool.
        rate: ``gamma``, in [0, 1].
        blank: the blank token. None draws from ``q``.
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


class TokenNoise(TextAugmentation):
    """Replace random tokens of each training text, and keep the labels.

    Each token is replaced with probability ``rate``, either by a token drawn with the frequencies of the micro-batch, or by a
    blank. Labels are unchanged: a language model learns to predict the true text from a noisy one, which smooths it like an
    interpolated n-gram model. A classifier learns not to rely on single words. Special tokens and tokens hidden by the
    attention mask never change. Techniques that choose samples or tokens see the noisy text.

    Use it when the same texts are seen many times and the model overfits. It costs no measurable time.

    It logs ``share``, the fraction of tokens in the last micro-batch that changed, and ``milliseconds``, the host time of the
    augmentation.

    Args:
        rate: the probability that a token is replaced. The paper uses 0.1 to 0.3. 0 is plain training.
        noise: the source of new tokens. "unigram" draws from the token frequencies, "blank" uses the blank token.
        blank_token_id: the blank token, for ``noise="blank"``. None takes the mask token of a Hugging Face config in the
            module.
        special_tokens: the tokens that never change. None takes those of a Hugging Face config in the module.
        until: the fraction of the budget after which texts are left unchanged. 0 is plain training.
        keys: the names or positions of the tokens (B, T) in the batch. None takes ``input_ids``, or the only integer tensor
            (B, T) whose name is not that of a label, a mask, a position or a type.
        labels: the names or positions of the labels in the batch. None takes the tensors that are targets of the step's losses.

    Raises:
        ValueError: for a value out of range. At setup, if ``until`` is below 1 and the run has no end, or if no blank token is
            known. At the first batch, before any weight changes, if it holds no tokens, if the tokens are also the labels, or
            if no loss call on the labels is visible.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[TokenNoise(0.1)])

    References:
        Xie et al. 2017, "Data Noising as Smoothing in Neural Network Language Models", arXiv:1703.02573.
    """

    paper = "Xie et al. 2017, arXiv:1703.02573"
    constraints = (
        "needs automatic optimization, integer tokens (B, T), labels in another tensor and a loss of "
        "torch.nn.functional"
    )
    search_space = SearchSpace({"rate": Uniform(0.02, 0.3, log=True), "until": Choice((0.8, 1.0))}, no_text)
    conflicts: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("SpanMasking", "MaskRateSchedule"), "the tokens that it hides and predicts would be noise"
    )
    neutral_at: ClassVar[Mapping[str, Any]] = {"rate": 0.0}

    def __init__(
        self,
        rate: Annotated[float, Fraction()] = 0.1,
        *,
        noise: Literal["unigram", "blank"] = "unigram",
        blank_token_id: TokenId = None,
        special_tokens: SpecialTokens = None,
        until: Until = 1.0,
        keys: Keys = None,
        labels: Keys = None,
    ) -> None:
        if blank_token_id is not None and noise != "blank":
            raise ValueError(
                f"{WHO}({noise=}, {blank_token_id=}): only noise='blank' has a blank token. Set noise='blank', or leave"
                " blank_token_id out."
            )
        super().__init__(prob=1.0, until=until, keys=keys, special_tokens=special_tokens, labels=labels)
        self.rate = rate
        self.noise: Literal["unigram", "blank"] = noise
        self.blank_token_id = blank_token_id
        self._blank: int | None = None
        self._special = torch.tensor([], dtype=torch.int64)

    # -- the run

    @override
    def on_model(self, session: Session) -> None:
        if self.noise == "blank":
            known = [getattr(config, "mask_token_id", None) for config in configs(session.module)]
            self._blank = next((t for t in (self.blank_token_id, *known) if isinstance(t, int)), None)
            if self._blank is None:
                raise ValueError(
                    f"{WHO}(noise='blank'): no config in {type(session.module).__name__} has a mask_token_id. Give the blank"
                    " token with blank_token_id=, for example the tokenizer's unk_token_id."
                )
        self._special = torch.tensor(self._protected(session), dtype=torch.int64)

    @override
    def look(self, step: Step, batch: Any) -> None:
        labels = self._targets.labels(step, batch)
        shared = [path for path, _ in found_tokens(batch, self.keys, who=WHO) if path in labels]
        if shared:
            raise ValueError(
                f"{WHO}: the tokens {', '.join(p or 'the batch itself' for p in shared)} are also the labels of training_step,"
                f" so it would learn to predict the noise. Let the loader return the tokens twice, also as labels, or remove"
                f" {WHO}."
            )

    @override
    def edit(
        self, step: Step, batch: Any, path: str, ids: Tensor, named: list[tuple[str, Tensor]], generator: Generator
    ) -> dict[str, Tensor]:
        open_ = attended(ids, named)
        if len(self._special):
            open_ &= ~torch.isin(ids, self._special.to(ids.device))
        return {path: noised(ids, open_, self.rate, self._blank, generator)}
