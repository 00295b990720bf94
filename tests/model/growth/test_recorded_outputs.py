"""Growth and layer dropping on models of transformers that record outputs by hooks, which they set once."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from lightning_eff import ProgressiveLayerDropping, ProgressiveStacking
from lightning_eff._core.technique import Technique
from lightning_eff.model.growth._shallower import Shallower
from tests.models import VOCAB, HuggingFace, loader, make_batch, trainer
from tests.runs import differences, final_state

EXPERTS = ("mixtral", "qwen3_moe")
NAMES = ("gemma2", "qwen3", *EXPERTS)


def model(name: str, num_layers: int) -> Any:
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
    }
    experts = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1}
    if name == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**shape, **experts, num_local_experts=4))
    if name == "qwen3_moe":
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts, num_experts=4, moe_intermediate_size=8))
    return Qwen3ForCausalLM(Qwen3Config(**shape)) if name == "qwen3" else Gemma2ForCausalLM(Gemma2Config(**shape))


class Recorded(HuggingFace):
    """Adds the size of the hidden states to the loss, and counts what the model returned."""

    def __init__(self, name: str, num_layers: int = 6) -> None:
        super().__init__(model(name, num_layers))
        self.seen: list[tuple[int, int | None]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        out = self.model(**batch, output_hidden_states=True)
        routed = out.get("router_logits")
        self.seen.append((len(out.hidden_states), None if routed is None else len(routed)))
        return out.loss + 1e-2 * torch.stack([h.pow(2).mean() for h in out.hidden_states]).mean()


def stacking() -> Technique:
    return ProgressiveStacking(stages=[(0.0, 2), (0.25, 4), (0.5, 6)])


def dropping() -> Technique:
    return ProgressiveLayerDropping(theta_min=0.3, gamma=20.0)


def shallower() -> Technique:
    return Shallower(kept=lambda n: n / 2)


def train(
    name: str, *techniques: Technique, num_layers: int = 6, resume: Path | None = None, directory: Path | None = None
) -> tuple[Any, pl.Trainer]:
    pl.seed_everything(1, verbose=False)
    net = Recorded(name, num_layers)
    pl.seed_everything(2 if resume is None else 99, verbose=False)
    saving = [ModelCheckpoint(directory, every_n_train_steps=1, save_top_k=-1, filename="{step}")] if directory else []
    t = trainer(*techniques, *saving, max_steps=8, enable_checkpointing=bool(saving))
    t.fit(net, loader("llama"), ckpt_path=resume)
    return net, t


def counts(net: Any) -> tuple[int, int | None]:
    """Of hidden states and of routers, of the module by itself."""
    with torch.no_grad():
        out = net.model(**make_batch("llama"), output_hidden_states=True)
    return len(out.hidden_states), len(out.router_logits) if "router_logits" in out else None


@pytest.mark.parametrize("name", NAMES)
def test_growth_records_the_blocks_that_run(name: str) -> None:
    net, _ = train(name, stacking())
    routed = name in EXPERTS
    assert net.seen == [(n + 1, n if routed else None) for n in [2] * 2 + [4] * 2 + [6] * 4]
    assert counts(net) == (7, 6 if routed else None)


@pytest.mark.parametrize("name", ["mixtral", "qwen3"])
def test_the_control_records_the_blocks_that_run(name: str) -> None:
    net, _ = train(name, shallower())
    assert net.seen == [(4, 3 if name in EXPERTS else None)] * 8
    assert counts(net) == (7, 6 if name in EXPERTS else None)


@pytest.mark.parametrize("name", ["mixtral", "gemma2"])
def test_a_dropped_block_has_its_place_among_the_hidden_states(name: str) -> None:
    """Its hidden state is that which came in; it has no router that could be in the loss."""
    net, _ = train(name, dropping())
    assert [hidden for hidden, _ in net.seen] == [7] * 8
    if name in EXPERTS:
        routed = [routers for _, routers in net.seen]
        assert routed[0] == 6 and min(routed) < 6
    assert counts(net) == (7, 6 if name in EXPERTS else None)


@pytest.mark.parametrize("name", EXPERTS)
def test_a_block_runs_in_each_step_although_all_could_be_dropped(name: str) -> None:
    """A loss of routers cannot be computed without any."""
    pl.seed_everything(1, verbose=False)
    net = Recorded(name, 2)
    trainer(ProgressiveLayerDropping(theta_min=0.1, gamma=1e6), max_steps=40).fit(net, loader("llama", 80))
    assert {routers for _, routers in net.seen} == {1, 2}


@pytest.mark.parametrize("name", NAMES)
def test_a_prefix_is_exactly_the_shallow_model(name: str) -> None:
    """Its hidden states, its routers' loss and so its weights, bit for bit."""
    pl.seed_everything(1, verbose=False)
    deep, shallow = Recorded(name), Recorded(name, 2)
    shallow.load_state_dict({k: v for k, v in deep.state_dict().items() if k in shallow.state_dict()})
    for net, techniques in ((deep, [ProgressiveStacking(stages=[(0.0, 2)])]), (shallow, [])):
        pl.seed_everything(2, verbose=False)
        trainer(*techniques, max_steps=4).fit(net, loader("llama"))
    ours = deep.state_dict()
    assert all(torch.equal(ours[key], value) for key, value in shallow.state_dict().items())


@pytest.mark.parametrize("name", ["mixtral", "gemma2"])
@pytest.mark.parametrize("build", [stacking, dropping, shallower])
def test_resumes_exactly(name: str, build: Any, tmp_path: Path) -> None:
    whole = final_state(*train(name, build(), directory=tmp_path))
    for step in (1, 3, 5):
        resumed = train(name, build(), resume=tmp_path / f"step={step}.ckpt")
        assert differences(whole, final_state(*resumed)) == [], step
