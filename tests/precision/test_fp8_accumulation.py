"""The model of a tensor core's sums in benchmarks/fp8_accumulation.py."""

import torch

from benchmarks.fp8_accumulation import E4M3, E5M2, error, measured, product


def ones(length: int) -> torch.Tensor:
    return torch.ones(1, length, dtype=torch.float64)


def test_few_bits_lose_small_terms_and_an_interval_saves_them() -> None:
    """2^14 first, then ones: each is below 2^-13 of the running sum, alone and 31 at a time."""
    a = ones(160)
    a[0, 0] = 2.0**14
    assert product(a, ones(160), interval=None) == 2.0**14
    # the first 128 are lost as before, and the others are summed without the large one
    assert product(a, ones(160), interval=128) == 2.0**14 + 32
    assert product(a, ones(160), interval=None, bits=20) == 2.0**14 + 159


def test_terms_are_cut_off_toward_zero() -> None:
    b = ones(32)
    b[0, 1:] = 0
    b[0, 1] = -(2.0**-13) * 1.5
    assert product(ones(32), b, interval=None) == 1 - 2.0**-13
    b[0, 0] = -1.0
    b[0, 1] = 2.0**-14
    assert product(ones(32), b, interval=None) == -1.0


def test_short_sums_of_small_integers_are_exact() -> None:
    torch.manual_seed(0)
    a, b = (torch.randint(-3, 4, (5, 64)).double() for _ in range(2))
    for interval in (None, 32, 128):
        assert torch.equal(product(a, b, interval=interval), a @ b.t())


def test_the_error_grows_with_the_sum_under_fast_accumulation_alone() -> None:
    short, long = (measured(n, (E5M2, E4M3), biased="both", seed=0) for n in (256, 4096))
    assert long["fast"] > 3 * short["fast"] and long["fast"] > 3 * long["exact"]
    assert long["exact"] < 1.5 * short["exact"]
    assert error(torch.ones(3), torch.ones(3)) == 0
    assert measured(256, (E4M3, E4M3), biased="none", seed=0)["casts"] > 0.02
