"""Linear layers of several experts, and the router that they share."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff.model.layers._experts.routing import (
    Routes,
    all_compute,
    balance_loss,
    chosen_by,
    experts_choose,
    loads,
    normalized,
    places,
    rows,
    sums,
    tokens_choose,
)


class Seen(NamedTuple):
    """What one call of a feed-forward network says of its routing.

    Attributes:
        dropped: the fraction of tokens that no expert computes.
        load: the largest load of an expert before tokens are dropped, divided by the mean load.
        balance: the balance loss, or None under Expert Choice and for a frozen router.
    """

    dropped: Tensor
    load: Tensor
    balance: Tensor | None


class Call(NamedTuple):
    """A call that is under way.

    Attributes:
        routes: its routes.
        given: the input of the first layers.
        taken: the tokens of the experts, (E, G C, K).
        groups: the shape (G, T) of the tokens.
    """

    routes: Routes
    given: Tensor
    taken: Tensor
    groups: tuple[int, int]


class Dispatch:
    """Sends the tokens of one feed-forward network to its experts, and adds their outputs. Copies and pickles are idle.

    Args:
        number: E.
        by: whether "experts" choose tokens, or "tokens" experts.
        choices: K, the number of experts per token; on average under Expert Choice.
        capacity: the room of an expert in tokens' choices, as a multiple of the mean.
        normalize: whether the weights of a token sum to 1.
        axis: the dimension of the samples in an input with more than two, whose tokens are routed separately.

    Attributes:
        by: the same.
        seen: gets a record of each call; None if nobody asks.
        trial: whether each expert computes all tokens, to try what the code between the layers accepts.
    """

    def __init__(self, number: int, by: str, choices: int, capacity: float, normalize: bool, axis: int) -> None:
        self.by = by
        self._settings = (number, by, choices, capacity, normalize, axis)
        self.seen: list[Seen] | None = None
        self.trial = False
        self._call: Call | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Dispatch, self._settings

    def begin(self, x: Tensor, router: Tensor) -> Tensor:
        """Route ``x``, (..., K), by a router (E, K), and return the experts' tokens, (E, G C, K)."""
        grouped = self._grouped(x)
        with torch.autocast(x.device.type, enabled=False):  # a softmax of rounded logits makes routing unstable
            high = torch.promote_types(x.dtype, torch.float32)
            probabilities = F.linear(grouped.to(high), router.to(high)).softmax(-1)
        groups, tokens = grouped.shape[:2]
        routes = self._route(probabilities, tokens, trains=router.requires_grad)
        taken = self._take(grouped, routes)
        self._call = Call(routes, x, taken, (groups, tokens))
        return taken

    def follow(self, x: Tensor) -> Tensor:
        """Return the experts' tokens for a further first layer, which must have the input of the one that began."""
        call = self._under_way()
        if x is call.given:
            return call.taken
        if x.shape != call.given.shape:
            raise ValueError(
                f"SparseUpcycling: the first layers of a feed-forward network got inputs of shapes {tuple(call.given.shape)}"
                f" and {tuple(x.shape)}; expected the same tokens. Leave its block out of blocks=, or remove SparseUpcycling."
            )
        return self._take(self._grouped(x), call.routes)

    def end(self, y: Tensor) -> Tensor:
        """Return the weighted sum of the experts' outputs ``y``, (E, G C, N), for each token, in the shape of the input."""
        call, self._call = self._under_way(), None
        groups, tokens = call.groups
        weighted = y.flatten(0, 1) * call.routes.weights.flatten().to(y.dtype)[:, None]
        z = y.new_zeros(groups * tokens, y.shape[-1]).index_add(0, rows(call.routes, tokens), weighted)
        *shape, _ = call.given.shape
        axis = self._axis(call.given)
        if axis is None:
            return z.view(*shape, -1)
        shape.insert(0, shape.pop(axis))
        return z.view(*shape, -1).movedim(0, axis)

    def _under_way(self) -> Call:
        if self._call is None:
            raise ValueError(
                "SparseUpcycling: a layer of a feed-forward network ran without the first one before it, so its tokens are"
                " unknown. Run the whole network in each pass and recomputation, or remove SparseUpcycling."
            )
        return self._call

    def _route(self, probabilities: Tensor, tokens: int, *, trains: bool) -> Routes:
        number, by, choices, capacity, normalize, _ = self._settings
        if self.trial:
            return all_compute(probabilities)
        if by == "experts":
            routes, balance = experts_choose(probabilities, places(tokens, number, choices)), None
            load = probabilities.new_ones(())
        else:
            weights, chosen = chosen_by(probabilities, choices)
            routes = tokens_choose(weights, chosen, places(tokens, number, capacity * choices), number)
            load = loads(chosen, number)
            balance = balance_loss(probabilities, load)  # always, so that recomputation saves as many tensors
            load = load.max() / load.mean()
        if self.seen is not None:
            self.seen.append(Seen(_dropped(routes, tokens), load, balance if trains else None))
        return normalized(routes, tokens) if normalize else routes

    def _axis(self, x: Tensor) -> int | None:
        return self._settings[-1] if x.ndim > 2 else None

    def _grouped(self, x: Tensor) -> Tensor:
        """Return ``x`` as (G, T, K)."""
        axis = self._axis(x)
        if axis is None:
            return x.reshape(1, -1, x.shape[-1])
        return x.movedim(axis, 0).flatten(1, -2)

    @staticmethod
    def _take(grouped: Tensor, routes: Routes) -> Tensor:
        taken = grouped.flatten(0, 1).index_select(0, rows(routes, grouped.shape[1]))
        return taken.view(len(routes.tokens), -1, grouped.shape[-1])


