"""Measure the gain of augmentations with few images seen many times, compared with none for the same time.

    python benchmarks/augmentation.py run [--seeds 3] [--rounds 3]
    python benchmarks/augmentation.py page

``benchmarks/augmented`` has two tasks: scikit-learn's digits without changes, and 512 rings of 64 x 64 pixels. Each image is
seen dozens of times. ``benchmarks/study.py`` explains the method.
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
    words="The tasks are a ViT with 2 blocks of width 32 on scikit-learn's 1,297 training digits, and one with 3 blocks of"
    " width 48 on 512 rings of 64 x 64 pixels, both without noise. Augmentations have their papers' settings. A rotation can"
    " change the label of a ring, which is a direction. The study does not correct this.",
    folder=ROOT / "benchmarks" / "augmented",
    tasks={"digits": "Digits", "rings": "Rings"},
    arms=ARMS,
    budgets={"digits": 8.0, "rings": 20.0},
    rates={"digits": ("0.0015", "0.003", "0.006", "0.012"), "rings": ("0.003", "0.006", "0.012")},
)

if __name__ == "__main__":
    main(SUBJECT, __doc__)
