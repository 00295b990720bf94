"""The surveys' techniques for the network: growth, layers, initialisation, sparsity, adapters."""

from lightning_eff._catalogue.row import Row

GROWTH = (
    Row("progressive stacking", "Gong et al. 2019; Du et al. 2024", ("ProgressiveStacking",)),
    Row("CompoundGrow", "Gu et al. 2020", ("CompoundGrowth",)),
    Row("shallow-to-deep training", "Li et al. 2020", ("ShallowToDeep",)),
    Row("DropIn", "Smith et al. 2016", ("DropIn",)),
    Row("AutoProg", "Li et al. 2022", ("AutoProg",)),
    Row("progressive layer dropping", "Zhang & He 2020", ("ProgressiveLayerDropping",)),
    Row("stochastic depth", "Huang et al. 2016", ("StochasticDepth",)),
    Row("greedy layer-wise training", "Bengio et al. 2006", ("GreedyLayerwise",)),
    Row("layer freezing", "Brock et al. 2017", ("LayerFreezing",)),
)

LAYERS = (
    Row("butterfly and Monarch matrices", "Dao et al. 2019, 2022", ("ButterflyLinear",)),
    Row("low-rank linear maps", "Khodak et al. 2021", ("LowRankLinear",)),
    Row("low-rank convolutions", "Tai et al. 2015", ("LowRankConv",)),
    Row(
        "Winograd's and Strassen's convolutions",
        "Lavin & Gray 2016",
        absent="cuDNN and oneDNN choose these kernels themselves. Results are the same",
    ),
    Row("approximate random dropout", "Song et al. 2018", ("ApproximateRandomDropout",)),
    Row(
        "FlashAttention",
        "Dao et al. 2022",
        how="torch's scaled_dot_product_attention uses it where available; MemoryEfficientAttention reports whether it does",
    ),
    Row("self-attention in less than O(n²) memory", "Rabe & Staats 2021", ("MemoryEfficientAttention",)),
    Row("Linformer", "Wang et al. 2020", ("Linformer",)),
    Row("Performer", "Choromanski et al. 2020", ("Performer",)),
    Row("Reformer", "Kitaev et al. 2020", ("Reformer",)),
    Row("Fastformer", "Wu et al. 2021", ("Fastformer",)),
    Row("A3", "Ham et al. 2020", ("A3Attention",)),
    Row("ELSA", "Ham et al. 2021", ("ELSAAttention",)),
    Row("Sanger", "Lu et al. 2021", ("SangerAttention",)),
    Row("DOTA", "Qu et al. 2022", ("DOTAAttention",)),
    Row("ghost batch normalisation", "Hoffer et al. 2017", ("GhostNorm",)),
    Row("sequential normalisation (SeqNorm)", "Dimitriou & Arandjelović 2022", ("SeqNorm",)),
    Row("RMSNorm", "Zhang & Sennrich 2019", ("RMSNormalization",)),
    Row(
        "collaborative normalisation (CoN)",
        "Xia & Ding 2022",
        absent="for domain adaptation only; it saves nothing in ordinary training",
    ),
    Row("ELU, SELU, GELU, ISRLU, SwiGLU", "Clevert et al. 2015; Shazeer 2020", ("SwapActivation",)),
    Row("attention without biases (Cramming)", "Geiping & Goldstein 2022", ("RemoveQKVBias",)),
)

INITIALIZATION = (
    Row("Fixup", "Zhang et al. 2019", ("Fixup", "ZeroProjections")),
    Row("ReZero", "Bachlechner et al. 2020", ("ReZero",)),
    Row("SkipInit", "De & Smith 2020", ("SkipInit",)),
    Row("T-Fixup", "Huang et al. 2020", ("TFixup",)),
    Row("LayerScale", "Touvron et al. 2021", ("LayerScale",)),
    Row("gated positional self-attention (ConViT)", "d'Ascoli et al. 2021", ("GatedPositionalAttention",)),
    Row("orthogonal initialisation", "Saxe et al. 2013", ("OrthogonalInit",)),
    Row("layer-sequential unit variance (LSUV)", "Mishkin & Matas 2015", ("LSUV",)),
    Row(
        "variances by activation (Kumar)",
        "Kumar 2017",
        absent="a formula per activation for a variance that LSUV measures on a batch",
    ),
    Row("MetaInit", "Dauphin & Schoenholz 2019", ("MetaInit",)),
    Row("ZerO", "Zhao et al. 2021", ("ZerO",)),
)

SPARSITY = (
    Row("lottery tickets, iterative magnitude pruning", "Frankle & Carbin 2018", ("LotteryTickets",)),
    Row("SNIP", "Lee et al. 2018", ("SNIP",)),
    Row("GraSP", "Wang et al. 2020", ("GraSP",)),
    Row("Early-Bird tickets, EarlyBERT", "You et al. 2019; Chen et al. 2020", ("EarlyBird",)),
    Row("RigL", "Evci et al. 2019", ("RigL",)),
    Row("SET", "Mocanu et al. 2018", ("SET", "RigL")),
    Row("SViTE", "Chen et al. 2021", ("SViTE", "RigL")),
    Row("train large, then compress", "Li et al. 2020", ("TrainLargeThenCompress",)),
    Row("regrouping to dense blocks (HRBP)", "Ma et al. 2023", ("BlockSparsity",)),
    Row("2:4 sparsity", "Mishra et al. 2021", ("SemiStructuredSparsity",)),
    Row("ReSprop", "Goli & Aamodt 2020", ("ReSprop",)),
    Row("ResIST", "Dun et al. 2021", ("ResIST",)),
    Row("JointSpar", "Liu & Mozafari 2022", ("JointSpar",)),
    Row(
        "decoupled backpropagation (DDG)",
        "Huo et al. 2018",
        absent="its gradients are some steps old. Pipelines here have exact gradients, with torch's schedules",
    ),
    Row("RepOptimizer", "Ding et al. 2022", ("RepOptimizer",)),
)

ADAPTERS = (
    Row("LoRA", "Hu et al. 2021", ("LoRA",)),
    Row("VeRA", "Kopiczko et al. 2023", ("VeRA",)),
    Row("adapters", "Houlsby et al. 2019", ("HoulsbyAdapters",)),
    Row("prompt tuning, prefix tuning", "Lester et al. 2021; Li & Liang 2021", ("PromptTuning",)),
    Row("visual prompt tuning", "Jia et al. 2022", ("VisualPromptTuning",)),
    Row("BitFit", "Ben Zaken et al. 2021", ("BitFit",)),
    Row("QLoRA", "Dettmers et al. 2023", ("QuantizedBase",), "together with LoRA"),
)
