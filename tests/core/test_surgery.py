"""Submodules replaced in place: what is found, what stays the same, and that all of it is undone."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_eff._core.surgery import Surgery
from tests.models import hugging_face, make_batch, module


class Doubled(nn.Linear):
    """A linear layer that returns twice as much, with another's parameters."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Scaled(nn.Module):
    """A normalisation of the same parameters by another formula."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias

    def forward(self, x: Tensor) -> Tensor:
        return x / x.std(-1, keepdim=True) * self.weight + self.bias


def linear(m: nn.Module) -> bool:
    return isinstance(m, nn.Linear)


def tree(root: nn.Module) -> list[tuple[str, int]]:
    return [(path, id(m)) for path, m in root.named_modules(remove_duplicate=False)]


@pytest.mark.parametrize("name", ["tiny_gpt", "gpt2", "llama", "bert", "vit"])
def test_replaces_and_restores_in_any_model(name: str) -> None:
    net, surgery = module(name), Surgery()
    plain = [path for path, m in net.named_modules(remove_duplicate=False) if linear(m)]
    before, state = tree(net), copy.deepcopy(net.state_dict())
    params = [(n, id(p)) for n, p in net.named_parameters(remove_duplicate=False)]
    optimizer: Any = net.configure_optimizers()
    assert surgery.replace(net, linear, Doubled) == plain
    assert plain
    assert {type(net.get_submodule(path)) for path in plain} == {Doubled}
    assert [(n, id(p)) for n, p in net.named_parameters(remove_duplicate=False)] == params
    torch.testing.assert_close(dict(net.state_dict()), dict(state), rtol=0, atol=0)
    loss = net.training_step(make_batch(name), 0) if name != "tiny_gpt" else net(make_batch(name)["input_ids"]).sum()
    loss.backward()
    optimizer.step()
    surgery.restore()
    assert tree(net) == before
    assert not torch.equal(net.get_submodule(plain[0]).weight, state[f"{plain[0]}.weight"])  # pyright: ignore[reportArgumentType]
    surgery.restore()
    assert tree(net) == before


def test_the_replacement_computes() -> None:
    net, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 3))), torch.randn(2, 3)
    surgery = Surgery()
    plain = net(x)
    assert surgery.replace(net, linear, Doubled) == ["0", "2.0"]
    first, last = net[0], net[2][0]
    expected = 2 * F.linear(F.relu(2 * F.linear(x, first.weight, first.bias)), last.weight, last.bias)
    assert torch.equal(net(x), expected)
    surgery.restore()
    assert torch.equal(net(x), plain)


def test_tied_weights_stay_tied() -> None:
    net, surgery = hugging_face("gpt2"), Surgery()
    assert surgery.replace(net, lambda m: type(m) is nn.Linear, Doubled) == ["model.lm_head"]
    assert net.get_submodule("model.lm_head").weight is net.get_submodule("model.transformer.wte").weight
    surgery.restore()


@pytest.mark.parametrize("match", [linear, lambda m: type(m) is nn.Linear])
def test_a_shared_module_is_built_once(match: Any) -> None:
    shared = nn.Linear(3, 3)
    inner = nn.Sequential(shared)
    net = nn.ModuleDict({"a": shared, "b": inner, "c": inner, "d": nn.Sequential(shared)})
    before, surgery = tree(net), Surgery()
    built: list[nn.Module] = []

    def build(m: Any) -> nn.Module:
        built.append(Doubled(m))
        return built[-1]

    assert surgery.replace(net, match, build) == ["a", "b.0", "c.0", "d.0"]
    assert len(built) == 1
    assert {id(net.get_submodule(path)) for path in ("a", "b.0", "c.0", "d.0")} == {id(built[0])}
    surgery.restore()
    assert tree(net) == before


def test_nested_matches_are_replaced_inside_first() -> None:
    class Block(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    class Negated(Block):
        def forward(self, x: Tensor) -> Tensor:
            return -self.inner(x)

    net, x = nn.Sequential(Block(nn.Sequential(nn.Linear(3, 3))), Block(nn.Linear(3, 3, bias=False))), torch.randn(2, 3)
    plain, before, surgery = net(x), tree(net), Surgery()
    paths = surgery.replace(
        net,
        lambda m: type(m) is Block or type(m) is nn.Linear,
        lambda m: Negated(m.inner) if isinstance(m, Block) else Doubled(m),  # pyright: ignore[reportArgumentType]
    )
    assert paths == ["0", "0.inner.0", "1", "1.inner"]
    assert torch.equal(net(x), 4 * plain)
    surgery.restore()
    assert tree(net) == before
    assert torch.equal(net(x), plain)


def test_two_surgeons_and_two_operations() -> None:
    net, x = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), torch.randn(2, 3)
    before, plain, surgery = tree(net), net(x), Surgery()
    assert surgery.replace(net, linear, Doubled) == ["0"]
    assert surgery.replace(net, lambda m: isinstance(m, nn.LayerNorm), Scaled) == ["1"]  # pyright: ignore[reportArgumentType]
    assert surgery.replace(net, linear, Doubled) == ["0"]  # a replacement of the replacement
    assert surgery.replace(net, lambda m: isinstance(m, nn.Conv1d), Doubled) == []  # pyright: ignore[reportArgumentType]
    surgery.restore()
    assert tree(net) == before
    assert torch.equal(net(x), plain)


def test_the_mode_is_handed_on_both_ways() -> None:
    net, surgery = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), Surgery()
    net[1].eval()
    surgery.replace(net, linear, Doubled)
    assert [m.training for m in net] == [True, False]
    net.eval()
    surgery.restore()
    assert [m.training for m in net] == [False, False]


def test_children_that_are_none() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    net.register_module("absent", None)
    assert Surgery().replace(net, lambda m: not any(m.children()), Doubled) == ["0"]


class Copies(nn.Linear):
    def __init__(self, other: nn.Linear) -> None:
        super().__init__(other.in_features, other.out_features)


class Drops(nn.Linear):
    def __init__(self, other: nn.Linear) -> None:
        super().__init__(other.in_features, other.out_features, bias=False)
        self.weight = other.weight


class Adds(Doubled):
    def __init__(self, other: nn.Linear) -> None:
        super().__init__(other)
        self.register_buffer("extra", torch.zeros(1))


@pytest.mark.parametrize(
    ("build", "names"), [(Copies, r"\['bias', 'weight'\]"), (Drops, r"\['bias'\]"), (Adds, r"\['extra'\]")]
)
def test_a_replacement_with_other_tensors_is_refused(build: Any, names: str) -> None:
    net, surgery = nn.ModuleDict({"first": nn.ReLU(), "second": nn.Sequential(nn.Linear(2, 2))}), Surgery()
    before = tree(net)
    message = (
        rf"The replacement {build.__name__} of second\.0 \(Linear\) has different tensors at {names}; expected the same"
    )
    with pytest.raises(ValueError, match=message):
        surgery.replace(net, linear, build)
    surgery.restore()
    assert tree(net) == before


def test_a_buffer_that_is_no_longer_saved_is_refused() -> None:
    class Norm(nn.Module):
        def __init__(self, other: nn.BatchNorm1d) -> None:
            super().__init__()
            self.weight, self.bias = other.weight, other.bias
            for name, buffer in other.named_buffers():
                self.register_buffer(name, buffer, persistent=name != "running_mean")

    with pytest.raises(ValueError, match=r"different tensors at \['running_mean'\].*with the same persistence"):
        Surgery().replace(nn.Sequential(nn.BatchNorm1d(2)), lambda m: isinstance(m, nn.BatchNorm1d), Norm)  # pyright: ignore[reportArgumentType]


def test_what_was_replaced_before_an_error_is_put_back() -> None:
    net, surgery = nn.Sequential(nn.Linear(2, 2), nn.Linear(3, 3)), Surgery()
    before = tree(net)

    def build(m: Any) -> nn.Module:
        if m.in_features == 2:
            raise RuntimeError("planted")
        return Doubled(m)

    with pytest.raises(RuntimeError, match="planted"):
        surgery.replace(net, linear, build)
    assert tree(net) == before
