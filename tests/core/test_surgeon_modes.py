"""Where the tensors of replacements are created, and under which function modes."""

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.init import _EmptyInit
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from lightning_eff._core._architecture.surgeon import Surgeon


class Counting(TorchFunctionMode):
    """Counts the calls that it sees."""

    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


class Made(nn.Module):
    """Creates a parameter on the default device, and notes the modes."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.modes = len(_get_current_function_mode_stack())
        self.new = nn.Parameter(torch.empty(2))
        nn.init.ones_(self.new)
        if fails:
            raise KeyError

    weight = property(lambda self: self.new)
    bias = property(lambda self: self.new)


def swapped(fails: bool = False) -> list[Made]:
    """Replace a linear layer on the CPU, and a layer without tensors."""
    root = nn.Sequential(nn.Linear(2, 2, device="cpu"), nn.ReLU())
    Surgeon(root, seed=0, who="Test").swap(
        lambda path, m: path != "", lambda m: Made(fails), what="a layer", unties=True
    )
    return [m for m in root if isinstance(m, Made)]


@pytest.mark.parametrize("fails", [False, True])
def test_modes_that_change_nothing_are_left_and_put_back(fails: bool) -> None:
    with _EmptyInit(enabled=False), torch.device("meta"):
        before = _get_current_function_mode_stack()
        if fails:
            with pytest.raises(KeyError):
                swapped(fails)
        else:
            linear, other = swapped()
            assert linear.new.device.type == "cpu" and linear.new.tolist() == [1, 1]
            assert other.new.is_meta, "as a layer without tensors would be created outside"
            assert linear.modes == 0 and other.modes == 1
        after = _get_current_function_mode_stack()
        assert len(after) == 2 and all(a is b for a, b in zip(after, before, strict=True))
        assert torch.empty(1).is_meta


def test_other_modes_stay() -> None:
    with torch.device("cpu"), Counting() as counting, _EmptyInit(enabled=True):
        assert all(made.modes >= 3 for made in swapped())
    assert counting.calls > 0
