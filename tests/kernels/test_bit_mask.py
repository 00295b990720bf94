"""One-bit masks: exact, an eighth of the bytes, on both ways; float tensors of two values come back bit for bit."""

import math

import pytest
import torch

from lightning_eff.kernels import bit_mask
from lightning_eff.kernels.bit_mask import pack_mask, pack_pair, reference_pack_mask, unpack_mask, unpack_pair

SIZES = [0, 1, 7, 8, 9, 64, 1000, 4099]


def device_of(way: str, request: pytest.FixtureRequest) -> torch.device:
    return request.getfixturevalue("device") if way == "triton" else torch.device("cpu")


@pytest.mark.parametrize("way", ["torch", "triton"])
def test_masks_come_back_from_the_references_bytes(way: str, request: pytest.FixtureRequest) -> None:
    device = device_of(way, request)
    for size in SIZES:
        mask = torch.rand(size, device=device) < 0.3
        packed = pack_mask(mask)
        assert torch.equal(packed, reference_pack_mask(mask)) and packed.numel() == math.ceil(size / 8)
        assert torch.equal(unpack_mask(packed, (size,)), mask)
    mask = (torch.rand(6, 5, 11, device=device) < 0.5).transpose(0, 2)
    back = unpack_mask(pack_mask(mask), mask.shape)
    assert back.dtype == torch.bool and back.is_contiguous() and torch.equal(back, mask)


@pytest.mark.parametrize("num", [1003, 1024, 1280])
def test_triton_bytes_do_not_depend_on_geometry(num: int, device: torch.device) -> None:
    """The last two sizes are packed as words of four bytes, in whole tiles and with a rest."""
    from lightning_eff.kernels import _bit_mask_triton

    mask = (torch.rand(num, device=device) < 0.5).view(torch.uint8)
    wanted = reference_pack_mask(mask)
    for block in (16, 128):
        out, back = torch.empty_like(wanted), torch.empty_like(mask)
        _bit_mask_triton.pack(mask, out, block=block)
        _bit_mask_triton.unpack(out, back, block=block)
        assert torch.equal(back, mask) and torch.equal(out, wanted)
    # from an odd address there are no words
    apart = torch.empty(num + 1, dtype=torch.uint8, device=device)[1:].copy_(mask)
    _bit_mask_triton.pack(apart, out)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("num", [1003, 1024])
def test_triton_pairs_do_not_depend_on_geometry(num: int, device: torch.device) -> None:
    from lightning_eff.kernels import _bit_mask_triton

    x = (torch.rand(num, device=device) < 0.5).float() * 1.25
    low, high = x.amin(), x.amax()
    wanted = reference_pack_mask(x == high)
    for block in (16, 128):
        out, back = torch.empty_like(wanted), torch.empty_like(x)
        assert not _bit_mask_triton.pack_pair(x, low, high, out, block=block)
        _bit_mask_triton.unpack_pair(out, low, high, back, block=block)
        assert torch.equal(back, x) and torch.equal(out, wanted)
        for at in (0, 700, num - 1):
            third = x.clone()
            third[at] = 0.5
            assert _bit_mask_triton.pack_pair(third, low, high, out, block=block)


def test_triton_finds_a_second_value_after_the_sample(device: torch.device) -> None:
    x = torch.ones(3000, device=device)
    for second in (0.0, 2.0):
        x[2000] = second
        packed = pack_pair(x)
        assert packed is not None and torch.equal(unpack_pair(packed), x)
        x[2500] = 3.0
        assert pack_pair(x) is None
        x[2500] = 1.0


@pytest.mark.parametrize("way", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_pairs_of_values_come_back_exactly(way: str, dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    device = device_of(way, request)
    for low, high in ((0.0, 1 / 0.9), (-0.3, 0.7), (0.0, math.inf), (-math.inf, 0.0), (2.5, 2.5)):
        x = torch.where(torch.rand(3000, device=device) < 0.5, low, high).to(dtype).view(30, 100).T
        packed = pack_pair(x)
        assert packed is not None and packed.num_bytes == 375 + 2 * x.element_size()
        back = unpack_pair(packed)
        assert back.dtype == dtype and back.is_contiguous() and torch.equal(back, x)


@pytest.mark.parametrize("way", ["torch", "triton"])
def test_other_tensors_are_no_pair(way: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    device = device_of(way, request)
    monkeypatch.setattr(bit_mask, "PIECE", 700)
    pair = (torch.rand(3000, device=device) < 0.5).float()
    assert pack_pair(pair) is not None
    for at in (3, 1025, 2999):  # in the sample, after it, in the last piece
        for third in (0.5, math.nan):
            x = pair.clone()
            x[at] = third
            assert pack_pair(x) is None
    assert pack_pair(torch.randn(3000, device=device)) is None


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match=r"torch\.float32.*pack_pair"):
        pack_mask(torch.ones(3))
    with pytest.raises(ValueError, match=r"got 2 bytes .* \(3,\); expected 1"):
        unpack_mask(torch.zeros(2, dtype=torch.uint8), (3,))
    with pytest.raises(ValueError, match=r"shape \(0, 2\).*at least one element"):
        pack_pair(torch.ones(0, 2))
