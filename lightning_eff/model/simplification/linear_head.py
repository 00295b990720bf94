"""LinearHead: a network's outputs straight from its last hidden states (Geiping & Goldstein 2022).

BERT computes ``W LN(gelu(V h))`` from the hidden state h of each token. The rule here is ``W h``.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.naming import by_reason, check_met, meets
from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._architecture.technique import Architecture, Change
from lightning_eff._core._arguments.kinds import Names
from lightning_eff._core._needs.needs import UNTRIED, Part, Reasons
from lightning_eff._core.search_space import SearchSpace, needs_sequences
from lightning_eff._core.technique import Control
from lightning_eff.model.simplification._heads.finding import Head, calls, looked

WHO = "LinearHead"


class Skipped(nn.Module):
    """Returns its input, in the place of layers of a nonlinear head."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        return x


class OutputOnly(nn.Module):
    """Calls only the output layer of a head, ``W h``.

    Args:
        plain: the head.
        name: the output layer's name in it.
    """

    def __init__(self, plain: nn.Module, name: str) -> None:
        super().__init__()
        layer = plain.get_submodule(name)
        self._layer = name
        self.add_module(name, layer)
        own = {id(p) for p in layer.parameters()}
        for key, p in plain._parameters.items():
            if p is not None and id(p) in own:  # a bias that is tied to the layer's
                self.register_parameter(key, p)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.get_submodule(self._layer)(x)


class LinearHead(Architecture):
    """Remove the nonlinear layers between a network's blocks and its output layer.

    Masked language models transform each hidden state by a linear layer, an activation and a norm before the output layer
    computes logits. This technique removes that transform, so that the output layer gets the hidden states. A pass on a
    made-up input shows which modules are between. A second pass verifies that the output layer gets what the first of them
    got.

    Use it when you pretrain a masked language model from scratch. It saves one linear layer of d x d per predicted token, with
    its parameters. Cramming reports no loss of quality. **It changes the model**: checkpoints load only into
    ``lightning_eff.apply(plain, LinearHead())``, and ``lightning_eff.export`` refuses. Heads that change the shape stay, such
    as a pooler of the first token. It logs ``removed``, the number of parameters.

    Args:
        names: dotted paths of output layers, their last parts, or patterns, such as ``["decoder"]``. None takes all, ``[]``
            is plain training.

    Raises:
        ValueError: for a wrong value. At setup or in ``apply``, if no output layer has nonlinear layers before it, a name
            matches none, or the code of the module around them computes more.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[LinearHead()])

    References:
        Geiping & Goldstein 2022, "Cramming: Training a Language Model on a Single GPU in One Day", arXiv:2212.14034.
    """

    saves = "a linear layer, an activation and a norm per predicted token"
    paper = "Geiping & Goldstein 2022, arXiv:2212.14034"
    constraints = "heads of BERT's kind, of modules; no sharding, tensor or pipeline parallelism"
    search_space = SearchSpace({}, needs_sequences)
    control = Control("the baseline for the same time, with its nonlinear head")
    conflicts: ClassVar[Mapping[str, str]] = {}
    refuses: ClassVar[Reasons] = {
        **Architecture.refuses,
        **dict.fromkeys((Part.SHARD, Part.TENSOR, Part.ITSELF, Part.PIPELINE), UNTRIED),
    }
    change_at = Change.SWAP
    stays = "no weights of its nonlinear layers return their input"
    neutral_at: ClassVar[Mapping[str, Any]] = {"names": []}
    _removed = 0

    def __init__(self, names: Annotated[Sequence[str] | None, Names("dotted paths or patterns")] = None) -> None:
        self.names = None if names is None else list(names)

    @override
    def change(self, surgeon: Surgeon) -> None:
        root = surgeon.root
        found = looked(root, who=WHO, batch=surgeon.batch)
        if self.names is not None:
            every = [*(head.path for head in found.heads), *found.left]
            check_met(self.names, every, who=WHO, what="output layers", root=type(root).__name__)
        heads = [head for head in found.heads if self._is_meant(head.path)]
        left = {path: reason for path, reason in found.left.items() if self._is_meant(path)}
        if not heads or (self.names is not None and left):
            raise ValueError(
                f"{WHO}: found no nonlinear layers before an output layer of {type(root).__name__}.{by_reason(left)} Remove"
                " the callback."
            )
        surgeon.leave(left)
        had = {id(p): p.numel() for p in root.parameters()}
        ids = {id(root.get_submodule(path)) for head in heads for path in head.chain}
        around = {id(root.get_submodule(head.around)): head.path.rpartition(".")[2] for head in heads if head.around}
        surgeon.swap(
            lambda path, m: id(m) in ids or id(m) in around,
            lambda m: OutputOnly(m, around[id(m)]) if id(m) in around else Skipped(),
            what="a nonlinear head",
        )
        self._check(surgeon, heads)
        for p in root.parameters():
            had.pop(id(p), None)
        self._removed = sum(had.values())
        rank_zero_info(f"{WHO}: removed {self._removed:,} parameters: {'; '.join(map(str, heads))}.")

    def _is_meant(self, path: str) -> bool:
        return self.names is None or any(meets(path, name) for name in self.names)

    def _check(self, surgeon: Surgeon, heads: Sequence[Head]) -> None:
        """Raise ``ValueError`` unless output layers get what the removed layers got."""
        made, _ = calls(surgeon.root, who=WHO, batch=surgeon.batch)
        for head in heads:
            now = made[head.path].given if head.path in made else None
            if now is None or now.shape != head.given.shape or not torch.allclose(now, head.given, 1e-4, 1e-5):
                raise ValueError(
                    f"{WHO}: without {head}, {head.path} does not get the hidden states, because the code of"
                    f" {type(surgeon.root).__name__} computes more between them. Leave it out of `names`, or remove the"
                    " callback."
                )

    # -- reports

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"removed": self._removed}

    @override
    def summary(self) -> str:
        return f"removed {self._removed:,} parameters of heads" if self._removed else "the head was already linear"
