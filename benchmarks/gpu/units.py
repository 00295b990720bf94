"""The units, in the order of their worth; by estimate 40 minutes in all on one H100, and at most 90 seconds each.

The kernels and what they are for come first: their tests compiled, their bandwidth, FP8, training, memory.
"""

from typing import Any

from benchmarks.gpu.driver import Unit

TOKENS, WIDTH, LENGTH = 16384, 4096, 2048
LOW = (
    "bf16",
    "tensorwise",
    "rowwise",
    "blockwise",
    "int8",
    "stochastic rounding",
    "tensorwise delayed",
    "tensorwise fastest",
)
AO = ("torchao tensorwise", "torchao rowwise")
KERNELS = (
    (
        "fp8_matmul",
        "fp8_cast",
        "fp8_launches",
        "tuning",
        "norm",
        "stochastic_rounding",
        "bf16_adamw",
        "int8_quantization",
    ),
    ("group_quantization", "linear_cross_entropy", "compressed_norm", "compressed_gelu", "bit_mask"),
)
# What trains on the device and needs neither several processes nor anything of a CPU's.
CUDA = (
    "tests/memory/test_optimizer_offload.py",
    "tests/memory/test_activation_offload.py",
    "tests/precision/test_fp8_products.py",
    "tests/precision/test_fp8_blocks.py",
    "tests/precision/test_int8.py",
    "tests/precision/test_stochastic_rounding_bf16.py",
)
SPARSE = "tests/model/sparsity/test_sparse_products.py"
TRAINED = "hugging_face or raises_where or neutral or plain_modules or fits_again or no_trace or reports"
RESUMED = "resume_equals"


def units(*, tiny: bool = False) -> list[Unit]:
    """All of them.

    Args:
        tiny: with sizes that take a few seconds on a CPU; what runs is the same.
    """
    low, trained = low_precision(tiny), [training(*arm, tiny) for arm in ARMS]
    eager = [unit for unit in low if unit.name.startswith("low precision gpt2 eager")]
    return [
        *kernel_tests(tiny),
        Unit("bandwidth", "benchmarks.gpu.bandwidth"),
        *(unit for unit in low if unit not in eager),
        *trained[:TUNED],
        *memory(tiny),
        Unit("ceilings", "benchmarks.gpu.ceilings"),
        suite(
            "tests cuda",
            CUDA,
            "not ddp",
            tiny,
            "tests/memory/test_optimizer_offload.py::test_an_optimizer_that_unscales_itself_is_refused",
        ),
        *eager,
        *trained[TUNED:],
        *sparse(tiny),
        suite(
            "contract",
            ("tests/test_contract.py",),
            TRAINED,
            tiny,
            "tests/test_contract.py::test_the_same_callback_fits_again[LocalSGD]",
        ),
        suite(
            "contract resume",
            ("tests/test_contract.py",),
            RESUMED,
            tiny,
            "tests/test_contract.py::test_every_stand_in_has_a_case",
        ),
    ]


def suite(name: str, tests: tuple[str, ...], keywords: str, tiny: bool, small: str) -> Unit:
    """A part of the tests; ``small`` is the one of them that ``tiny`` runs."""
    settings = {"tests": [small] if tiny else [*tests], "keywords": "" if tiny else keywords, "accelerator": "gpu"}
    return Unit(name, "benchmarks.gpu.suites", settings, ("pytest", "transformers"))


def kernel_tests(tiny: bool) -> list[Unit]:
    """The kernels' own tests, compiled where there is a GPU."""
    small = ("test_norm.py::test_what_backward_keeps", "test_bit_mask.py::test_triton_bytes_do_not_depend_on_geometry")
    return [
        suite(
            f"tests kernels {i + 1}",
            tuple(f"tests/kernels/test_{name}.py" for name in names),
            "",
            tiny,
            f"tests/kernels/{small[i]}",
        )
        for i, names in enumerate(KERNELS)
    ]


