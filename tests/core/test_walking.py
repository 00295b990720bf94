"""Walks over a module tree, compared with torch's own."""

import gc

import pytest
from torch import nn

from lightning_eff._core._stack.walking import (
    modules_by_path,
    modules_of,
    parameters_by_name,
    parameters_of,
    without_collections,
)


def tree() -> nn.Module:
    """With a shared layer, tied weights, an empty place and a layer without children."""
    layer = nn.Linear(2, 2)
    root = nn.Sequential(nn.Sequential(layer, nn.ReLU()), nn.ModuleDict({"again": layer, "b": nn.BatchNorm1d(2)}))
    root.register_module("none", None)
    root.tied = nn.Linear(2, 2, bias=False)
    root.tied.weight = layer.weight
    root.own = nn.Parameter(layer.weight[0].detach())
    return root


def test_modules_are_those_of_torch_in_its_order() -> None:
    root = tree()
    assert modules_by_path(root) == list(root.named_modules())
    assert modules_by_path(root, once=False) == list(root.named_modules(remove_duplicate=False))
    assert len(modules_by_path(root, once=False)) == len(modules_by_path(root)) + 1
    assert modules_of(root) == list(root.modules()) and modules_of(root.get_submodule("0.1")) == [
        root.get_submodule("0.1")
    ]


def test_parameters_are_those_of_torch_in_its_order() -> None:
    root = tree()
    ours, theirs = list(parameters_by_name(root)), list(root.named_parameters())
    assert (
        [name for name, _ in ours]
        == [name for name, _ in theirs]
        == ["own", "0.0.weight", "0.0.bias", "1.b.weight", "1.b.bias"]
    )
    assert all(p is q for (_, p), (_, q) in zip(ours, theirs, strict=True))
    assert [id(p) for p in parameters_of(root)] == [id(p) for p in root.parameters()]


@pytest.mark.parametrize("enabled", [True, False])
def test_collections_are_paused_and_then_as_before(enabled: bool) -> None:
    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(KeyError), without_collections():
            with without_collections():
                assert not gc.isenabled()
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() is enabled
        modules_by_path(tree())
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was else gc.disable)()
