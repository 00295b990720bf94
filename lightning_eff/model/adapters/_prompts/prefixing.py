"""Calls of a network that become k places longer, and what it returns that becomes as long as it was.

The ids become ``[c .. c; ids]`` for c any token, whose k look-ups are prompts; the network computes places, masks and rotary
tables of k + T ids by itself. So it is the plain network on the embeddings ``[P; E(ids)]``, and that is tried: with the rows of
some token for P, it must compute what it does on those tokens before the text.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_eff._core import rng
from lightning_eff._core._tokens.inputs import is_cache
from lightning_eff._core._tokens.sequences import sequence_dims
from lightning_eff._core.steps import in_evaluation, looking_on, silent
from lightning_eff.model.adapters._prompts.embedding import Prompted
from lightning_eff.model.adapters._prompts.network import arguments

Dims = list[tuple[int, ...]]
Call = tuple[tuple[Any, ...], dict[str, Any]]


class Prefix:
    """The hooks of one network.

    Attributes:
        longest: T of the longest texts that were tried.
        given: calls that got prompts.
        divided: no process can run the network without the others, which then do so all or none.

    Args:
        embedding: the network's, which has the prompts.
        ids: the name of the argument that is the ids.
        who: the technique, for messages.
    """

    def __init__(self, embedding: Prompted, ids: str, *, who: str) -> None:
        self.embedding, self.ids, self.who = embedding, ids, who
        self.longest = 0
        self.given = 0
        self.divided = False
        self._token = 0
        self._dims: list[tuple[TreeSpec, Dims]] = []  # by what is returned
        self._call: Call | None = None

    # -- the hooks

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call, k places longer."""
        ids = arguments(module, args, kwargs).get(self.ids)
        if not isinstance(ids, Tensor):  # on embeddings that the caller made
            self._call = None
            return None
        call = (args, kwargs)
        self._check(module, call)
        if self._anywhere(ids.shape[1] > self.longest, ids.device):
            self._try(module, call, ids.shape[1])
        self._call, self.embedding.waiting = call, True
        return self._longer(module, call, self._token)

    def behind(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """What it returned, without the places of the prompts."""
        call, self._call = self._call, None
        if call is None:
            return output
        if self.embedding.waiting:
            self.embedding.waiting = False
            raise ValueError(
                f"{self.who}: {type(module).__name__} was called with the ids {self.ids!r} and did not look them up by its"
                " token embedding, so that the prompts had no effect. Expected a call as those before. Take the technique out."
            )
        self.given += 1
        leaves, spec = _flat(output)
        dims = next((dims for known, dims in self._dims if known == spec), None)
        if dims is None:  # as where hidden states are asked for
            with _aside(module):
                dims = self._learn(module, call)[0]
        return tree_unflatten([_cut(t, along, self._k) for t, along in zip(leaves, dims, strict=True)], spec)

    # -- longer

    @property
    def _k(self) -> int:
        return self.embedding.prompts.shape[0]

    def _anywhere(self, here: bool, device: torch.device) -> bool:
        if not self.divided:
            return here
        told = torch.tensor(int(here), device=device)
        torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX)
        return bool(told)

    def _check(self, module: nn.Module, call: Call) -> None:
        named = arguments(module, *call)
        ids = cast(Tensor, named[self.ids])
        if ids.ndim != 2:
            raise ValueError(f"{self.who}: {self.ids} has the shape {tuple(ids.shape)}; expected ids of texts, (B, T).")
        for name, value in named.items():
            if is_cache(value):
                raise ValueError(
                    f"{self.who}: {name} is a cache of keys and values, which would have the prompts in it already at the next"
                    " token; expected calls with the whole text. Give generate(..., use_cache=False)."
                )

    def _longer(self, module: nn.Module, call: Call, token: int) -> Call:
        args, kwargs = call
        named = arguments(module, args, kwargs)
        ids = cast(Tensor, named[self.ids])
        values: list[Any] = []
        for name, value in named.items():
            mine = name == self.ids
            first = ids.new_full((len(ids), self._k), token) if mine else self._first(name, value, ids.shape[1])
            moved = value + self._k if first is not None and not mine and "position" in name else value
            values.append(value if first is None else torch.cat([first, moved], dim=-1))
        return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))

    def _first(self, name: str, value: Any, length: int) -> Tensor | None:
        """What an argument says of the prompts' places, before what it says of the others; None where it is as it is.

        Raises:
            ValueError: where an argument runs along the text, and what it says of prompts is not known.
        """
        if not isinstance(value, Tensor):
            return None
        flat = value.ndim == 1 and len(value) == length and "position" in name
        if not flat and not sequence_dims(value.shape, length):
            return None
        if value.ndim <= 2 and "position" in name:
            places = torch.arange(self._k, device=value.device, dtype=value.dtype)
            return places.expand(*value.shape[:-1], -1)
        if value.ndim == 2 and "mask" in name:
            padded = "padding" in name and value.dtype == torch.bool  # torch's, which is true of what is hidden
            return value.new_full((len(value), self._k), 0 if padded else 1)
        if value.ndim == 2 and "type" in name:
            return value[:, :1].expand(-1, self._k)
        raise ValueError(
            f"{self.who}: {name} {tuple(value.shape)} runs along the text, and what it says of prompts is not known; expected"
            " ids, a mask (B, T), positions and types of tokens. Take it out of the batch, or the technique out."
        )

    # -- the trial

    def _learn(self, module: nn.Module, call: Call, token: int = 0) -> tuple[Dims, list[Any]]:
        """Which dimensions of what is returned are longer by the prompts, and what is returned of a token in their place."""
        plain, _ = _flat(module.forward(*call[0], **call[1]))  # past the hooks, which are these
        longer = self._longer(module, call, token)
        try:
            known, spec = _flat(module.forward(*longer[0], **longer[1]))
        except Exception as e:
            length = cast(Tensor, arguments(module, *call)[self.ids]).shape[1]
            raise ValueError(
                f"{self.who}: {type(module).__name__} takes texts of {length} tokens, and not of {self._k} more, which the"
                f" prompts are ({type(e).__name__}: {str(e).splitlines()[0][:120] if str(e) else ''}). Expected room for"
                f" {length + self._k} in its table of places. Shorten the texts, or give fewer prompts."
            ) from e
        dims = [_grown(a, b, self._k) for a, b in zip(plain, known, strict=True)]
        self._dims = [(s, d) for s, d in self._dims if s != spec] + [(spec, dims)]
        return dims, known

    def _try(self, module: nn.Module, call: Call, length: int) -> None:
        """See that the network takes k places more, and that ids are but looked up: with one of two tokens that stand there."""
        pads = {getattr(self.embedding, "padding_idx", None), getattr(_config(module), "pad_token_id", None)}
        first, second, token = [i for i in range(8) if i not in pads][:3]
        prompts = self.embedding.prompts
        with _aside(module):
            _, known = self._learn(module, call, token)
            kept = prompts.detach().clone()
            prompts.copy_(self.embedding(torch.full((1, self._k), token, device=prompts.device))[0])
            try:
                for self._token in (first, second):
                    longer = self._longer(module, call, self._token)
                    self.embedding.waiting = True
                    ours, _ = _flat(module.forward(*longer[0], **longer[1]))
                    if all(_alike(a, b) for a, b in zip(known, ours, strict=True)):
                        self.longest = max(self.longest, length)
                        return
            finally:
                prompts.copy_(kept)
                self.embedding.waiting = False
        raise ValueError(
            f"{self.who}: {type(module).__name__} computes something else of prompts that are the embeddings of a token than of"
            " that token: it reads ids beside its token embedding, as for n-grams. Expected one that looks them up alone. Take"
            " the technique out."
        )


