"""The store in host memory: what comes back, what is copied, when, and what is held meanwhile."""

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_eff.memory._hosting.bandwidth import measure_bandwidth
from lightning_eff.memory._hosting.copiers import CUDACopier
from lightning_eff.memory._hosting.host import HostStore, Ticket

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2),
    "slice": lambda x: x[1:3, 2:],
    "every other": lambda x: x[..., ::2],
    "first of each": lambda x: x[:, 0],
    "one column": lambda x: x[:, :, 3],
    "expanded": lambda x: x[:, :1].expand(-1, 9, -1),
    "column expanded": lambda x: x[:, :1, 3:4].expand(-1, 2, 3),
    "windows": lambda x: x.flatten().unfold(0, 5, 1),
    "part": lambda x: x.chunk(3, dim=-1)[1],
    "one": lambda x: x[1, 1, 1],
    "empty": lambda x: x[:, :0],
    "imaginary": lambda x: torch.view_as_real(torch.complex(x, x + 1))[..., 1],
    "conjugate": lambda x: torch.complex(x, x + 1).conj(),
    "negative": lambda x: torch.complex(x, x + 1).conj().imag,
    "bfloat16": lambda x: x.bfloat16().transpose(1, 2),
    "mask": lambda x: x > 0,
    "integers": lambda x: (x * 100).long(),
}


@pytest.fixture
def store() -> HostStore:
    return HostStore()


@pytest.mark.parametrize("form", FORMS)
def test_comes_back_as_it_was(form: str, store: HostStore) -> None:
    x = torch.randn(4, 6, 24, requires_grad=True) * 1
    view = FORMS[form](x)
    expected, stride = view.detach().clone(), view.stride()
    ticket = store.put(view)
    for _ in range(2):
        back = ticket.get()
        assert torch.equal(back, expected)
        assert (back.shape, back.dtype, back.device) == (view.shape, view.dtype, view.device)
        # packed where it would not fit into its own strides, and with the sign worked in
        own = form in ("column expanded", "negative")
        assert back.stride() == (torch.empty(back.shape).stride() if own else stride)
        assert back.grad_fn is None and not back.requires_grad
        if back.numel():
            assert back.untyped_storage().data_ptr() != view.untyped_storage().data_ptr()


def test_views_of_one_tensor_are_copied_once_and_come_back_as_views_of_one_copy(store: HostStore) -> None:
    qkv = torch.randn(2, 8, 24, requires_grad=True) * 1
    parts = [part.unflatten(-1, (2, 4)).transpose(1, 2) for part in qkv.chunk(3, dim=-1)]
    tickets = [store.put(part) for part in (*parts, qkv, qkv.flatten(0, 1), qkv.transpose(0, 1))]
    assert store.bytes_to_host == store.bytes_on_host == 2 * 8 * 24 * 4
    backs = [ticket.get() for ticket in tickets]
    assert store.bytes_to_device == 2 * 8 * 24 * 4
    assert len({back.untyped_storage().data_ptr() for back in backs}) == 1
    assert all(torch.equal(back, part) for back, part in zip(backs, parts, strict=False))


def test_a_small_part_does_not_take_the_whole_along(store: HostStore) -> None:
    x = torch.randn(16, 32, 8)
    tickets = [store.put(x[:, 0]), store.put(x[:2])]
    assert store.bytes_to_host == (16 * 8 + 2 * 32 * 8) * 4
    assert torch.equal(tickets[0].get(), x[:, 0]) and tickets[0].get().stride() == (256, 1)


def test_an_address_that_is_used_again_is_another_tensor(store: HostStore) -> None:
    tickets: list[tuple[Ticket, float]] = []
    addresses: list[int] = []
    for value in range(200):
        x = torch.full((1000,), float(value))
        addresses.append(x.data_ptr())
        tickets.append((store.put(x), float(value)))
        del x
    assert len(set(addresses)) < 200, "no address came again, so nothing was tried"
    assert store.bytes_to_host == 200 * 4000
    assert all((ticket.get() == value).all() for ticket, value in tickets)


