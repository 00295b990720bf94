"""Seeds spread over all bits."""


def spread(seed: int) -> int:
    """Return SplitMix64 of ``seed`` (Steele et al. 2014), in [0, 2^64).

    torch's CPU generator uses only the lower 32 bits of a seed.
    """
    z = (seed + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return z ^ (z >> 31)
