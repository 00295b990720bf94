"""The surveys' techniques for data: augmentation, selection, curricula, tokens."""

from lightning_eff._catalogue.row import Row

AUGMENTATION = (
    Row("Cutout", "DeVries & Taylor 2017", ("Cutout",)),
    Row("Random Erasing", "Zhong et al. 2017", ("RandomErasing",)),
    Row("Mixup", "Zhang et al. 2017", ("Mixup",)),
    Row("CutMix", "Yun et al. 2019", ("CutMix",)),
    Row("Manifold Mixup", "Verma et al. 2019", ("ManifoldMixup",)),
    Row("SaliencyMix", "Uddin et al. 2020", ("SaliencyMix",)),
    Row("TokenMix", "Liu et al. 2022", ("TokenMix",)),
    Row("TransMix", "Chen et al. 2022", ("TransMix",)),
    Row("Co-Mixup", "Kim et al. 2021", ("CoMixup",)),
    Row("SuperMix", "Dabouei et al. 2021", ("SuperMix",)),
    Row("StyleMix", "Hong et al. 2021", ("StyleMix",)),
    Row("AugMix", "Hendrycks et al. 2019", ("AugMix",)),
    Row("RandAugment", "Cubuk et al. 2019", ("RandAugment",)),
    Row("AutoAugment", "Cubuk et al. 2018", ("AutoAugment",)),
    Row("EDA", "Wei & Zou 2019", ("EDA",)),
    Row("SeqMix", "Guo et al. 2020", ("SeqMix",)),
    Row(
        "back-translation, ChatAug",
        "Sennrich et al. 2016; Dai et al. 2023",
        absent="another model creates the texts before training, so nothing happens during training",
    ),
    Row("DiffAugment", "Zhao et al. 2020", ("DiffAugment",)),
)

SELECTION = (
    Row("importance sampling by a gradient bound", "Katharopoulos & Fleuret 2018", ("ImportanceSampling",)),
    Row("loss-biased importance sampling", "Katharopoulos & Fleuret 2017", ("LossBiasedSampling",)),
    Row("robust approximate importance sampling (RAIS)", "Johnson & Guestrin 2018", ("RobustImportanceSampling",)),
    Row("selective backprop", "Jiang et al. 2019", ("SelectiveBackprop",)),
    Row("ordered SGD", "Kawaguchi & Lu 2020", ("OrderedSGD",)),
    Row("K-SAM", "Ni et al. 2022", ("KSAM",)),
    Row("GraNd and EL2N", "Paul et al. 2021", ("DataPruning",)),
    Row("prototype pruning", "Sorscher et al. 2022", ("DataPruning",), "score='prototypes'"),
    Row("DSIR", "Xie et al. 2023", ("SampleSubset",)),
    Row("RHO-LOSS", "Mindermann et al. 2022", ("RHOLoss",)),
    Row("MG-ViT", "Chen et al. 2022", ("MaskGuidedTokens",), "its active choice of samples is not implemented"),
    Row("AutoAssist", "Zhang et al. 2019", ("AutoAssist",)),
    Row(
        "ReLo",
        "Sujit et al. 2022",
        absent="it orders the replay buffer of reinforcement learning, which belongs to the LightningModule",
    ),
    Row("non-blocking minibatches", "He & Dube 2022", ("DropSlowest",)),
)

CURRICULUM = (
    Row("curriculum learning by difficulty", "Bengio et al. 2009; Wu et al. 2021", ("DifficultyPacing",)),
    Row("progressive resizing", "Howard 2018; Tan & Le 2021", ("ProgressiveResizing",)),
    Row("train-test resolution (FixRes)", "Touvron et al. 2019", ("FixRes",)),
    Row("EfficientTrain", "Wang et al. 2022", ("EfficientTrain",)),
    Row("sequence length warm-up", "Press et al. 2020; Li et al. 2021", ("SequenceLengthWarmup",)),
    Row(
        "word, phrase, sentence",
        "Ding et al. 2021",
        ("DifficultyPacing",),
        "with the granularity as the score of each sample",
    ),
    Row(
        "accelerated self-supervised learning",
        "Koçyiğit et al. 2023",
        ("ProgressiveResizing", "LearningRateSchedule"),
        "combined; its choice of the hardest augmentation is not implemented",
    ),
)

TOKENS = (
    Row("masked autoencoder (MAE)", "He et al. 2021", ("PatchDropout",)),
    Row("FLIP", "Li et al. 2022", ("PatchDropout",), "on the image encoder"),
    Row("MASS", "Song et al. 2019", ("SpanMasking",)),
    Row("sparse token prediction", "Liu et al. 2019; Izsak et al. 2021", ("FusedLinearCrossEntropy",)),
    Row("random layerwise token dropping (random-LTD)", "Yao et al. 2022", ("RandomLTD",)),
    Row("token dropping", "Hou et al. 2022", ("TokenDropping",)),
    Row("Turbo", "Han et al. 2022", ("PartialTokenTraining",)),
    Row("token merging (ToMe)", "Bolya et al. 2022", ("TokenMerging",)),
)