@torch.no_grad()
def _dropped(routes: Routes, tokens: int) -> Tensor:
    return (sums(routes, (routes.weights > 0).float(), tokens) == 0).float().mean()


class ExpertLinear(nn.Module):
    """A linear layer of each expert, in place of a layer of the dense network.

    Args:
        weight: the dense layer's weight, (N, K), or (K, N) if it is ``transposed``.
        bias: its bias, (N,), or None.
        number: E.
        dispatch: shared by the layers of one feed-forward network.
        transposed: whether the weight is (K, N).
        place: "first" for the layer that runs first, "next" for others on its input, "last" for the one back to the stream.

    Attributes:
        expert_weight: a copy of the weight for each expert, (E, N, K) or (E, K, N).
        expert_bias: (E N,), or None. It has one dimension as a plain bias, by which optimizers' groups are often told apart.
        router: (E, K), only in the first layer.
    """

    router: nn.Parameter | None
    expert_bias: nn.Parameter | None

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        number: int,
        dispatch: Dispatch,
        *,
        transposed: bool,
        place: str,
    ) -> None:
        super().__init__()
        self.dispatch, self.transposed, self.place = dispatch, transposed, place
        self.expert_weight = _copies(weight, number)
        self.register_parameter("expert_bias", None if bias is None else _copies(bias, number, flat=True))
        inputs = weight.shape[0 if transposed else 1]
        router = nn.Parameter(torch.randn(number, inputs) * ROUTER_STD) if place == "first" else None
        self.register_parameter("router", router)

    @property
    def weight(self) -> Tensor:
        """The experts' weights, where code reads a dtype or device."""
        return self.expert_weight

    @property
    def bias(self) -> Tensor | None:
        """The experts' biases."""
        return self.expert_bias

    @override
    def forward(self, x: Tensor) -> Tensor:
        if self.router is not None:
            x = self.dispatch.begin(x, self.router)
        elif self.place == "next":
            x = self.dispatch.follow(x)
        y = _linear(x, self.expert_weight if self.transposed else self.expert_weight.transpose(1, 2), self.expert_bias)
        return self.dispatch.end(y) if self.place == "last" else y

    @override
    def extra_repr(self) -> str:
        return f"{len(self.expert_weight)} experts, {self.place}"


#: The standard deviation of a router's first weights, as in the paper's appendix and T5X.
ROUTER_STD = 0.02


def _copies(plain: nn.Parameter, number: int, *, flat: bool = False) -> nn.Parameter:
    whole = plain.detach().expand(number, *plain.shape).clone(memory_format=torch.contiguous_format)
    return nn.Parameter(whole.flatten() if flat else whole, requires_grad=plain.requires_grad)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x_e W_e + b_e`` for each expert e."""
    return torch.bmm(x, weight) if bias is None else torch.baddbmm(bias.view(len(weight), 1, -1), x, weight)


def dispatches(module: nn.Module) -> Mapping[str, Dispatch]:
    """Return the dispatch of each feed-forward network with experts, by the path of its first layer."""
    return {p: m.dispatch for p, m in module.named_modules() if isinstance(m, ExpertLinear) and m.router is not None}