def low_precision(tiny: bool) -> list[Unit]:
    """Linear map, block and GPT-2, each eager and then compiled; GPT-2 compiled in parts, since each arm compiles for long."""
    small = {"width": 32, "tokens": 32, "length": 16}
    size = small if tiny else {"width": WIDTH, "tokens": TOKENS, "length": LENGTH}
    found = []
    for case in ("linear", "block"):
        for how in ("eager", "compiled"):
            arms = ["tensorwise" if case == "linear" else "bf16"] if tiny and how == "compiled" else [*LOW, *AO]
            settings: dict[str, Any] = {"case": case, "compiled": how == "compiled", "arms": arms, **size}
            found.append(Unit(f"low precision {case} {how}", "benchmarks.gpu.low_precision", settings))
    thirds = [LOW[:3], LOW[3:6], (*LOW[6:], *AO)]
    for i, some in enumerate([("blockwise", "stochastic rounding")] if tiny else thirds):
        found.append(gpt2(f"low precision gpt2 eager {i + 1}", "low precision", [*some], tiny))
    for i, arm in enumerate(["bf16"] if tiny else [*LOW[:-1], *AO]):  # compiling one takes 40 s on an H100's host
        found.append(gpt2(f"low precision gpt2 compiled {i + 1}", "low precision", [arm], tiny, compiled=True))
    return found


def sparse(tiny: bool) -> list[Unit]:
    """Sparse kernels against dense products, in a linear layer and in a block; and their tests on the device."""
    size = {"width": 32, "tokens": 32, "length": 16} if tiny else {"width": WIDTH, "tokens": TOKENS, "length": LENGTH}
    return [
        Unit(f"sparse {of}", "benchmarks.gpu.sparse", {"case": of, "block": 16 if tiny else 64, **size})
        for of in ("linear", "block")
    ] + [suite("tests sparse", (SPARSE,), "device", tiny, f"{SPARSE}::test_dense_says_nothing")]


def memory(tiny: bool) -> list[Unit]:
    """Ten arms, time and bytes of a step; then the largest batch of each that runs eagerly."""
    eager = [["plain", "full", "sqrt"], ["selective", "optimal 0.5"], ["compress 4", "optimizer offload"], ["offload"]]
    pairs = [["plain", "full"], ["sqrt", "selective"], ["optimal 0.5", "offload"], ["compress 4", "optimizer offload"]]
    compiled = ["compile 1.0", "compile 0.5"]
    if tiny:
        eager, pairs, compiled = [[arms[-1]] for arms in eager], [[arms[-1]] for arms in pairs], compiled[:1]
    return [
        *(gpt2(f"memory {i + 1}", "memory", arms, tiny) for i, arms in enumerate(eager)),
        *(gpt2(f"memory compiled {i + 1}", "memory", [arm], tiny, compiled=True) for i, arm in enumerate(compiled)),
        *(gpt2(f"largest batch {i + 1}", "largest", arms, tiny) for i, arms in enumerate(pairs)),
    ]


def gpt2(name: str, what: str, arms: list[str], tiny: bool, *, compiled: bool = False) -> Unit:
    settings: dict[str, Any] = {"what": what, "arms": arms, "compiled": compiled, "batch_size": 2 if tiny else 16}
    settings |= {"rounds": 1 if tiny else 2, "steps": 1 if tiny else 10}
    return Unit(name, "benchmarks.gpu.gpt2", settings, ("transformers",))


ARMS: tuple[tuple[str, tuple[str, ...], int, float], ...] = (
    ("training compiled", ("compiled",), 1, 6e-4),
    ("training muon compiled fused", ("compiled", "muon", "fused_head"), 1, 6e-4),
    ("training compiled twice the rate", ("compiled",), 1, 1.2e-3),
    ("training compiled half the rate", ("compiled",), 1, 3e-4),
    ("training plain", (), 1, 6e-4),
    ("training copy", (), 2, 6e-4),
    ("training muon", ("muon",), 1, 6e-4),
    ("training stacking", ("stacking",), 1, 6e-4),
    ("training length warmup", ("length_warmup",), 1, 6e-4),
)
TUNED = 4  # the first arms: the baseline at three learning rates, and what is compared with the best of them


def training(name: str, recipes: tuple[str, ...], seed: int, lr: float, tiny: bool) -> Unit:
    """GPT-2 as ``benchmarks/gpt2/baseline.yaml`` has it, for 25 seconds; what is compiled is so in the rehearsal."""
    model: dict[str, Any] = {"block_size": 512, "dropout": 0.1, "lr": lr, "warmup_steps": 50}
    data: dict[str, Any] = {"block_size": 512, "batch_size": 32, "num_eval_windows": 320}
    if tiny:
        model |= {"n_embd": 16, "n_head": 2, "vocab_size": 256, "warmup_steps": 2}
        data |= {"batch_size": 2, "num_eval_windows": 2, "max_bytes": 2_000_000}
    settings = {
        "recipes": [*recipes],
        "seed": seed,
        "seconds": 1.0 if tiny else 25.0,
        "rehearsal_steps": 4 if tiny else 50,
    }
    return Unit(name, "benchmarks.gpu.training", {**settings, "model": model, "data": data}, ("transformers",))
