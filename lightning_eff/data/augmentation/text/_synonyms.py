"""Synonyms of tokens: from a mapping, a dictionary file, or the nearest neighbours in an embedding."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Kind, Refused
from lightning_eff.data.augmentation._arguments import TokenIds

EMBEDDING = "embedding"
Table = dict[int, list[int]]
Words = dict[str, list[str]]


@dataclass(frozen=True, repr=False)
class Synonyms(Kind):
    """A mapping of tokens, or of words, to those that can replace them, the path of a JSON file with one, or "embedding"."""

    @property
    @override
    def expected(self) -> str:
        return (
            "a mapping of token ids to lists of token ids, one of words to lists of words, the path of a JSON file with one of"
            f" these, or {EMBEDDING!r}"
        )

    @override
    def __call__(self, value: Any) -> Table | Words | str:
        if value == EMBEDDING:
            return EMBEDDING
        if isinstance(value, str | Path):
            value = _read(Path(value))
        if not isinstance(value, Mapping):
            raise ValueError
        if value and all(isinstance(key, str) for key in value):
            return {word: [*map(_word, _listed(others))] for word, others in value.items()}
        one, several = Count(at_least=0), TokenIds()
        return {one(token): [*several(others)] for token, others in value.items()}


def _read(path: Path) -> Any:
    """Return the mapping in a JSON file, in which the keys of token ids are written as text."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Refused(f"The file cannot be read: {error.strerror}.") from None
    except ValueError:
        raise Refused("The file is not JSON.") from None
    if isinstance(value, dict) and all(key.isdecimal() for key in value):
        return {int(key): others for key, others in value.items()}
    return value


def _listed(value: Any) -> Sequence[Any]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError
    return value


def _word(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def single_tokens(words: Mapping[str, Sequence[str]], ids_of: Callable[[str], Sequence[int]]) -> Table:
    """Return the synonyms of tokens, for words that are a single token.

    Many tokenizers have one token for a word at the beginning of a text and another for it after a space. So a word and its
    synonym are both tried without and with a space before them.

    Args:
        words: each word with its synonyms.
        ids_of: returns the token ids of a text, without special tokens.
    """
    known: dict[str, int | None] = {}

    def token(text: str) -> int | None:
        if text not in known:
            ids = [*ids_of(text)]
            known[text] = int(ids[0]) if len(ids) == 1 else None
        return known[text]

    found: Table = {}
    for word, others in words.items():
        for space in ("", " "):
            own = token(space + word)
            if own is not None:
                found.setdefault(own, []).extend(t for other in others if (t := token(space + other)) is not None)
    return found


def others_only(table: Mapping[int, Sequence[int]]) -> Table:
    """Return the table without repetitions, tokens as their own synonyms, and tokens without any."""
    found = {token: [x for x in dict.fromkeys(others) if x != token] for token, others in table.items()}
    return {token: others for token, others in found.items() if others}


def nearest(weight: Tensor, tokens: Tensor, count: int, never: Sequence[int]) -> Tensor:
    """Return the ``count`` tokens whose embeddings have the largest cosine with that of each token, largest first: (n, count).

    Args:
        weight: the embeddings of all tokens, (V, D).
        tokens: (n,).
        count: at most V - 1 less the length of ``never``.
        never: tokens that are no one's neighbours.
    """
    unit = F.normalize(weight.detach().float(), dim=1)
    cosine = unit[tokens] @ unit.T
    cosine[:, [t for t in never if t < len(weight)]] = -torch.inf
    cosine.scatter_(1, tokens[:, None], -torch.inf)
    return cosine.topk(count, dim=1).indices


class Neighbours(Mapping[int, range]):
    """Stands for the synonyms of all tokens: for each token, ``count`` numbers below 0, which are no tokens.

    Texts are edited with these numbers first. Then the neighbours of only those tokens that were replaced are found at once.
    """

    def __init__(self, size: int, count: int) -> None:
        self.size, self.count = size, count

    def __getitem__(self, token: int) -> range:
        if not 0 <= token < self.size:
            raise KeyError(token)
        return range(-1 - token * self.count, -1 - (token + 1) * self.count, -1)

    def __iter__(self) -> Any:
        return iter(range(self.size))

    def __len__(self) -> int:
        return self.size

    def resolved(self, numbers: Sequence[int], weight: Tensor, never: Sequence[int]) -> dict[int, int]:
        """Return the token for each of these numbers, the nearest neighbours in ``weight`` (V, D) at this moment."""
        at = [divmod(-1 - number, self.count) for number in numbers]
        tokens = sorted({token for token, _ in at})
        if not tokens:
            return {}
        found = nearest(weight, torch.tensor(tokens, device=weight.device), self.count, never).tolist()
        by_token = dict(zip(tokens, found, strict=True))
        return {number: by_token[token][rank] for number, (token, rank) in zip(numbers, at, strict=True)}
