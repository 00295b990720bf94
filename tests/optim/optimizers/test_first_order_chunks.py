"""First-order optimizers work in chunks: the results are the papers' ones for any chunk, and temporaries stay small."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.live_bytes import LiveBytes
from lightning_eff._core._optim import chunks
from tests.optim.optimizers.first_order_jobs import RULES
from tests.optim.optimizers.test_first_order import RULES as CHECKED
from tests.optim.optimizers.test_first_order import Reference, parameters, train


@pytest.mark.parametrize("size", [1, 5, 16])
@pytest.mark.parametrize("name", sorted(RULES))
def test_it_is_the_papers_rule_in_chunks_of_any_size(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "chunk_size", lambda device: size)
    ours, theirs = parameters(), parameters()
    a, b = train(ours, CHECKED[name](ours)), train(theirs, Reference(name, theirs))
    for x, y in zip(a[-1], b[-1], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", sorted(RULES))
def test_other_layouts_of_memory_are_updated_in_place(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(size: int, channels_last: bool) -> Tensor:
        monkeypatch.setattr(chunks, "chunk_size", lambda device: size)
        g = torch.Generator().manual_seed(0)
        data, gradient = (torch.randn(6, 3, 2, 2, generator=g) for _ in range(2))
        p = nn.Parameter(data.to(memory_format=torch.channels_last) if channels_last else data)
        optimizer = RULES[name]([p])
        for factor in (1.0, 0.5, -0.3):
            p.grad = gradient * factor  # not in channels-last: autograd promises no layout
            optimizer.step()
        assert p.is_contiguous() != channels_last
        return p.detach()

    torch.testing.assert_close(run(30, True), run(10_000, False))


@pytest.mark.parametrize("name", sorted(RULES))
def test_temporaries_do_not_grow_with_the_number_of_weights(name: str) -> None:
    """Two buffers of a chunk; LAMB keeps the update of one tensor, because its norm must be known before it is applied."""
    peaks = []
    for count in (4, 40):
        params = [nn.Parameter(torch.randn(300, 1000)) for _ in range(count)]
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer = RULES[name](params)
        optimizer.step()
        with LiveBytes() as live:
            optimizer.step()
        peaks.append(live.peak - live.total)  # without weights, gradients and state, which it also counts
    chunk = 4 * chunks.chunk_size(torch.device("cpu"))
    assert peaks[0] == peaks[1] <= 3 * chunk + (4 * 300_000 if name == "LAMB" else 0)


def test_no_chunk_is_larger_than_its_size_and_nothing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "chunk_size", lambda device: 10)
    tensors = [torch.zeros(n) for n in (3, 7, 1, 25, 0, 4)] + [torch.zeros(4, dtype=torch.float64), torch.zeros(6, 4).T]
    ones = [torch.ones_like(t) for t in tensors]
    for part, other in chunks.chunks(tensors, ones):
        assert sum(t.numel() for t in part) <= 10 and len({t.dtype for t in part}) == 1
        assert [t.shape for t in part] == [t.shape for t in other]
        torch._foreach_add_(part, other)
    assert all(torch.equal(t, one) for t, one in zip(tensors, ones, strict=True))
    assert list(chunks.chunks([], [])) == []


@pytest.mark.parametrize("name", sorted(RULES))
def test_sharded_weights_move_as_whole_ones(name: str, two_processes: dict[str, Any]) -> None:
    """Norms are those of whole tensors, and a gradient that is a pending sum over the ranks is summed."""
    assert two_processes["first_order"][name] < 1e-6
