"""Replaced attributes are put back exactly, whatever they were."""

from typing import Any

import pytest
from torch import nn

from lightning_eff._core.patches import Patches


class Thing:
    inherited = "class"

    def __init__(self) -> None:
        self.own: Any = "instance"

    def method(self) -> str:
        return "method"


def test_own_and_inherited_attributes_are_put_back() -> None:
    thing, other, patches = Thing(), Thing(), Patches()
    before = dict(thing.__dict__)
    patches.set(thing, "own", 1)
    patches.set(thing, "inherited", 2)
    patches.set(thing, "method", lambda: "patched")
    patches.set(thing, "new", 3)
    assert (thing.own, thing.inherited, thing.method(), thing.new) == (1, 2, "patched", 3)  # pyright: ignore[reportAttributeAccessIssue]
    assert (other.own, other.inherited, other.method()) == ("instance", "class", "method")
    patches.restore()
    assert thing.__dict__ == before
    assert (thing.own, thing.inherited, thing.method()) == ("instance", "class", "method")
    assert not hasattr(thing, "new")


@pytest.mark.parametrize("value", [None, False, 0])
def test_values_that_look_like_nothing_are_put_back(value: Any) -> None:
    thing, patches = Thing(), Patches()
    thing.own = value
    patches.set(thing, "own", "patched")
    patches.restore()
    assert "own" in thing.__dict__
    assert thing.own is value


def test_stacked_replacements_come_off_newest_first() -> None:
    thing, patches = Thing(), Patches()
    original = thing.method
    patches.set(thing, "method", lambda: "first")
    first = thing.method
    patches.set(thing, "method", lambda: first() + " second")
    assert thing.method() == "first second"
    patches.restore()
    assert "method" not in thing.__dict__
    assert thing.method == original


def test_restoring_twice_leaves_later_changes_alone() -> None:
    thing, patches = Thing(), Patches()
    patches.set(thing, "own", 1)
    patches.restore()
    thing.own = "later"
    patches.restore()
    assert thing.own == "later"


def test_an_attribute_that_was_deleted_meanwhile() -> None:
    thing, patches = Thing(), Patches()
    patches.set(thing, "own", 1)
    patches.set(thing, "new", 2)
    del thing.own, thing.new  # pyright: ignore[reportAttributeAccessIssue]
    patches.restore()
    assert thing.__dict__ == {"own": "instance"}


def test_a_module_takes_no_notice() -> None:
    """``nn.Module.__setattr__`` would register a patch that is a module, and refuse one in place of a child."""
    net, patches = nn.Sequential(nn.Linear(2, 2)), Patches()
    names = set(net.__dict__)
    patches.set(net, "forward", nn.Identity())
    patches.set(net, "extra", nn.Linear(1, 1))
    assert [name for name, _ in net.named_modules()] == ["", "0"]
    assert list(net.state_dict()) == ["0.weight", "0.bias"]
    patches.restore()
    assert set(net.__dict__) == names


def test_what_an_instance_attribute_cannot_replace_is_refused() -> None:
    class Guarded:
        @property
        def value(self) -> int:
            return 1

    guarded, patches = Guarded(), Patches()
    with pytest.raises(TypeError, match=r"Guarded\.value is a property.*instance attribute"):
        patches.set(guarded, "value", 2)
    assert guarded.__dict__ == {}
    patches.restore()
    assert guarded.value == 1


def test_what_another_has_taken_out_is_left_alone() -> None:
    """One that patched before, and restores before, takes what came after it along: it is not put back."""
    thing, first, second = Thing(), Patches(), Patches()
    first.set(thing, "method", lambda: "first")
    second.set(thing, "method", lambda: "second")
    second.set(thing, "inherited", 1)
    first.restore()
    second.restore(ours_alone=True)
    assert vars(thing) == {"own": "instance"} and thing.method() == "method" and thing.inherited == "class"
