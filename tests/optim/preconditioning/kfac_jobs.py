"""What two processes run of K-FAC: ``python -m tests.optim.preconditioning.kfac_jobs DIRECTORY``."""

import json
import logging
import os
import sys
import warnings
from pathlib import Path

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_eff import KFAC
from tests.models import flat
from tests.optim.preconditioning.test_kfac import Net, classes, factors, mlp, run


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    technique, net = KFAC(fisher="empirical"), Net(mlp(5, 4, 3), lr=0.1)
    data = TensorDataset(*classes(24))
    sampler = DistributedSampler(data, 2, int(os.environ["RANK"]), shuffle=False)
    run(net, DataLoader(data, 12, sampler=sampler), technique, strategy="ddp", devices=2)
    weights = flat(net)
    others = [torch.empty_like(weights) for _ in range(2)]
    torch.distributed.all_gather(others, weights)
    found = {
        "alike": torch.equal(*others),
        "factors": {name: [t.tolist() for t in pair] for name, pair in factors(technique).items()},
        "weights": weights.tolist(),
    }
    if torch.distributed.get_rank() == 0:
        (root / "result.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
