"""replay-rec: SASRec, a transformer that recommends the next item of a sequence."""

from tests.published import reasons
from tests.published.package import Package


def build():
    import numpy as np
    import pandas as pd
    from replay.data import FeatureHint, FeatureType
    from replay.data.nn import PandasSequentialDataset, TensorFeatureInfo, TensorSchema
    from replay.models.nn.sequential.sasrec import SasRec, SasRecTrainingDataset
    from torch.utils.data import DataLoader

    item = TensorFeatureInfo(
        "item", FeatureType.CATEGORICAL, is_seq=True, feature_hint=FeatureHint.ITEM_ID, cardinality=20, embedding_dim=16
    )
    schema = TensorSchema([item])
    draws = np.random.default_rng(0)
    rows = pd.DataFrame(
        {"user": range(24), "item": [draws.integers(0, 20, int(draws.integers(4, 9))) for _ in range(24)]}
    )
    data = SasRecTrainingDataset(PandasSequentialDataset(schema, "user", "item", rows), max_sequence_length=8)
    module = SasRec(schema, block_count=3, head_count=2, hidden_size=16, max_seq_len=8)
    return module, DataLoader(data, batch_size=4, shuffle=True)


PACKAGE = Package(
    "replay-rec",
    "SasRec on its own data set",
    build,
    imports="replay",
    requirements=("polars", "pyarrow", "replay-rec"),
    flags=("--no-deps",),
    trusted=True,
    refused={
        **dict.fromkeys(("StochasticDepth", "LayerFreezing"), reasons.TWO_STACKS),
        **dict.fromkeys(("ProgressiveStacking", "Rematerialization"), reasons.TWO_STACKS),
        **dict.fromkeys(("LoRA", "INT8Precision"), reasons.NO_LINEAR),
        "DataPruning": reasons.NO_LOGITS,
        "LayerScale": reasons.HIDDEN_SUM,
        "Mixup": reasons.ONLY_IDS,
    },
)
