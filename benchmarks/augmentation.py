"""Does it pay to augment, where few images are seen many times? Each augmentation beside none, for as long.

    python benchmarks/augmentation.py run [--seeds 3] [--rounds 3]
    python benchmarks/augmentation.py page

Two tasks, in ``benchmarks/augmented``: scikit-learn's digits as they are, and 512 rings of 64 x 64 pixels; each is seen
some dozens of times. How it is measured stands in ``benchmarks/study.py``.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.study import Subject, main  # noqa: E402

ARMS = (
    "label_smoothing",
    "cutout",
    "random_erasing",
    "mixup",
    "cut_mix",
    "manifold_mixup",
    "saliency_mix",
    "trans_mix",
    "token_mix",
    "co_mixup",
    "rand_augment",
    "auto_augment",
    "aug_mix",
)
SUBJECT = Subject(
    name="augmentation",
    title="Augmenting few images that are seen many times",
    words="A ViT of 2 blocks of width 32 on scikit-learn's 1,297 training digits as they are, and one of 3 blocks of width 48"
    " on 512 rings of 64 x 64 pixels, without noise. Augmentations have their papers' settings. What"
    " turns an image may change a ring's label, which is a direction; that is left as it is.",
    folder=ROOT / "benchmarks" / "augmented",
    tasks={"digits": "Digits", "rings": "Rings"},
    arms=ARMS,
    budgets={"digits": 8.0, "rings": 20.0},
    rates={"digits": ("0.0015", "0.003", "0.006", "0.012"), "rings": ("0.003", "0.006", "0.012")},
)

if __name__ == "__main__":
    main(SUBJECT, __doc__)
