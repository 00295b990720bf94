"""Measure the gain of choosing samples with wrong labels or redundant data, compared with random choices.

    python benchmarks/selection.py run [--seeds 3] [--rounds 3]
    python benchmarks/selection.py page

``benchmarks/spoilt`` has two tasks with noisy digits. In one, one training label in five is wrong. In the other, half of the
training set is copies of 32 images. ``benchmarks/study.py`` explains the method.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.study import BASELINE, Subject, main  # noqa: E402

HALF, DATA = "random_half", "random_data"
#: Each recipe's random control, or the baseline if it trains on the same number of samples.
CONTROLS = {
    "selective_backprop": HALF,
    "ordered_sgd": HALF,
    "loss_biased_sampling": HALF,
    "importance_sampling": HALF,
    "rho_loss": HALF,
    "proxy_selection": HALF,
    "auto_assist": HALF,
    "data_pruning": DATA,
    "robust_importance_sampling": BASELINE,
}
SUBJECT = Subject(
    name="selection",
    title="Choosing samples where labels are wrong, or data redundant",
    words="The task is a ViT with 2 blocks of width 32 on scikit-learn's digits, shifted and with noise, in batches of 256."
    " Validation data is clean. Each method trains on half of a batch. `auto_assist` decides the number itself, and"
    " `data_pruning` trains on half of the data set from the eleventh epoch on. The control is a random choice of the same"
    " number, which needs no scores. `robust_importance_sampling` draws whole batches, so the baseline is its control. The"
    " batch size is not tuned. If `random_half` is faster than the baseline, so are smaller batches. An epoch has five steps,"
    " in which `robust_importance_sampling` learns its probabilities four times, so its step cost is nearly twice the"
    " baseline's. The training of `rho_loss`'s models counts.",
    folder=ROOT / "benchmarks" / "spoilt",
    tasks={
        "wrong": "One training label in five is wrong",
        "repeated": "Half of the training set is copies of 32 images",
    },
    arms=(HALF, DATA, *CONTROLS),
    budgets={"wrong": 6.0, "repeated": 6.0},
    rates={"wrong": ("0.006", "0.012", "0.024", "0.048"), "repeated": ("0.003", "0.006", "0.012", "0.024")},
    controls=CONTROLS,
)

if __name__ == "__main__":
    main(SUBJECT, __doc__)
