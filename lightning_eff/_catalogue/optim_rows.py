"""The surveys' techniques for optimizers, budgets, communication, memory, precision and systems."""

from lightning_eff._catalogue.row import Row

OPTIMIZERS = (
    Row(
        "Nesterov, AdaGrad, RMSprop, Adadelta, Adam, AdamW",
        "various",
        how="in torch.optim; as a callback, by ReplaceOptimizer",
    ),
    Row("changing the optimizer from outside", "–", ("ReplaceOptimizer",)),
    Row("Lion", "Chen et al. 2023", ("Lion",)),
    Row("Adan", "Xie et al. 2022", ("Adan",)),
    Row("LARS", "You et al. 2017", ("LARS",)),
    Row("LAMB", "You et al. 2019", ("LAMB",)),
    Row("Shampoo", "Gupta et al. 2018", ("Shampoo",)),
    Row("K-FAC", "Martens & Grosse 2015", ("KFAC",)),
    Row("M-FAC", "Frantar et al. 2021", ("MFAC",)),
    Row("sampled quasi-Newton", "Berahas et al. 2022", ("SampledQuasiNewton",)),
    Row("regularized nonlinear acceleration (RNA)", "Scieur et al. 2016", ("RegularizedNonlinearAcceleration",)),
    Row("sharpness-aware minimization (SAM)", "Foret et al. 2020", ("SharpnessAwareMinimization",)),
    Row("efficient SAM (ESAM)", "Du et al. 2021", ("EfficientSAM",)),
    Row("LookSAM", "Liu et al. 2022", ("LookSAM",)),
    Row("sharpness-aware training for free (SAF, MESA)", "Du et al. 2022", ("SAF", "MESA")),
    Row(
        "m-SAM", "Andriushchenko 2022", ("SharpnessAwareMinimization",), "each rank ascends on its own part of a batch"
    ),
    Row(
        "supervised contrastive learning (SupCon)",
        "Khosla et al. 2020",
        absent="it needs its own loss and two training stages, which a callback on an unchanged module cannot choose",
    ),
    Row(
        "MeZO",
        "Malladi et al. 2023",
        absent="it trains without a backward pass, for fine-tuning with very little memory, and is far slower",
    ),
    Row(
        "forward-forward, GIM, SigProp",
        "Hinton 2022; Löwe et al. 2019; Kohan et al. 2022",
        absent="they train without the end-to-end loss of an unchanged training_step, and do not reach its results",
    ),
)

BUDGET = (
    Row("linear scaling of the rate, warm-up", "Goyal et al. 2017", ("LinearScaling",)),
    Row("growing batches", "Smith et al. 2017", ("BatchSizeWarmup",)),
    Row("gradient noise scale", "McCandlish et al. 2018", ("GradientNoiseScale",)),
    Row("SGDR", "Loshchilov & Hutter 2016", ("LearningRateSchedule",), "shape='sgdr'"),
    Row("cyclical rates (CLR)", "Smith 2015", ("LearningRateSchedule",), "shape='clr'"),
    Row("1-cycle", "Smith & Topin 2017", ("LearningRateSchedule",), "shape='one_cycle'"),
    Row("budgeted linear decay", "Li et al. 2019", ("LearningRateSchedule",), "shape='linear'"),
    Row("REX", "Chen et al. 2021", ("LearningRateSchedule",), "shape='rex'"),
    Row("Eigencurve, elastic step decay (ESD)", "Pan et al. 2021", ("LearningRateSchedule",), "shape='esd'"),
    Row("exponential moving average", "Polyak & Juditsky 1992", ("ExponentialMovingAverage",)),
    Row("stochastic weight averaging (SWA)", "Izmailov et al. 2018", ("StochasticWeightAveraging",)),
    Row("latest weight averaging (LAWA)", "Kaddour 2022", ("LatestWeightAveraging",)),
    Row("trainable weight averaging (TWA)", "Li et al. 2022", ("TrainableWeightAveraging",)),
    Row("Lookahead", "Zhang et al. 2019", ("Lookahead",)),
    Row("BERT in 24 hours", "Izsak et al. 2021", ("LearningRateSchedule", "FusedLinearCrossEntropy"), "under max_time"),
    Row("Cramming", "Geiping & Goldstein 2022", ("LearningRateSchedule", "RemoveQKVBias", "FusedLinearCrossEntropy")),
    Row("compute-optimal sizes (Kaplan, Chinchilla)", "Hoffmann et al. 2022", how="`lightning-eff budget`"),
    Row(
        "budgeted training of vision transformers",
        "Pan et al. 2023",
        ("BudgetedViT",),
    ),
)