@contextmanager
def _aside(module: nn.Module) -> Iterator[None]:
    """A pass without a trace."""
    with looking_on(), torch.no_grad(), rng.fork(), in_evaluation(module.modules()), silent(cast(Any, module)):
        yield


def _flat(output: Any) -> tuple[list[Any], TreeSpec]:
    return tree_flatten(output, is_leaf=is_cache)


def _cut(value: Any, dims: tuple[int, ...], k: int) -> Any:
    for dim in dims:
        value = value.narrow(dim, k, value.shape[dim] - k)
    return value


def _config(module: nn.Module) -> Any:
    return getattr(module, "config", None)


def _grown(plain: Any, longer: Any, k: int) -> tuple[int, ...]:
    """The dimensions of a returned tensor that are k longer."""
    if not isinstance(plain, Tensor) or not isinstance(longer, Tensor) or plain.ndim != longer.ndim:
        return ()
    return tuple(i for i, (a, b) in enumerate(zip(plain.shape, longer.shape, strict=True)) if b == a + k)


def _alike(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not a.is_floating_point():
        return True
    rough = 1e-3 if a.dtype in (torch.float32, torch.float64) else 5e-2
    if a.shape != b.shape:
        return False
    size = float(a.abs().max()) if a.numel() else 0.0
    return not math.isfinite(size) or float((a - b).abs().max()) <= rough * (1.0 + size) if a.numel() else True


def hooked(module: nn.Module) -> Mapping[str, Prefix]:
    """The hooks of the networks in ``module``, by path."""
    return {
        path: owner
        for path, m in module.named_modules()
        for hook in m._forward_pre_hooks.values()
        if isinstance(owner := getattr(hook, "__self__", None), Prefix)
    }
