"""The tasks and the arms of :mod:`benchmarks.evidence`: what each is called, and what its paper claims."""

TASKS = {
    "gpt": "GPT on source text",
    "vit": "ViT on noisy digits",
    "bert": "masked language model on source text",
    "gpt2": "GPT-2 124M on source text, one GPU",
    "rings": "ViT on rings with a hatched mark to find",
    "bert8k": "masked language model on source text in 8,255 pieces",
    "gpt256": "GPT of width 256 on source text",
    "trained": "trained GPT that trains on, on source text",
}

SHORT = {
    "gpt": "GPT",
    "vit": "ViT",
    "bert": "MLM",
    "gpt2": "GPT-2",
    "rings": "rings",
    "bert8k": "MLM, 8k pieces",
    "gpt256": "GPT, width 256",
    "trained": "trained GPT",
}

# Recipe, technique, and what its paper claimed: of their models and budgets, not of these.
CLAIMS = {
    "stacking": (
        "ProgressiveStacking",
        "about 25 % less time for BERT (Gong et al. 2019); 54.6 % fewer tokens to the same loss at 7B (Du et al. 2024)",
    ),
    "length_warmup": (
        "SequenceLengthWarmup",
        "1.65 times as fast (Press et al. 2020); GPT-2 3.3 times, at 8 times the batch (Li et al. 2021)",
    ),
    "averaging": (
        "LatestWeightAveraging",
        "68 GPU-hours of ResNet-50 and 30 of RoBERTa saved, before the rate is decayed (Kaddour 2022)",
    ),
    "sharpness": (
        "SharpnessAwareMinimization",
        "+0.4 to +1.9 points of ImageNet accuracy at twice the time of a step (Foret et al. 2020)",
    ),
    "importance_sampling": (
        "ImportanceSampling",
        "lower training loss at equal time, up to an order of magnitude (Katharopoulos & Fleuret 2018)",
    ),
    "selective_backprop": ("SelectiveBackprop", "up to 3.5 times as fast to a target (Jiang et al. 2019)"),
    "layer_dropping": ("ProgressiveLayerDropping", "24 % less time at equal samples (Zhang & He 2020)"),
    "compound_growth": ("CompoundGrowth", "1.74 times as fast for BERT-base, 1.82 for BERT-large (Gu et al. 2020)"),
    "auto_prog": ("AutoProg", "ViTs trained up to 85.1 % faster at no loss of accuracy (Li et al. 2022)"),
    "zero_projections": (
        "ZeroProjections",
        "10,000 layers without norms trained (Zhang et al. 2019); among what took the records of GPT-2 down (modded-nanogpt)",
    ),
    "data_driven_init": (
        "DataDrivenInit",
        "whitened patches: 21 epochs of CIFAR-10 where 45 were needed (Jordan 2024); of bigrams no paper's claim is known",
    ),
}

# The same of what moves the weights: their settings were searched on the search's own seed.
WEIGHTS = {
    "muon": (
        "Muon",
        "1.35 times fewer tokens than AdamW to a loss (Jordan et al. 2024); at most 1.4 times as fast as tuned AdamW at 0.1B,"
        " 1.1 at 1.2B (Wen et al. 2025)",
    ),
    "adamw_matrices": (
        "AdamW with Muon's decay",
        "a control of Muon: the baseline's rate in every group, Muon's decay of 0.15 on the matrices",
    ),
    "soap": ("SOAP", "40 % fewer steps and 35 % less time than AdamW, at 360M and 660M (Vyas et al. 2024)"),
    "schedule_free": (
        "ScheduleFree",
        "as good as a tuned schedule, without one (Defazio et al. 2024); first of AlgoPerf's self-tuning track, v0.5",
    ),
    "moving_average": ("ExponentialMovingAverage", "30 of 2750 steps by a blended tail (modded-nanogpt's records)"),
    "batch_warmup": (
        "BatchSizeWarmup",
        "fewer updates at equal epochs (Smith et al. 2017); about 2 % of the time (modded-nanogpt's records)",
    ),
    "rate_schedule": (
        "LearningRateSchedule",
        "a decay over the true budget is what others must beat (Kaddour et al. 2023)",
    ),
}

