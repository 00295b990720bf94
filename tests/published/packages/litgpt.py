"""litgpt: its GPT in the LightningModule of its README."""

from tests.published import reasons
from tests.published.package import Package


def build():
    import lightning.pytorch as pl
    import litgpt
    import torch
    from litgpt.config import Config
    from litgpt.utils import chunked_cross_entropy

    class LitLLM(pl.LightningModule):
        def __init__(self):
            super().__init__()
            config = Config(
                block_size=16,
                vocab_size=64,
                padded_vocab_size=64,
                n_layer=4,
                n_head=2,
                n_embd=32,
                rotary_percentage=1.0,
                parallel_residual=False,
                norm_class_name="RMSNorm",
                mlp_class_name="LLaMAMLP",
                intermediate_size=64,
            )
            self.model = litgpt.GPT(config)

        def training_step(self, batch):
            logits = self.model(batch[:, :-1])
            loss = chunked_cross_entropy(logits, batch[:, 1:], chunk_size=0)
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.0, betas=(0.9, 0.95))
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    tokens = torch.randint(0, 64, (24, 17), generator=torch.Generator().manual_seed(0))
    return LitLLM(), torch.utils.data.DataLoader(tokens, batch_size=4, shuffle=True)


PACKAGE = Package(
    "litgpt",
    "GPT with rotary positions, in the LightningModule of its README",
    build,
    flags=("--no-deps",),
    refused={
        "RMSNormalization": reasons.NO_LAYER_NORM,
        "SwapActivation": reasons.NO_ACTIVATION,
        "Mixup": reasons.LABELS_ELSEWHERE,
    },
)
