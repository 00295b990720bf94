"""The public names of ``lightning_eff``, each with where it is: the one list.

Type checkers read it, and ``__init__.py`` reads it as the package is imported, so that each is imported when it is asked for. A
new technique adds its line, and nothing else anywhere.
"""

from lightning_eff import budget as budget
from lightning_eff import data as data
from lightning_eff import kernels as kernels
from lightning_eff import memory as memory
from lightning_eff import model as model
from lightning_eff import monitor as monitor
from lightning_eff import optim as optim
from lightning_eff import precision as precision
from lightning_eff import strategies as strategies
from lightning_eff._core._architecture.folding import export as export
from lightning_eff._exports.applying import apply as apply
from lightning_eff.advice.advising import advise as advise
from lightning_eff.bench.benchmark import Benchmark as Benchmark
from lightning_eff.budget.ada_scale import AdaScale as AdaScale
from lightning_eff.budget.batch_size_warmup import BatchSizeWarmup as BatchSizeWarmup
from lightning_eff.budget.gradient_noise_scale import GradientNoiseScale as GradientNoiseScale
from lightning_eff.budget.learning_rate_schedule import LearningRateSchedule as LearningRateSchedule
from lightning_eff.budget.linear_scaling import LinearScaling as LinearScaling
from lightning_eff.data.augmentation.cutout import Cutout as Cutout
from lightning_eff.data.augmentation.images.aug_mix import AugMix as AugMix
from lightning_eff.data.augmentation.images.auto_augment import AutoAugment as AutoAugment
from lightning_eff.data.augmentation.images.auto_augment import fast_auto_augment as fast_auto_augment
from lightning_eff.data.augmentation.images.diff_augment import DiffAugment as DiffAugment
from lightning_eff.data.augmentation.images.rand_augment import RandAugment as RandAugment
from lightning_eff.data.augmentation.images.random_crop import RandomCrop as RandomCrop
from lightning_eff.data.augmentation.images.random_flip import RandomFlip as RandomFlip
from lightning_eff.data.augmentation.label_smoothing import LabelSmoothing as LabelSmoothing
from lightning_eff.data.augmentation.mixing.cut_mix import CutMix as CutMix
from lightning_eff.data.augmentation.mixing.manifold_mixup import ManifoldMixup as ManifoldMixup
from lightning_eff.data.augmentation.mixing.mixup import Mixup as Mixup
from lightning_eff.data.augmentation.mixing.saliency_mix import SaliencyMix as SaliencyMix
from lightning_eff.data.augmentation.mixing.seq_mix import SeqMix as SeqMix
from lightning_eff.data.augmentation.mixing.several.co_mixup import CoMixup as CoMixup
from lightning_eff.data.augmentation.mixing.several.super_mix import SuperMix as SuperMix
from lightning_eff.data.augmentation.mixing.style_mix import StyleMix as StyleMix
from lightning_eff.data.augmentation.mixing.token_mix import TokenMix as TokenMix
from lightning_eff.data.augmentation.mixing.trans_mix import TransMix as TransMix
from lightning_eff.data.augmentation.random_erasing import RandomErasing as RandomErasing
from lightning_eff.data.augmentation.text.eda import EDA as EDA
from lightning_eff.data.augmentation.text.token_noise import TokenNoise as TokenNoise
from lightning_eff.data.curriculum.attention_window_warmup import AttentionWindowWarmup as AttentionWindowWarmup
from lightning_eff.data.curriculum.difficulty_pacing import DifficultyPacing as DifficultyPacing
from lightning_eff.data.curriculum.efficient_train import EfficientTrain as EfficientTrain
from lightning_eff.data.curriculum.fix_res import FixRes as FixRes
from lightning_eff.data.curriculum.progressive_resizing import ProgressiveResizing as ProgressiveResizing
from lightning_eff.data.curriculum.sequence_length_warmup import SequenceLengthWarmup as SequenceLengthWarmup
from lightning_eff.data.curriculum.token_budget_batches import TokenBudgetBatches as TokenBudgetBatches
from lightning_eff.data.exact_resume import ExactResume as ExactResume
from lightning_eff.data.in_memory_data import InMemoryData as InMemoryData
from lightning_eff.data.loader_tuning import LoaderTuning as LoaderTuning
from lightning_eff.data.selection.adaptive.auto_assist import AutoAssist as AutoAssist
from lightning_eff.data.selection.adaptive.robust_importance_sampling import (
    RobustImportanceSampling as RobustImportanceSampling,
)
from lightning_eff.data.selection.data_pruning import DataPruning as DataPruning
from lightning_eff.data.selection.importance_sampling import ImportanceSampling as ImportanceSampling
from lightning_eff.data.selection.loss_biased_sampling import LossBiasedSampling as LossBiasedSampling
from lightning_eff.data.selection.ordered_sgd import OrderedSGD as OrderedSGD
from lightning_eff.data.selection.proxy_selection import ProxySelection as ProxySelection
from lightning_eff.data.selection.rho_loss import RHOLoss as RHOLoss
from lightning_eff.data.selection.sample_subset import SampleSubset as SampleSubset
from lightning_eff.data.selection.selective_backprop import SelectiveBackprop as SelectiveBackprop
from lightning_eff.data.tokens.ahead.multi_token_prediction import MultiTokenPrediction as MultiTokenPrediction
from lightning_eff.data.tokens.fused_linear_cross_entropy import FusedLinearCrossEntropy as FusedLinearCrossEntropy
from lightning_eff.data.tokens.mask_guided_tokens import MaskGuidedTokens as MaskGuidedTokens
from lightning_eff.data.tokens.mask_rate_schedule import MaskRateSchedule as MaskRateSchedule
from lightning_eff.data.tokens.partial_token_training import PartialTokenTraining as PartialTokenTraining
from lightning_eff.data.tokens.patch_dropout import PatchDropout as PatchDropout
from lightning_eff.data.tokens.random_ltd import RandomLTD as RandomLTD
from lightning_eff.data.tokens.sequence_packing import SequencePacking as SequencePacking
from lightning_eff.data.tokens.span_masking import SpanMasking as SpanMasking
from lightning_eff.data.tokens.token_dropping import TokenDropping as TokenDropping
from lightning_eff.data.tokens.token_merging import TokenMerging as TokenMerging
from lightning_eff.memory.act_precision import ACTPrecision as ACTPrecision
from lightning_eff.memory.activation_compression import ActivationCompression as ActivationCompression
from lightning_eff.memory.activation_offload import ActivationOffload as ActivationOffload
from lightning_eff.memory.eight_bit_optimizer import EightBitOptimizer as EightBitOptimizer
from lightning_eff.memory.optimizer_in_backward import OptimizerInBackward as OptimizerInBackward
from lightning_eff.memory.optimizer_offload import OptimizerOffload as OptimizerOffload
from lightning_eff.memory.rematerialization import Rematerialization as Rematerialization
from lightning_eff.memory.reversible_layers import ReversibleLayers as ReversibleLayers
from lightning_eff.model.adapters.bit_fit import BitFit as BitFit
from lightning_eff.model.adapters.dequantize import dequantize as dequantize
from lightning_eff.model.adapters.export_adapter import export_adapter as export_adapter
from lightning_eff.model.adapters.houlsby_adapters import HoulsbyAdapters as HoulsbyAdapters
from lightning_eff.model.adapters.lo_ra import LoRA as LoRA
from lightning_eff.model.adapters.prefix_tuning import PrefixTuning as PrefixTuning
from lightning_eff.model.adapters.prompt_tuning import PromptTuning as PromptTuning
from lightning_eff.model.adapters.quantized_base import QuantizedBase as QuantizedBase
from lightning_eff.model.adapters.ve_ra import VeRA as VeRA
from lightning_eff.model.adapters.visual_prompt_tuning import VisualPromptTuning as VisualPromptTuning
from lightning_eff.model.attention.a3_attention import A3Attention as A3Attention
from lightning_eff.model.attention.dota_attention import DOTAAttention as DOTAAttention
from lightning_eff.model.attention.elsa_attention import ELSAAttention as ELSAAttention
from lightning_eff.model.attention.fastformer import Fastformer as Fastformer
from lightning_eff.model.attention.linformer import Linformer as Linformer
from lightning_eff.model.attention.memory_efficient_attention import (
    MemoryEfficientAttention as MemoryEfficientAttention,
)
from lightning_eff.model.attention.performer import Performer as Performer
from lightning_eff.model.attention.reformer import Reformer as Reformer
from lightning_eff.model.attention.sanger_attention import SangerAttention as SangerAttention
from lightning_eff.model.execution.channels_last import ChannelsLast as ChannelsLast
from lightning_eff.model.execution.regional_compilation import RegionalCompilation as RegionalCompilation
from lightning_eff.model.growth.auto_prog import AutoProg as AutoProg
from lightning_eff.model.growth.compound_growth import CompoundGrowth as CompoundGrowth
from lightning_eff.model.growth.drop_in import DropIn as DropIn
from lightning_eff.model.growth.greedy_layerwise import GreedyLayerwise as GreedyLayerwise
from lightning_eff.model.growth.layer_freezing import LayerFreezing as LayerFreezing
from lightning_eff.model.growth.progressive_layer_dropping import ProgressiveLayerDropping as ProgressiveLayerDropping
from lightning_eff.model.growth.progressive_stacking import ProgressiveStacking as ProgressiveStacking
from lightning_eff.model.growth.sampled.lisa import LISA as LISA
from lightning_eff.model.growth.shallow_to_deep import ShallowToDeep as ShallowToDeep
from lightning_eff.model.growth.stochastic_depth import StochasticDepth as StochasticDepth
from lightning_eff.model.initialization.data_driven_init import DataDrivenInit as DataDrivenInit
from lightning_eff.model.initialization.fixup import Fixup as Fixup
from lightning_eff.model.initialization.gated_positional_attention import (
    GatedPositionalAttention as GatedPositionalAttention,
)
from lightning_eff.model.initialization.layer_scale import LayerScale as LayerScale
from lightning_eff.model.initialization.lsuv import LSUV as LSUV
from lightning_eff.model.initialization.meta_init import MetaInit as MetaInit
from lightning_eff.model.initialization.orthogonal_init import OrthogonalInit as OrthogonalInit
from lightning_eff.model.initialization.re_zero import ReZero as ReZero
from lightning_eff.model.initialization.rep_optimizer import RepOptimizer as RepOptimizer
from lightning_eff.model.initialization.skip_init import SkipInit as SkipInit
from lightning_eff.model.initialization.t_fixup import TFixup as TFixup
from lightning_eff.model.initialization.transfer.mu_p import MuP as MuP
from lightning_eff.model.initialization.zer_o import ZerO as ZerO
from lightning_eff.model.initialization.zero_projections import ZeroProjections as ZeroProjections
from lightning_eff.model.layers.approximate_random_dropout import ApproximateRandomDropout as ApproximateRandomDropout
from lightning_eff.model.layers.butterfly_linear import ButterflyLinear as ButterflyLinear
from lightning_eff.model.layers.fused_norms import FusedNorms as FusedNorms
from lightning_eff.model.layers.ghost_norm import GhostNorm as GhostNorm
from lightning_eff.model.layers.logit_softcap import LogitSoftcap as LogitSoftcap
from lightning_eff.model.layers.low_rank_conv import LowRankConv as LowRankConv
from lightning_eff.model.layers.low_rank_linear import LowRankLinear as LowRankLinear
from lightning_eff.model.layers.ngram_embedding import NgramEmbedding as NgramEmbedding
from lightning_eff.model.layers.qk_norm import QKNorm as QKNorm
from lightning_eff.model.layers.remove_bias import RemoveBias as RemoveBias
from lightning_eff.model.layers.remove_qkv_bias import RemoveQKVBias as RemoveQKVBias
from lightning_eff.model.layers.rms_normalization import RMSNormalization as RMSNormalization
from lightning_eff.model.layers.seq_norm import SeqNorm as SeqNorm
from lightning_eff.model.layers.sparse_upcycling import SparseUpcycling as SparseUpcycling
from lightning_eff.model.layers.swap_activation import SwapActivation as SwapActivation
from lightning_eff.model.shortcuts.embedding_shortcuts import EmbeddingShortcuts as EmbeddingShortcuts
from lightning_eff.model.shortcuts.pre_norm import PreNorm as PreNorm
from lightning_eff.model.shortcuts.u_shaped_skips import UShapedSkips as UShapedSkips
from lightning_eff.model.shortcuts.value_embeddings import ValueEmbeddings as ValueEmbeddings
from lightning_eff.model.shortcuts.value_residuals import ValueResiduals as ValueResiduals
from lightning_eff.model.shortcuts.window_pattern import WindowPattern as WindowPattern
from lightning_eff.model.simplification.disable_dropout import DisableDropout as DisableDropout
from lightning_eff.model.simplification.linear_head import LinearHead as LinearHead
from lightning_eff.model.simplification.parameter_sharing import ParameterSharing as ParameterSharing
from lightning_eff.model.sparsity.block_sparsity import BlockSparsity as BlockSparsity
from lightning_eff.model.sparsity.early_bird import EarlyBird as EarlyBird
from lightning_eff.model.sparsity.gra_sp import GraSP as GraSP
from lightning_eff.model.sparsity.lottery_tickets import LotteryTickets as LotteryTickets
from lightning_eff.model.sparsity.re_sprop import ReSprop as ReSprop
from lightning_eff.model.sparsity.rig_l import RigL as RigL
from lightning_eff.model.sparsity.semi_structured_sparsity import SemiStructuredSparsity as SemiStructuredSparsity
from lightning_eff.model.sparsity.set import SET as SET
from lightning_eff.model.sparsity.snip import SNIP as SNIP
from lightning_eff.model.sparsity.train_large_then_compress import TrainLargeThenCompress as TrainLargeThenCompress
from lightning_eff.monitor.efficiency_monitor import EfficiencyMonitor as EfficiencyMonitor
from lightning_eff.optim.averaging.exponential_moving_average import (
    ExponentialMovingAverage as ExponentialMovingAverage,
)
from lightning_eff.optim.averaging.latest_weight_averaging import LatestWeightAveraging as LatestWeightAveraging
from lightning_eff.optim.averaging.lookahead import Lookahead as Lookahead
from lightning_eff.optim.averaging.merging import merge as merge
from lightning_eff.optim.averaging.regularized_nonlinear_acceleration import (
    RegularizedNonlinearAcceleration as RegularizedNonlinearAcceleration,
)
from lightning_eff.optim.averaging.schedule_free import ScheduleFree as ScheduleFree
from lightning_eff.optim.averaging.stochastic_weight_averaging import (
    StochasticWeightAveraging as StochasticWeightAveraging,
)
from lightning_eff.optim.averaging.trainable_weight_averaging import (
    TrainableWeightAveraging as TrainableWeightAveraging,
)
from lightning_eff.optim.optimizers.ac_clip import ACClip as ACClip
from lightning_eff.optim.optimizers.adan import Adan as Adan
from lightning_eff.optim.optimizers.gradient_centralization import GradientCentralization as GradientCentralization
from lightning_eff.optim.optimizers.lamb import LAMB as LAMB
from lightning_eff.optim.optimizers.lars import LARS as LARS
from lightning_eff.optim.optimizers.lion import Lion as Lion
from lightning_eff.optim.optimizers.low_rank.apollo import APOLLO as APOLLO
from lightning_eff.optim.optimizers.low_rank.ga_lore import GaLore as GaLore
from lightning_eff.optim.optimizers.muon import Muon as Muon
from lightning_eff.optim.optimizers.replace_optimizer import ReplaceOptimizer as ReplaceOptimizer
from lightning_eff.optim.optimizers.shampoo import Shampoo as Shampoo
from lightning_eff.optim.optimizers.soap import SOAP as SOAP
from lightning_eff.optim.preconditioning.kfac import KFAC as KFAC
from lightning_eff.optim.preconditioning.mfac import MFAC as MFAC
from lightning_eff.optim.preconditioning.sampled_quasi_newton import SampledQuasiNewton as SampledQuasiNewton
from lightning_eff.optim.preconditioning.update_periods import UpdatePeriods as UpdatePeriods
from lightning_eff.optim.sharpness.efficient_sam import EfficientSAM as EfficientSAM
from lightning_eff.optim.sharpness.ksam import KSAM as KSAM
from lightning_eff.optim.sharpness.look_sam import LookSAM as LookSAM
from lightning_eff.optim.sharpness.mesa import MESA as MESA
from lightning_eff.optim.sharpness.saf import SAF as SAF
from lightning_eff.optim.sharpness.sharpness_aware_minimization import (
    SharpnessAwareMinimization as SharpnessAwareMinimization,
)
from lightning_eff.precision.fp8 import FP8Precision as FP8Precision
from lightning_eff.precision.int8 import INT8Precision as INT8Precision
from lightning_eff.precision.s2fp8 import S2FP8Precision as S2FP8Precision
from lightning_eff.precision.stochastic_rounding_bf16 import StochasticRoundingBF16 as StochasticRoundingBF16
from lightning_eff.precision.wang_2018_fp8 import Wang2018FP8Precision as Wang2018FP8Precision
from lightning_eff.recipes.resolving import recipe as recipe
from lightning_eff.strategies.compressed_ddp import CompressedDDPStrategy as CompressedDDPStrategy
from lightning_eff.strategies.deep_speed import DeepSpeedEffStrategy as DeepSpeedEffStrategy
from lightning_eff.strategies.di_lo_co import DiLoCo as DiLoCo
from lightning_eff.strategies.drop_slowest import DropSlowest as DropSlowest
from lightning_eff.strategies.dynamic_averaging import DynamicAveraging as DynamicAveraging
from lightning_eff.strategies.hybrid_parallel import HybridParallelStrategy as HybridParallelStrategy
from lightning_eff.strategies.joint_spar import JointSpar as JointSpar
from lightning_eff.strategies.local_sgd import LocalSGD as LocalSGD
from lightning_eff.strategies.res_ist import ResIST as ResIST
from lightning_eff.strategies.slamb import SLAMB as SLAMB
from lightning_eff.tune.tuner import Tuner as Tuner

__version__: str
