"""Makes calls of a network k positions longer, and cuts its outputs back.

The ids become ``[c .. c; ids]`` for any token c, whose k embeddings are replaced by prompts; the network computes positions,
masks and rotary tables of k + T ids itself. So it is the plain network on the embeddings ``[P; E(ids)]``. This is verified:
with the embedding of a token for P, it must compute the same as with that token before the text.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_eff._core import rng
from lightning_eff._core._run.error_text import first_line
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
        longest: the length T of the longest verified texts.
        given: the number of calls that got prompts.
        divided: whether no process can run the network alone, so that all verify it together.

    Args:
        embedding: the network's embedding, which has the prompts.
        ids: the name of the argument with the ids.
        who: the technique, for messages.
    """

    def __init__(self, embedding: Prompted, ids: str, *, who: str) -> None:
        self.embedding, self.ids, self.who = embedding, ids, who
        self.longest = 0
        self.given = 0
        self.divided = False
        self._token = 0
        self._dims: list[tuple[TreeSpec, Dims]] = []  # by the structure of the output
        self._call: Call | None = None

    # -- the hooks

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call, k positions longer."""
        ids = arguments(module, args, kwargs).get(self.ids)
        if not isinstance(ids, Tensor):  # a call with embeddings of the caller
            self._call = None
            return None
        call = (args, kwargs)
        self._check(module, call)
        if self._anywhere(ids.shape[1] > self.longest, ids.device):
            self._try(module, call, ids.shape[1])
        self._call, self.embedding.waiting = call, True
        return self._longer(module, call, self._token)

    def behind(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """The output without the positions of the prompts."""
        call, self._call = self._call, None
        if call is None:
            return output
        if self.embedding.waiting:
            self.embedding.waiting = False
            raise ValueError(
                f"{self.who}: {type(module).__name__} was called with the ids {self.ids!r} and did not look them up in its"
                " token embedding, so the prompts had no effect. Call it as before, or remove the callback."
            )
        self.given += 1
        leaves, spec = _flat(output)
        dims = next((dims for known, dims in self._dims if known == spec), None)
        if dims is None:  # such as when hidden states are requested
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
            raise ValueError(f"{self.who}: {self.ids} has shape {tuple(ids.shape)}. Pass ids of shape (B, T).")
        for name, value in named.items():
            if is_cache(value):
                raise ValueError(
                    f"{self.who}: {name} is a cache of keys and values, which already contains the prompts at the next token."
                    " Call the module with the whole text, such as generate(..., use_cache=False)."
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
        """An argument's values for the positions of the prompts, before its other values; None if it stays unchanged.

        Raises:
            ValueError: if an argument runs along the text, and its values for prompts are unknown.
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
            padded = (
                "padding" in name and value.dtype == torch.bool
            )  # torch's padding masks are True for hidden positions
            return value.new_full((len(value), self._k), 0 if padded else 1)
        if value.ndim == 2 and "type" in name:
            return value[:, :1].expand(-1, self._k)
        raise ValueError(
            f"{self.who}: {name} {tuple(value.shape)} runs along the text, and its values for prompts are unknown (known are"
            " ids, masks (B, T), positions and token types). Remove it from the batch, or remove the callback."
        )

    # -- verification

    def _learn(self, module: nn.Module, call: Call, token: int = 0) -> tuple[Dims, list[Any]]:
        """The dimensions of the outputs that grow with the prompts, and the outputs with a token in their place."""
        plain, _ = _flat(module.forward(*call[0], **call[1]))  # without these hooks
        longer = self._longer(module, call, token)
        try:
            known, spec = _flat(module.forward(*longer[0], **longer[1]))
        except Exception as e:
            length = cast(Tensor, arguments(module, *call)[self.ids]).shape[1]
            raise ValueError(
                f"{self.who}: {type(module).__name__} takes texts of {length} tokens, and not of {self._k} more for the prompts"
                f" ({type(e).__name__}: {first_line(e, 120)}). Shorten the texts, give fewer prompts, or make room for"
                f" {length + self._k} positions."
            ) from e
        dims = [_grown(a, b, self._k) for a, b in zip(plain, known, strict=True)]
        self._dims = [(s, d) for s, d in self._dims if s != spec] + [(spec, dims)]
        return dims, known

    def _try(self, module: nn.Module, call: Call, length: int) -> None:
        """Verify that the network takes k more positions, and uses ids only for look-ups."""
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
            f"{self.who}: {type(module).__name__} computes something else from the embedding of a token than from that token,"
            " because it reads ids elsewhere than in its token embedding, as for n-grams. Remove the callback."
        )


@contextmanager
def _aside(module: nn.Module) -> Iterator[None]:
    """Run passes without a trace."""
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