# The same of what costs a step less, or has more for it; controls and stacks are arms of their own.
COMPUTE = {
    "ngram": (
        "NgramEmbedding",
        "the loss of a model of 1B with 400M and a large vocabulary of n-grams (Huang et al. 2025); 165 of 1,765 steps"
        " (modded-nanogpt's records)",
    ),
    "ngram_dense": ("NgramEmbedding(optimizer='module')", "a control: the same table under the baseline's optimizer"),
    "wide": ("the same number of parameters in wider layers", "a control: the baseline at width 256"),
    "compile": (
        "RegionalCompilation",
        "1.41 times as fast, a geometric mean over 180 models on an A100 (Ansel et al. 2024)",
    ),
    "progressive_resizing": (
        "ProgressiveResizing",
        "a part of what trains EfficientNetV2 5 to 11 times as fast as ViT, at better ImageNet accuracy (Tan & Le 2021)",
    ),
    "efficient_train": (
        "EfficientTrain",
        "1.5 times as fast at equal ImageNet accuracy, with augmentation that grows along (Wang et al. 2022)",
    ),
    "fix_res": ("FixRes", "ResNet-50 trained at 224 pixels: 77.0 to 79.0 % tested at 384 (Touvron et al. 2019)"),
    "patch_dropout": ("PatchDropout", "half of FLOPs and memory or more saved on ImageNet (Liu et al. 2022)"),
    "random_ltd": ("RandomLTD", "a third of the compute of GPT's pretraining, 25.6 % of its time (Yao et al. 2022)"),
    "two_blocks": (
        "the first block and the last alone",
        "a control of RandomLTD: without the blocks that it thins out",
    ),
    "fused_head": (
        "FusedLinearCrossEntropy",
        "a part of what trains BERT in 24 hours on one server (Izsak et al. 2021); with further kernels 20 % more throughput"
        " and 60 % less memory on language models (Hsu et al. 2024)",
    ),
    "mask_rate": (
        "MaskRateSchedule",
        "up to 1.89 times as fast to BERT-base's quality as a fixed rate of 15 % (Ankner et al. 2023)",
    ),
    "update_periods": (
        "UpdatePeriods",
        "embedding and output layer at every second step, among what took the records of GPT-2 down (modded-nanogpt)",
    ),
    "muon_fused_mask_rate_periods": (
        "Muon + FusedLinearCrossEntropy + MaskRateSchedule + UpdatePeriods",
        "none: put together here",
    ),
    "upcycling": (
        "SparseUpcycling",
        "a dense model trained on for as long needs more to the same quality; about half of the dense training suffices"
        " (Komatsuzaki et al. 2023)",
    ),
    "more_masked": ("MaskRateSchedule(end=0.3)", "a control: its first rate throughout"),
    "fused_mask_rate": ("FusedLinearCrossEntropy + MaskRateSchedule", "none: put together here"),
    "muon_grown": ("Muon + ProgressiveStacking", "a control of the next: the same without the table"),
    "muon_grown_ngram": ("Muon + ProgressiveStacking + NgramEmbedding", "none: put together here"),
    "muon_grown_ngram_compiled": (
        "Muon + ProgressiveStacking + NgramEmbedding + RegionalCompilation",
        "none: put together here",
    ),
}

