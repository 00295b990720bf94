"""lightly: SimCLR in the LightningModule of its documentation, from its loss and projection head."""

from tests.published.package import Package


def build():
    import lightning.pytorch as pl
    import torch
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead
    from torch import nn

    class SimCLR(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(
                nn.Conv2d(1, 8, 3, padding=1),
                nn.BatchNorm2d(8),
                nn.ReLU(),
                nn.Conv2d(8, 16, 3, padding=1),
                nn.BatchNorm2d(16),
                nn.ReLU(),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
            )
            self.projection_head = SimCLRProjectionHead(16, 16, 8)
            self.criterion = NTXentLoss()

        def forward(self, x):
            return self.projection_head(self.backbone(x))

        def training_step(self, batch, batch_index):
            (x0, x1), _, _ = batch
            loss = self.criterion(self(x0), self(x1))
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.06)

    class Views(torch.utils.data.Dataset):
        def __init__(self):
            self.images = torch.randn(24, 1, 8, 8, generator=torch.Generator().manual_seed(0))

        def __len__(self):
            return 24

        def __getitem__(self, index):
            image = self.images[index]
            return [image + 0.1 * torch.randn_like(image), image.flip(-1)], index % 3, f"{index}.png"

    return SimCLR(), torch.utils.data.DataLoader(Views(), batch_size=4, shuffle=True, drop_last=True)


PACKAGE = Package("lightly", "SimCLR of its documentation, two views of each image", build, flags=("--no-deps",))
