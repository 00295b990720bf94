"""What smaller images are made of: batches of every make, filters, dtypes and layouts, and tables of positions."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

from lightning_eff._core._images.images import (
    check_coordinates,
    find_images,
    nearest,
    resize,
    side_of,
    smaller,
)
from lightning_eff._core._images.positions import Positions, Seen, find_table, interpolate_table, watched
from tests.models import make_batch

WHO = "who"


def small(batch: Any, side: tuple[int, int], keys: Any = None) -> Any:
    return smaller(batch, find_images(batch, keys, who=WHO), side, resize)


def test_sides_are_the_nearest_multiples() -> None:
    assert side_of((224, 224), 0.5, (4, 4)) == (112, 112)
    assert side_of((30, 50), 0.5, (4, 4)) == (16, 24)
    assert side_of((64, 64), 160 / 224, (8, 8)) == (48, 48)
    assert side_of((8, 8), 0.1, (4, 4)) == (4, 4), "at least one"
    assert side_of((31, 31), 0.99, (4, 4)) == (31, 31), "at most the full one, whatever that is a multiple of"
    assert side_of((30, 30), 1.0, (4, 4)) == (30, 30)


def test_half_the_side_by_a_triangle_filter() -> None:
    """Twice as wide as the pixels are apart, so that nothing is aliased: 1, 3, 3, 1 eighths in the interior."""
    x = torch.randn(2, 3, 12, 16, dtype=torch.float64)
    taps = torch.tensor([1.0, 3.0, 3.0, 1.0], dtype=torch.float64) / 8
    kernel = torch.outer(taps, taps).expand(3, 1, 4, 4)
    reference = F.conv2d(x, kernel, stride=2, padding=1, groups=3)
    got = resize(x, (6, 8))
    torch.testing.assert_close(got[..., 1:-1, 1:-1], reference[..., 1:-1, 1:-1])
    torch.testing.assert_close(resize(torch.full((1, 1, 9, 9), 2.5), (4, 5)), torch.full((1, 1, 4, 5), 2.5))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8, torch.bfloat16])
def test_masks_take_the_nearest_pixel(dtype: torch.dtype) -> None:
    mask = torch.arange(2 * 8 * 12).reshape(2, 8, 12).to(dtype)
    got = nearest(mask, (4, 6))
    assert got.dtype == dtype and torch.equal(got, mask[:, 1::2, 1::2])
    odd = nearest(torch.arange(5)[None, :, None].expand(1, 5, 5), (3, 3))[0, :, 0]
    assert odd.tolist() == [0, 2, 4]


def test_dtype_and_memory_format_are_kept() -> None:
    x = torch.rand(2, 3, 8, 8)
    last = x.to(memory_format=torch.channels_last)
    got = small(last, (4, 4))
    assert got.is_contiguous(memory_format=torch.channels_last) and not got.is_contiguous()
    torch.testing.assert_close(got, resize(x, (4, 4)))
    assert small(x, (4, 4)).is_contiguous()
    low = small(x.bfloat16(), (4, 4))
    assert low.dtype == torch.bfloat16 and torch.equal(low, resize(x.bfloat16().float(), (4, 4)).bfloat16())
    bytes_ = (x * 255).round().to(torch.uint8)
    whole = small(bytes_, (4, 4))
    assert whole.dtype == torch.uint8 and torch.equal(whole, resize(bytes_.float(), (4, 4)).round().to(torch.uint8))


def test_images_and_what_lies_on_their_pixels_are_found_wherever_they_are() -> None:
    x, mask = torch.randn(4, 3, 16, 16), torch.randint(0, 5, (4, 16, 16))
    batch = {
        "inputs": {"pixel_values": x, "pixel_mask": torch.ones(4, 16, 16, dtype=torch.long)},
        "targets": [mask, {"masks": torch.zeros(7, 16, 16).bool()}],
        "labels": torch.arange(4),
        "id": ["a", "b", "c", "d"],
    }
    got = small(batch, (8, 8))
    assert got["inputs"]["pixel_values"].shape == (4, 3, 8, 8) and got["inputs"]["pixel_mask"].shape == (4, 8, 8)
    assert torch.equal(got["targets"][0], mask[:, 1::2, 1::2]) and got["targets"][1]["masks"].shape == (7, 8, 8)
    assert got["labels"] is batch["labels"] and got["id"] == batch["id"]
    depth = torch.randn(4, 1, 16, 16)
    named = small({"image": x, "depth": depth}, (8, 8), ["image"])
    assert torch.equal(named["depth"], depth[..., 1::2, 1::2])
    assert torch.equal(small((x, mask), (8, 8))[0], resize(x, (8, 8)))


@pytest.mark.parametrize(
    ("batch", "keys", "message"),
    [
        (make_batch("gpt2"), None, r"found no images in the batch: \['input_ids'\] \(4, 32\) int64.*keys="),
        ({"x": torch.zeros(2, 5, 3, 8, 8)}, None, r"found no images"),
        ((torch.zeros(4, 32, 32, 3), torch.arange(4)), None, r"\[0\] \(4, 32, 32, 3\) has its channels last.*permute"),
        ((torch.zeros(4, 3, 32, 32), torch.zeros(8, 3, 16, 16)), None, r"differ in \(N, H, W\).*keys="),
        ({"x": torch.zeros(4, 3, 8, 8)}, ["y"], r"keys=\['y'\]\): \['y'\] are not in the batch"),
        ({"x": torch.arange(4)}, ["x"], r"are not \(N, C, H, W\)"),
    ],
)
def test_what_is_no_image_is_refused(batch: Any, keys: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_images(batch, keys, who=WHO)


def test_places_in_pixels_are_refused() -> None:
    check_coordinates(
        {"boxes": torch.rand(4, 4), "mailbox": torch.tensor(True), "keypoints": torch.zeros(0, 2)}, who=WHO
    )
    with pytest.raises(
        ValueError, match=r"\['t'\]\['boxes'\] \(1, 4\) holds coordinates in pixels, up to 30.*Normalise"
    ):
        check_coordinates({"t": {"boxes": torch.tensor([[0.0, 0.0, 30.0, 12.0]])}}, who=WHO)


# -- positions


def test_a_table_is_interpolated_as_transformers_do() -> None:
    config = hf.ViTConfig(hidden_size=8, num_attention_heads=2, image_size=32, patch_size=4, num_hidden_layers=1)
    embeddings = hf.ViTModel(config).embeddings
    table = embeddings.position_embeddings
    with torch.no_grad():
        table.normal_()
    reference = embeddings.interpolate_pos_encoding(torch.zeros(1, 1 + 4 * 5, 8), 16, 20)
    torch.testing.assert_close(interpolate_table(table, 1, (8, 8), (4, 5)), reference)
    assert torch.equal(interpolate_table(table[0], 1, (8, 8), (4, 5))[0], table[0, 0])
    low = interpolate_table(table.bfloat16(), 1, (8, 8), (4, 5))
    assert low.dtype == torch.bfloat16 and low.shape == reference.shape


class Tokens(nn.Module):
    """Patches of 2 x 2 pixels, then whatever positions a test gives."""

    def __init__(self, special: int = 1, dim: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, dim, 2, 2)
        self.norm = nn.LayerNorm(dim)
        self.special = special

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        return self.norm(torch.cat([x[:, :1].expand(-1, self.special, -1), x], dim=1))


def seen_by(module: nn.Module, side: tuple[int, int] = (8, 12)) -> Seen:
    with watched(side, 3) as seen:
        module(torch.randn(3, 1, *side))
    return seen


@pytest.mark.parametrize("special", [0, 1, 2])
@pytest.mark.parametrize("kind", ["parameter", "flat", "buffer", "plain", "embedding"])
def test_a_table_is_found(kind: str, special: int) -> None:
    module = Tokens(special)
    value = torch.randn(1, special + 24, 12)
    module.mask_token = nn.Parameter(torch.zeros(1, 1, 12))
    module.classes = nn.Embedding(25, 12)
    if kind == "embedding":
        module.table = nn.Embedding(special + 24, 12)
    elif kind == "buffer":
        module.register_buffer("table", value)
    else:
        module.table = nn.Parameter(value[0] if kind == "flat" else value) if kind != "plain" else value
    seen = seen_by(module)
    assert seen.patch == (2, 2) and (special + 24, 12) in seen.tokens
    seen.ids[id(module.classes)] = (3, 7)  # called on the classes of 3 images
    table = find_table(module, (8, 12), seen, who=WHO)
    assert table is not None
    assert table.path == ("table.weight" if kind == "embedding" else "table")
    assert (table.special, table.grid, table.patch) == (special, (4, 6), 2)
    assert table.at((4, 6)).shape[-2:] == (special + 6, 12)


def test_what_may_be_a_table_of_something_else_is_told() -> None:
    plain = Tokens()
    assert find_table(plain, (8, 12), seen_by(plain), who=WHO) is None
    two = Tokens()
    two.rows, two.columns = (nn.Parameter(torch.randn(1, 25, 12)) for _ in range(2))
    with pytest.raises(ValueError, match=r"rows \(for 4 x 6 patches\), columns .*expected one table.*remove who"):
        find_table(two, (8, 12), seen_by(two), who=WHO)
    long = Tokens()
    long.positions = nn.Parameter(torch.randn(1, 100, 12))  # of which a module may take the first so many
    with pytest.raises(ValueError, match=r"positions \(1, 100, 12\) may hold the positions of patches"):
        find_table(long, (8, 12), seen_by(long), who=WHO)


def test_a_plain_tensor_stands_aside_as_often_as_it_is_asked() -> None:
    module = Tokens()
    module.table = own = torch.randn(1, 25, 12)
    positions = Positions(module, find_table(module, (8, 12), seen_by(module), who=WHO))
    for side in ((4, 6), (4, 12)):
        positions.enter(side)
        positions.renew()
        torch.testing.assert_close(module.table, interpolate_table(own, 1, (4, 6), (side[0] // 2, side[1] // 2)))
    positions.leave()
    assert module.table is own


def test_what_interpolates_by_itself_is_left_to_it() -> None:
    """Embeddings of places too, which such a module keeps in a module of their own."""
    settings = {"hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 1, "intermediate_size": 12}
    config = hf.CLIPVisionConfig(**settings, image_size=8, patch_size=2, num_channels=1)
    model = hf.CLIPVisionModel(config)
    with watched((8, 8), 3) as seen:
        model(torch.randn(3, 1, 8, 8))
    assert find_table(model, (8, 8), seen, who=WHO) is None
    positions = Positions(model, None)
    positions.enter((4, 4))
    assert model(torch.randn(3, 1, 4, 4)).last_hidden_state.shape == (3, 5, 12)
    positions.leave()
    with pytest.raises(ValueError, match="doesn't match"):
        model(torch.randn(3, 1, 4, 4))


def test_a_table_stands_in_for_the_modules_own_and_is_taken_out() -> None:
    module = Tokens()
    module.table = nn.Parameter(torch.randn(1, 25, 12))
    found = find_table(module, (8, 12), seen_by(module), who=WHO)
    positions = Positions(module, found)
    before, own = sorted(vars(module)), module.table
    positions.enter((4, 6))
    assert module.table.shape == (1, 7, 12) and [*dict(module.named_parameters())].count("table") == 1
    module.table.sum().backward()
    assert own.grad is not None and own.grad.abs().sum() > 0
    with torch.no_grad():
        own.add_(1.0)
    stale = module.table
    positions.renew()
    torch.testing.assert_close(module.table, stale + 1.0)
    module.table.sum().backward()  # with a graph of its own
    positions.leave()
    assert sorted(vars(module)) == before and module.table is own
    positions.renew()
    assert module.table is own