# Other settings of a technique than its recipe's, and what they are, on those tasks that have its recipe. Of the techniques in
# CLAIMS, whose recipes have their papers', they were searched; of those in WEIGHTS, whose recipes were searched, they are their
# papers'.
SETTINGS = {
    "stacking": {
        "stacking_until_half": "2 of 4 blocks until 0.5 of the budget, not 0.3",
        "stacking_briefly": "2 of 4 blocks until 0.15 of the budget",
        "stacking_from_one": "1 block until 0.1, 2 until 0.3",
    },
    "length_warmup": {
        "length_warmup_from_half": "from half of the length, not a quarter",
        "length_warmup_briefly": "from half of the length, until 0.15 of the budget, not 0.3",
    },
    "averaging": {
        "averaging_short": "snapshots half as far apart",
        "averaging_shortest": "3 snapshots, not 6, still closer together",
    },
    "sharpness": {
        "sharpness_seldom": "every 5th step",
        "sharpness_seldom_and_small": "every 5th step, rho 0.02",
    },
    "importance_sampling": {"importance_sampling_of_half": "half of each batch, not a third"},
    "selective_backprop": {
        "selective_backprop_more": "three quarters of each batch, not half",
        "selective_backprop_early": "half of each batch until 0.5 of the budget",
    },
    "layer_dropping": {
        "layer_dropping_less": "theta 0.75, not 0.5",
        "layer_dropping_least": "theta 0.9",
    },
    "compound_growth": {
        "compound_growth_briefly": "in full from 0.15 of the budget on, not 0.3",
        "compound_growth_of_width_and_depth": "the full length throughout",
    },
    "auto_prog": {"auto_prog_until_half": "all blocks from 0.5 of the budget on, not 0.3"},
    "zero_projections": {
        "zero_projections_halved": "half of what they begin with, the head as it is",
        "zero_projections_without_head": "zero, the head as it is",
    },
    "data_driven_init": {"data_driven_init_of_more_batches": "counted in 400 batches, not 100"},
}
PAPERS = {
    "muon": {"muon_paper": "rate 0.02, momentum 0.95, no decay"},
    "soap": {"soap_paper": "rate 0.003, betas 0.95, decay 0.01"},
    "schedule_free": {"schedule_free_paper": "momentum 0.9, the baseline's rate, warm-up over 50 steps"},
    "batch_warmup": {"batch_warmup_paper": "batches double twice, at the baseline's rate"},
}
SAME = {("vit", "schedule_free"), ("bert", "schedule_free")}  #: where the search had found the paper's


def settings() -> list[str]:
    """The names of all of them."""
    return [one for part in (SETTINGS, PAPERS) for of in part.values() for one in of]


# What reaches the baseline's final loss in the least time, and the same without one of its parts; put together here.
EXACT = {"fused_head"}  #: makes the baseline's own steps
LEAST = {"gpt256": 150.0}  #: the task's own budget, in seconds, where it is not 60
CHANGES = {"muon_grown_ngrams", "grown_ngrams", "muon_ngrams"}  #: these change the model
GOAL = {
    "muon_grown_ngrams": "Muon + ProgressiveStacking + NgramEmbedding",
    "grown_ngrams": "ProgressiveStacking + NgramEmbedding",
    "muon_ngrams": "Muon + NgramEmbedding",
    "muon_grown": "Muon + ProgressiveStacking",
    "muon_grown_length_mask_rate": "Muon + ProgressiveStacking + SequenceLengthWarmup + MaskRateSchedule",
    "muon_grown_length_schedule": "Muon + ProgressiveStacking + SequenceLengthWarmup + LearningRateSchedule",
    "muon_grown_length": "Muon + ProgressiveStacking + SequenceLengthWarmup",
    "muon": "Muon",
    "soap": "SOAP",
    "kfac": "KFAC",
    "soap_patches": "SOAP + PatchDropout",
    "patch_dropout": "PatchDropout",
    "muon_fused_mask_rate": "Muon + FusedLinearCrossEntropy + MaskRateSchedule",
    "fused_mask_rate": "FusedLinearCrossEntropy + MaskRateSchedule",
    "fused_head": "FusedLinearCrossEntropy",
    "mask_rate": "MaskRateSchedule",
}
