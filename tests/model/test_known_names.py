"""Names of arguments that users know from other libraries."""

from typing import Any

import pytest

import lightning_eff


@pytest.mark.parametrize(
    ("name", "known", "argument", "value"),
    [
        ("StochasticDepth", "p", "drop", 0.25),
        ("StochasticDepth", "drop_rate", "drop", 0.25),
        ("StochasticDepth", "drop_path_rate", "drop", 0.25),
        ("ProgressiveLayerDropping", "theta", "theta_min", 0.25),
        ("LayerFreezing", "freeze_start", "start", 0.25),
        ("LayerFreezing", "freeze_level", "depth", 0.25),
        ("LayerScale", "init_values", "init", 1e-5),
        ("GatedPositionalAttention", "local_up_to_layer", "gated", 3),
        ("GatedPositionalAttention", "locality_strength", "locality", 0.25),
        ("Performer", "nb_features", "features", 64),
        ("Reformer", "num_buckets", "buckets", 8),
        ("Reformer", "num_hashes", "rounds", 4),
    ],
)
def test_a_known_name_means_the_argument(name: str, known: str, argument: str, value: Any) -> None:
    cls: Any = getattr(lightning_eff, name)
    made = cls(**{known: value})
    assert getattr(made, argument) == value
    assert repr(made) == f"{name}({argument}={value!r})"
    assert f"``{known}``" in cls.__doc__, "the docstring says it"
