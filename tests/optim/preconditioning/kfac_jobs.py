"""What two processes run of K-FAC; see :mod:`tests.optim.optim_jobs`."""

import os
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_eff import KFAC
from tests.models import flat
from tests.optim.preconditioning.test_kfac import Net, classes, factors, mlp, run


def kfac() -> dict[str, Any]:
    technique, net = KFAC(fisher="empirical"), Net(mlp(5, 4, 3), lr=0.1)
    data = TensorDataset(*classes(24))
    sampler = DistributedSampler(data, 2, int(os.environ["RANK"]), shuffle=False)
    run(net, DataLoader(data, 12, sampler=sampler), technique, strategy="ddp", devices=2)
    weights = flat(net)
    others = [torch.empty_like(weights) for _ in range(2)]
    torch.distributed.all_gather(others, weights)
    return {
        "alike": torch.equal(*others),
        "factors": {name: [t.tolist() for t in pair] for name, pair in factors(technique).items()},
        "weights": weights.tolist(),
    }
