"""What a module makes once from its blocks, in a step that sees only some of them: right later on, or refused."""

import copy
import functools
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_eff import ProgressiveLayerDropping, ProgressiveStacking
from lightning_eff._core._stack.derived_lists import referred
from lightning_eff._core.technique import Technique
from lightning_eff.model.growth._shallower import Shallower
from tests.models import TinyGPT, loader, make_batch, trainer

BUILDS: dict[str, Callable[[], Technique]] = {
    "stacking": lambda: ProgressiveStacking(stages=[(0.0, 2), (0.3, 4), (0.6, 6)]),
    "dropping": lambda: ProgressiveLayerDropping(theta_min=0.3, gamma=20.0),
    "shallower": lambda: Shallower(kept=lambda n: n / 2),
}


class Walks(TinyGPT):
    """Goes through its blocks anew each time."""

    def __init__(self) -> None:
        super().__init__(num_layers=6, dim=8, dropout=0.0)
        self.called: list[int] = []

    def the_blocks(self) -> Any:
        return self.blocks

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position.weight[: ids.shape[1]]
        for block in self.the_blocks():
            x = block(x)
        return self.head(self.norm(x))


class InNone(Walks):
    cached: Any = None

    def the_blocks(self) -> Any:
        if self.cached is None:
            self.cached = list(self.blocks or ())
        return self.cached


class Missing(Walks):
    def the_blocks(self) -> Any:
        if not hasattr(self, "_order"):
            self._order = dict(enumerate(self.blocks or ()))
        return self._order.values()


class Filled(Walks):
    def __init__(self) -> None:
        super().__init__()
        self.order: list[Any] = []
        self.table: dict[str, Any] = {"depth": 6}

    def the_blocks(self) -> Any:
        if not self.order:
            self.order.extend(self.blocks or ())
            self.table["blocks"] = tuple(self.order)
        return self.table["blocks"]


class Property(Walks):
    @functools.cached_property
    def order(self) -> list[Any]:
        return list(self.blocks or ())

    def the_blocks(self) -> Any:
        return self.order


class Method(Walks):
    @functools.cache  # noqa: B019
    def order(self) -> list[Any]:
        return list(self.blocks or ())

    def the_blocks(self) -> Any:
        return self.order()


class Elsewhere(Walks):
    """In an object of its own, which hangs on a submodule."""

    def the_blocks(self) -> Any:
        assert self.blocks is not None
        if not hasattr(self.norm, "plan"):
            self.norm.plan = SimpleNamespace(calls=[functools.partial(block.__call__) for block in self.blocks])  # type: ignore[assignment]
        return self.norm.plan.calls  # type: ignore[union-attr]


