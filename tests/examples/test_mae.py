"""The masked autoencoder of the examples: what hidden patches save, what its loss looks at, and that it learns."""

from pathlib import Path

import pytest
import torch
from lightning import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from examples.mae.module import MaskedAutoencoder
from examples.vit.data import Digits

ROOT = Path(__file__).parent.parent.parent
B, N = 4, 16


@pytest.fixture(scope="module")
def images() -> Tensor:
    data = Digits(batch_size=B)
    data.setup("fit")
    return next(iter(data.val_dataloader()))[0]


def module(ratio: float = 0.75) -> MaskedAutoencoder:
    torch.manual_seed(0)
    return MaskedAutoencoder(mask_ratio=ratio, dim=24, num_layers=3, decoder_dim=12, decoder_layers=1)


def encoder_flops(net: MaskedAutoencoder, images: Tensor, *, backward: bool = True) -> int:
    """Of a pass through the encoder's blocks, as torch counts them."""
    blocks = [m for name, m in net.named_modules() if type(m).__name__ == "ViTMAELayer" and "decoder" not in name]
    entered: list[Tensor] = []
    handle = blocks[0].register_forward_pre_hook(lambda m, args: entered.append(args[0].detach()))
    net(images)
    handle.remove()
    x = entered[0].requires_grad_()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # the CPU's fused one is not counted
        for block in blocks:
            x = block(x)
        if backward:
            x.sum().backward()
    return counter.get_total_flops()


def test_the_encoder_runs_on_a_class_token_and_a_quarter_of_the_patches(images: Tensor) -> None:
    """Of 17 tokens 5: maps cost 5 / 17, and attention 25 / 289 of what they do on all."""
    full, few = (encoder_flops(module(ratio), images, backward=False) for ratio in (0.0, 0.75))

    def expected(tokens: int, d: int = 24, layers: int = 3) -> int:
        maps = 4 * d * d + 2 * 4 * d * d  # queries, keys, values and output; the MLP's two
        attention = 2 * tokens * d  # a token's scores, and its mean of the values
        return layers * 2 * B * tokens * (maps + attention)

    assert (full, few) == (expected(1 + N), expected(1 + N // 4))
    full, few = (encoder_flops(module(ratio), images) for ratio in (0.0, 0.75))
    assert few < 0.3 * full


def test_the_whole_step_costs_less_by_what_the_encoder_is_spared(images: Tensor) -> None:
    """And the map from its width to the decoder's, which is on as many tokens less."""

    def flops(net: MaskedAutoencoder) -> int:
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            net(images).backward()
        return counter.get_total_flops()

    most, net = module(0.01), module()  # of 16 patches one is hidden, and twelve
    spared = encoder_flops(most, images) - encoder_flops(net, images) + 3 * 2 * B * 11 * 24 * 12
    assert flops(most) - flops(net) == spared


def test_no_gradient_of_the_loss_reaches_visible_reconstructions(images: Tensor) -> None:
    net = module()
    found: list[Tensor] = []

    def keep(m: object, args: object, output: Tensor) -> None:
        output.retain_grad()
        found.append(output)

    net.model.decoder.decoder_pred.register_forward_hook(keep)
    output = net.model(pixel_values=images)
    output.loss.backward()
    grad, hidden = found[0].grad, output.mask.bool()
    assert grad is not None and hidden.sum(dim=1).tolist() == [12] * B
    grad = grad[:, 1:]  # the class token's is none of the patches
    assert (grad[~hidden] == 0).all() and (grad[hidden] != 0).any(dim=-1).all()
    target = net.model.patchify(images)
    by_hand = ((output.logits - target) ** 2)[hidden].mean()
    torch.testing.assert_close(output.loss, by_hand)


def test_unshuffling_what_was_shuffled_is_the_identity(images: Tensor) -> None:
    """Of the places: what is visible comes back to where it was, and mask tokens stand where patches are hidden."""
    net = module()
    patches = torch.arange(N, dtype=torch.float32).reshape(1, N, 1).expand(B, -1, -1)
    visible, mask, restore = net.model.vit.embeddings.random_masking(patches)
    assert visible.shape == (B, N // 4, 1)
    full = torch.cat([visible, torch.full((B, N - N // 4, 1), -1.0)], dim=1)
    back = full.gather(1, restore.unsqueeze(-1))
    assert torch.equal(back, torch.where(mask.bool().unsqueeze(-1), -1.0, patches))
    whole, mask, restore = module(0.0).model.vit.embeddings.random_masking(patches)
    assert not torch.equal(whole, patches) and not mask.any()
    assert torch.equal(whole.gather(1, restore.unsqueeze(-1)), patches)


def test_patches_are_told_apart_by_their_positions(images: Tensor) -> None:
    net = module()
    for positions in (net.model.vit.embeddings.position_embeddings, net.model.decoder.decoder_pos_embed):
        assert positions.flatten(0, 1).unique(dim=0).shape[0] == 1 + N and not positions.requires_grad
    output = net.model(pixel_values=images)
    first = output.logits[0][output.mask[0].bool()]
    assert not torch.allclose(first[0], first[1], atol=1e-4)


def test_the_recipe_trains(tmp_path: Path) -> None:
    """And its loss falls."""
    cli = LightningCLI(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_callback=None,
        run=False,
        args=[
            *("--config", str(ROOT / "examples" / "mae" / "baseline.yaml")),
            *("--trainer.max_epochs=-1", "--trainer.max_steps=20", "--trainer.val_check_interval=20"),
            *("--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.callbacks=null"),
            *("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"),
            *("--model.num_layers=2", "--model.decoder_layers=1", "--model.warmup_steps=10"),
            *("--model.lr=4.0e-3", f"--trainer.default_root_dir={tmp_path}"),
        ],
    )
    cli.datamodule.setup("fit")
    batch = next(iter(cli.datamodule.val_dataloader()))[0]
    noise = torch.rand(64, N, generator=torch.Generator().manual_seed(0))
    first = cli.model(batch, noise).item()
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    assert cli.trainer.global_step == 20
    assert cli.model(batch, noise).item() < 0.8 * first