COMMUNICATION = (
    Row("1-bit SGD", "Seide et al. 2014", ("CompressedDDPStrategy",), "strategy='ddp_onebit'"),
    Row(
        "1-bit Adam, 1-bit LAMB",
        "Tang et al. 2021; Li et al. 2021",
        ("DeepSpeedEffStrategy",),
        "'deepspeed_onebit_adam'",
    ),
    Row("0/1 Adam", "Lu et al. 2022", ("DeepSpeedEffStrategy",), "'deepspeed_zero_one_adam'"),
    Row("PowerSGD", "Vogels et al. 2019", ("CompressedDDPStrategy",), "strategy='ddp_powersgd'"),
    Row("QSGD, CGX", "Alistarh et al. 2017; Markov et al. 2022", ("CompressedDDPStrategy",), "strategy='ddp_qsgd'"),
    Row("SLAMB", "Xu et al. 2023", ("SLAMB",)),
    Row("local SGD, post-local SGD", "Lin et al. 2018", ("LocalSGD",)),
    Row(
        "elastic averaging (EASGD)",
        "Zhang et al. 2015",
        absent="it needs asynchronous workers and a server, which no Lightning strategy has. LocalSGD is similar",
    ),
)

MEMORY = (
    Row("rematerialisation", "Chen et al. 2016; Herrmann et al. 2019", ("Rematerialization",)),
    Row(
        "activation compressed training (ActNN, GACT, Mesa)",
        "Chen et al. 2021",
        ("ActivationCompression", "ACTPrecision"),
    ),
    Row(
        "offloading of activations (vDNN, Beaumont)",
        "Rhu et al. 2016; Beaumont et al. 2021",
        ("ActivationOffload", "Rematerialization"),
    ),
    Row(
        "offloading of optimizer states (ZeRO-Offload)", "Ren et al. 2021", ("OptimizerOffload", "DeepSpeedEffStrategy")
    ),
    Row("8-bit optimizers", "Dettmers et al. 2021", ("EightBitOptimizer",)),
)

PRECISION = (
    Row("mixed precision (AMP)", "Micikevicius et al. 2017", how="Lightning's own Trainer(precision='bf16-mixed')"),
    Row("FP8 training", "Micikevicius et al. 2022", ("FP8Precision",)),
    Row("FP8 with sums by chunks", "Wang et al. 2018", ("Wang2018FP8Precision",)),
    Row("S2FP8", "Cambier et al. 2020", ("S2FP8Precision",)),
    Row("INT8 and low-bit training (DoReFa)", "Zhou et al. 2016", ("INT8Precision",)),
    Row("stochastic rounding", "Gupta et al. 2015", ("StochasticRoundingBF16",)),
)

PARALLELISM = (
    Row("data parallelism", "Li et al. 2020", how="Lightning's own Trainer(strategy='ddp')"),
    Row(
        "sharded data parallelism (ZeRO, FSDP)",
        "Rajbhandari et al. 2020; Zhao et al. 2023",
        ("HybridParallelStrategy", "DeepSpeedEffStrategy"),
    ),
    Row(
        "tensor parallelism (Megatron-LM)", "Shoeybi et al. 2019", ("HybridParallelStrategy",), "strategy='hybrid_tp2'"
    ),
    Row(
        "pipeline parallelism (GPipe, 1F1B, zero bubble)",
        "Huang et al. 2019; Narayanan et al. 2021",
        ("HybridParallelStrategy",),
        "strategy='hybrid_pp2'",
    ),
    Row(
        "asynchronous pipelines (PipeDream)",
        "Narayanan et al. 2019",
        absent="its weights are some steps old, which changes training. 1F1B fills the pipeline with exact gradients",
    ),
    Row("automatic parallelism (FlexFlow, Alpa)", "Jia et al. 2019; Zheng et al. 2022", how="`lightning-eff plan`"),
    Row("DeepSpeed, ZeRO-Infinity", "Rajbhandari et al. 2021", ("DeepSpeedEffStrategy",)),
    Row(
        "Colossal-AI, FairScale, BMTrain, Mesh-TensorFlow",
        "various",
        absent="separate frameworks; the rows above do the same with torch's engines",
    ),
)