class FromTheStart(Walks):
    """A list of its own that no step makes: it names all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.order = list(self.blocks or ())

    def the_blocks(self) -> Any:
        return self.order


CACHES = [InNone, Missing, Filled, Property, Method, Elsewhere, FromTheStart]


def losses(net: Any, technique: Technique, steps: int = 10) -> list[float]:
    """Of each step, and of a validation after it."""
    found: list[float] = []

    class Notes(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
            found.append(float(outputs["loss"]))

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            found.append(float(trainer.callback_metrics["val_loss"]))

    pl.seed_everything(2, verbose=False)
    settings: dict[str, Any] = {"limit_val_batches": 1, "val_check_interval": 1, "num_sanity_val_steps": 1}
    t = trainer(technique, Notes(), max_steps=steps, **settings)
    t.fit(net, loader("tiny_gpt"), loader("tiny_gpt", 4, shuffle=False))
    return found


def made(cls: type[Walks]) -> Walks:
    pl.seed_everything(1, verbose=False)
    return cls()


@functools.cache
def reference(name: str) -> list[float]:
    return losses(made(Walks), BUILDS[name]())


@pytest.mark.parametrize("name", sorted(BUILDS))
@pytest.mark.parametrize("cls", CACHES)
def test_a_cache_of_the_blocks_is_that_of_the_network_that_runs(cls: type[Walks], name: str) -> None:
    net, before = made(cls), set(vars(made(cls)))
    found = losses(net, BUILDS[name]())
    assert found == reference(name)
    # afterwards it is the plain module: the next pass runs all blocks
    calls: list[int] = []
    for i, block in enumerate(net.blocks or ()):
        block.register_forward_pre_hook(lambda *_, i=i: calls.append(i))
    with torch.no_grad():
        net(make_batch("tiny_gpt")["input_ids"])
    assert calls == list(range(6))
    assert {"cached", "_order", "order", "table"} & before <= set(vars(net))


def test_a_cache_that_a_pass_before_the_fit_made_is_left_alone() -> None:
    net = made(InNone)
    with torch.no_grad():
        net(make_batch("tiny_gpt")["input_ids"])
    cache = net.cached
    assert losses(net, BUILDS["stacking"]()) == reference("stacking")
    assert net.cached is cache and len(cache) == 6


class Penalized(Walks):
    """A penalty on parts of the blocks."""

    lazily = True
    parts: Any = None

    def forward(self, ids: Tensor) -> Tensor:
        if self.parts is None or not self.lazily:
            self.parts = [block.get_submodule("norm1") for block in self.blocks or ()]
        return super().forward(ids) * torch.stack([part.weight.mean() for part in self.parts]).mean()


def test_a_list_of_parts_of_the_blocks_is_that_of_the_network_that_runs() -> None:
    found = []
    for lazily in (False, True):
        net: Any = made(Penalized)
        net.lazily = lazily
        found.append(losses(net, BUILDS["stacking"]()))
    assert found[0] == found[1]
    assert len(net.parts) == 6  # as a plain fit leaves it


class CallsParts(Walks):
    """Calls parts of its blocks, in lists that a pass before the fit makes."""

    parts: Any = None

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        self.parts = self.parts or [block.get_submodule("mlp") for block in self.blocks or ()]
        for part in self.parts:
            x = x + part(x)
        return self.head(x)


def test_parts_of_blocks_that_do_not_run_cannot_be_called() -> None:
    net = made(CallsParts)
    with torch.no_grad():
        expected = net(make_batch("tiny_gpt")["input_ids"])
    with pytest.raises(
        ValueError, match=r"blocks.2.mlp was called in a step, but its block does not run: only the first 2"
    ):
        losses(net, BUILDS["stacking"]())
    net = made(CallsParts)
    with torch.no_grad():
        assert torch.equal(net(make_batch("tiny_gpt")["input_ids"]), expected)
    assert not any(m._forward_pre_hooks for m in net.modules())


# -- hooks


class Records(Walks):
    """Sets hooks on its blocks in its first step, once, and adds what they hear to the loss."""

    how = "loop"
    hooked = False

    def hear(self, *args: Any) -> None:
        self.heard = [*getattr(self, "heard", []), args[-1]]

    def _set(self) -> None:
        blocks: Any = self.blocks
        if self.how == "loop":
            for block in blocks:
                block.register_forward_hook(self.hear)
        elif self.how == "parts":
            _ = [block.mlp.register_forward_hook(self.hear) for block in blocks]
        elif self.how == "index":
            for i in range(len(blocks)):
                blocks[i].register_forward_hook(self.hear)
        elif self.how == "last":
            blocks[-1].register_forward_hook(self.hear)
        elif self.how == "first":
            blocks[0].register_forward_hook(self.hear)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if not self.hooked:
            self._set()
            self.hooked = True
        self.heard: list[Tensor] = []
        logits = self(batch["input_ids"])
        self.called.append(len(self.heard))
        more = sum(h.pow(2).mean() for h in self.heard)
        self.heard = []
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) + 1e-3 * more


@pytest.mark.parametrize(
    ("how", "name", "expected"),
    [
        ("loop", "stacking", [2] * 3 + [4] * 3 + [6] * 4),
        ("parts", "stacking", [2] * 3 + [4] * 3 + [6] * 4),
        ("first", "stacking", [1] * 10),
        ("loop", "dropping", [6] * 10),  # who records outputs is given that of a dropped block, too
        ("index", "dropping", [6] * 10),
        ("loop", "shallower", [3] * 10),
    ],
)
def test_hooks_that_a_step_sets_are_on_all_blocks(how: str, name: str, expected: list[int]) -> None:
    net: Any = made(Records)
    net.how = how
    losses(net, BUILDS[name]())
    assert net.called == expected
    if how != "first":
        assert [sum(len(m._forward_hooks) for m in block.modules()) for block in net.blocks] == [1] * 6


@pytest.mark.parametrize("how", ["index", "last"])
def test_hooks_that_would_be_on_the_first_blocks_alone_are_refused(how: str) -> None:
    net: Any = made(Records)
    net.how = how
    listed = r"\[0, 1\]" if how == "index" else r"\[1\]"
    with pytest.raises(
        ValueError, match=rf"A step registered hooks on the blocks {listed} of 'blocks'.*2 run now; blocks"
    ):
        losses(net, BUILDS["stacking"]())
    assert all(type(m) in (nn.ModuleList, *map(type, Walks().modules())) for m in net.blocks.modules())


def test_what_calls_the_blocks_by_another_name_never_sees_those_that_do_not_run() -> None:
    """Hooks on tensors, which count as hooks, come and go in the step: that is not setting hooks on blocks."""

    class Forwards(Walks):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for i, block in enumerate(self.blocks or ()):
                x = block.forward(x)
                if x.requires_grad:
                    x.register_hook(lambda g: g)
                self.called.append(i)
            return self.head(x)

    net = made(Forwards)
    losses(net, BUILDS["shallower"](), steps=1)
    assert max(net.called) == 2


# -- copies


def test_a_copy_made_in_a_step_is_a_whole_module_of_its_own() -> None:
    class Teaches(Walks):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            if batch_idx == 0:
                copies.append(copy.deepcopy(self.blocks))
            return super().training_step(batch, batch_idx)

    copies: list[Any] = []
    losses(made(Teaches), BUILDS["stacking"](), steps=2)
    assert type(copies[0]) is nn.ModuleList and len(copies[0]) == len(list(copies[0])) == 6
    x = torch.randn(2, 4, 8)
    assert all(not torch.equal(block(x), x) for block in copies[0])


# -- finding references


def test_referred_sees_through_containers_closures_and_objects() -> None:
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    index = {id(a): 0, id(b): 1, id(b.weight): 1}
    assert referred([a, (b,)], index) == {0, 1}
    assert referred({"x": {"y": [b.weight]}}, index) == {1}
    assert referred(lambda x: a(x), index) == {0}
    assert referred(functools.partial(print, end=b), index) == {1}
    assert referred([weakref.ref(a), b.forward], index) == {0, 1}
    assert referred(SimpleNamespace(at=SimpleNamespace(b=b)), index) == {1}
    assert referred(nn.ModuleDict({"a": a}), index) == {0}
    loop: list[Any] = [torch.ones(2), "text", 3]
    loop.append(loop)
    assert referred(loop, index) == set()