def test_siblings_without_a_common_version_are_told_apart(store: HostStore) -> None:
    """``unsafe_chunk``, as in torch's LSTM cells: one storage, and each part counts its own changes."""
    first, second = torch.randn(3, 80).unsafe_chunk(2, dim=1)
    tickets = [store.put(first.sigmoid_())]  # both at version 1 when they are put
    tickets.append(store.put(second.tanh_()))
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert torch.equal(tickets[0].get(), first) and torch.equal(tickets[1].get(), second)


@pytest.mark.parametrize("through", ["itself", "a view", "its base", "detached"])
def test_a_change_in_place_is_an_error(through: str, store: HostStore) -> None:
    base = torch.randn(6, 8, requires_grad=True) * 1
    x = base[1:5]
    ticket, other = store.put(x), store.put(torch.randn(4, 8))
    target = {"itself": x, "a view": x[0], "its base": base, "detached": x.detach()}[through]
    with torch.no_grad():
        target.add_(1)
    with pytest.raises(
        RuntimeError,
        match=r"modified by an inplace operation: a tensor of shape \[4, 8\] and torch.float32 is at version 1; expected"
        " version 0",
    ):
        ticket.get()
    other.get()
    again = store.put(x)  # as it is now, not as it was
    assert torch.equal(again.get(), x)


def test_nothing_of_the_tensor_is_kept(store: HostStore) -> None:
    x = torch.randn(1000, requires_grad=True) * 1
    storage = StorageWeakRef(x.untyped_storage())
    ticket = store.put(x.view(10, 100))
    assert not storage.expired()
    del x
    assert storage.expired()
    assert ticket.get().shape == (10, 100)


def test_host_memory_is_used_again_by_later_steps() -> None:
    store, taken = HostStore(), []
    for step in range(5):
        tickets = [store.put(torch.randn(n + step)) for n in (1000, 300, 1000)]
        assert store.bytes_on_host == 4 * (2300 + 3 * step)
        for ticket in reversed(tickets):
            ticket.get()
        assert store.bytes_on_device == 0, "the copies on the device are kept by those who fetched them alone"
        tickets.clear()
        del ticket
        assert store.bytes_on_host == 0
        taken.append(store._pool.num_bytes)
    assert taken == [2 * 4096 + 2048] * 5  # powers of two
    assert store.peak_bytes_on_host == 4 * 2312
    store.release()
    assert store._pool.num_bytes == 0


def test_what_was_brought_back_for_nobody_is_let_go() -> None:
    store = HostStore(depth=2)
    tickets = [store.put(torch.randn(100)) for _ in range(4)]
    tickets[3].get()
    assert store.bytes_on_device == 2 * 400
    tickets.clear()
    assert (store.bytes_on_device, store.bytes_on_host) == (0, 0)


