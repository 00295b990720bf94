"""Does it pay to choose samples where labels are wrong, or data redundant? Each method beside a random choice of as many.

    python benchmarks/selection.py run [--seeds 3] [--rounds 3]
    python benchmarks/selection.py page

Two tasks, in ``benchmarks/spoilt``: noisy digits of which one training label in five is wrong, and noisy digits half of whose
training set is copies of 32 images. How it is measured stands in ``benchmarks/study.py``.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.study import BASELINE, Subject, main  # noqa: E402

HALF, DATA = "random_half", "random_data"
#: Each recipe's random control; the baseline where as many samples are trained on.
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
    words="A ViT of 2 blocks of width 32 on scikit-learn's digits, shifted and under noise, 256 a batch; validation is clean."
    " Each method trains on half of a batch (`auto_assist` on as many as it picks, `data_pruning` on half of the data set from"
    " the eleventh epoch on) and stands beside a random choice of as many, which costs no score; `robust_importance_sampling`"
    " draws whole batches, so the baseline is its control. The batch size is not tuned, and where `random_half` is faster than"
    " the baseline, smaller batches are. An epoch is of five steps, in which `robust_importance_sampling` learns its"
    " probabilities four times: that makes its steps nearly twice as dear as the baseline's. The models of `rho_loss` are"
    " counted.",
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