class _Clock:
    """Stands in for a device with a stream for each direction: copies take a time, and computing is told of."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.now, self.pause = seconds, 0.0, 0.0
        self.out = self.home = 0.0  # when each stream is free
        self.log: list[tuple[str, int]] = []

    def to_host(self, source: Tensor, host: Tensor, after: Any) -> float:
        host.copy_(source)
        self.log.append(("out", int(source[0])))
        self.out = max(self.now, self.out, after or 0.0) + self.seconds
        return self.out

    def to_device(self, host: Tensor, target: Tensor, after: Any) -> float:
        assert after is not None, "the way back waits for the way out"
        target.copy_(host)
        self.log.append(("home", int(host[0])))
        self.home = max(self.now, self.home, after) + self.seconds
        return self.home

    def wait(self, event: float, target: Tensor) -> None:
        self.pause += max(0.0, event - self.now)
        self.now = max(self.now, event)

    def settle(self) -> None:
        pass

    def waited(self) -> float:
        return self.pause


@pytest.mark.parametrize(("depth", "copy", "waited"), [(0, 1.0, 8.0), (1, 1.0, 1.0), (1, 2.0, 9.0), (2, 0.5, 0.5)])
def test_the_way_back_begins_ahead_of_need(depth: int, copy: float, waited: float) -> None:
    """Eight tensors, one second of computing after each: what copies take beyond that is waited for."""
    clock = _Clock(copy)
    store = HostStore(depth=depth, copier=clock)
    tickets = [store.put(torch.full((4,), float(i))) for i in range(8)]
    assert clock.log == [("out", i) for i in range(8)]
    clock.log.clear()
    clock.now = 100.0  # the copies out are long done
    for i in reversed(range(8)):
        assert torch.equal(tickets.pop().get(), torch.full((4,), float(i)))
        begun = {which for _, which in clock.log}
        assert begun == set(range(max(0, i - depth), 8)), "as many begin their way back as are asked for"
        clock.now += 1.0
    assert clock.log == [("home", i) for i in reversed(range(8))]
    assert clock.now == pytest.approx(100 + 8 + waited)
    assert store.seconds_waited == pytest.approx(waited)


def test_prefetch_by_hand() -> None:
    clock = _Clock(1.0)
    store = HostStore(depth=0, copier=clock)
    ticket = store.put(torch.zeros(4))
    clock.now = 10.0
    ticket.prefetch()
    clock.now += 5.0
    ticket.get()
    assert clock.pause == 0.0 and store.bytes_to_device == 16


def test_a_buffer_is_written_to_after_its_last_copy() -> None:
    """On a real stream the next copy out could overtake the way back of the one before."""
    clock = _Clock(1.0)
    seen: list[Any] = []
    to_host = clock.to_host

    def watched(source: Tensor, host: Tensor, after: Any) -> float:
        seen.append(after)
        return to_host(source, host, after)

    clock.to_host = watched  # type: ignore[method-assign]
    store = HostStore(copier=clock)
    store.put(torch.zeros(4)).get()
    assert clock.home == 2.0
    store.put(torch.zeros(4))
    assert seen == [None, 2.0]


def test_a_backward_pass_on_another_thread(store: HostStore) -> None:
    tickets = [store.put(torch.full((100,), float(i))) for i in range(50)]
    wrong: list[int] = []

    def backward() -> None:
        for i in reversed(range(50)):
            if not (tickets.pop().get() == i).all():
                wrong.append(i)

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert wrong == []
    assert (store.bytes_on_host, store.bytes_on_device) == (0, 0)


def test_says_once_that_nothing_is_gained_on_a_cpu(store: HostStore) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            store.put(torch.zeros(4))
    assert [w.category for w in caught] == [PossibleUserWarning]
    assert "nothing is gained on a CPU" in str(caught[0].message)


class _Own(Tensor):
    pass


@pytest.mark.parametrize("tensor", [torch.eye(3).to_sparse(), torch.zeros(3).as_subclass(_Own)])
def test_others_memory_is_refused(tensor: Tensor, store: HostStore) -> None:
    with pytest.raises(TypeError, match=r"expected a strided torch\.Tensor or Parameter"):
        store.put(tensor)


def test_bandwidth_is_bytes_over_seconds() -> None:
    out, home = measure_bandwidth("cpu", num_bytes=1 << 20, num_copies=3)
    assert 1e7 < out < 1e13 and 1e7 < home < 1e13


# -- on a CUDA device


@cuda
@pytest.mark.parametrize("form", FORMS)
def test_cuda_comes_back_as_it_was(form: str) -> None:
    store = HostStore(depth=2)
    views = [FORMS[form](torch.randn(4, 6, 24, device="cuda")) for _ in range(6)]
    expected = [view.clone() for view in views]
    tickets = [store.put(view) for view in views]
    views.clear()
    torch.randn(6, 4, 6, 24, device="cuda")  # over the freed memory, were it free too early
    for ticket, value in zip(reversed(tickets), reversed(expected), strict=True):
        assert torch.equal(ticket.get(), value)


@cuda
def test_cuda_memory_is_free_between() -> None:
    store, size = HostStore(), 1 << 24
    before = torch.cuda.memory_allocated()
    tickets = [store.put(torch.full((size // 4,), float(i), device="cuda")) for i in range(12)]
    assert torch.cuda.memory_allocated() - before <= 4 * size, "the sources of the last copies alone"
    for i in reversed(range(12)):
        assert (tickets.pop().get() == i).all()
        assert torch.cuda.memory_allocated() - before <= 3 * size
    assert torch.cuda.memory_allocated() == before
    assert isinstance(store._copiers[torch.device("cuda", 0)], CUDACopier)
    assert store._pool.num_bytes == 12 * size


@cuda
def test_cuda_bandwidth() -> None:
    out, home = measure_bandwidth("cuda")
    assert out > 1e9 and home > 1e9
