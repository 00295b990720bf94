"""Muon against the rule written out, torch's own AdamW, and itself over ranks; and which parameters it takes for matrices."""

import copy
import functools
import pickle
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_eff.optim.optimizers.muon import Muon
from tests.models import flat, loader, make_batch, module, trainer
from tests.optim.optimizers.muon_jobs import HYBRID, hybrid
from tests.runs import checkpoints, differences, final_state, fit
from tests.strategies.launch import launch

SHAPES = [(24, 24), (96, 24), (24, 96), (24, 24)]


def parameters(seed: int = 0, shapes: Any = SHAPES) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=g)) for shape in shapes]


def train(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: int = 5) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(7)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=g)
        optimizer.step()
    return params


def far(a: list[nn.Parameter], b: list[nn.Parameter]) -> float:
    return max(float((x - y).detach().abs().max()) for x, y in zip(a, b, strict=True))


def test_a_step_without_any_gradient_changes_nothing() -> None:
    """Such a step comes where every block is dropped; matrices take part again as soon as they have gradients."""
    params = parameters()
    before = [p.detach().clone() for p in params]
    optimizer = Muon([{"params": params, "algorithm": "muon"}], lr=0.1)
    optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(params, before, strict=True))
    assert far(train(params, optimizer), before) > 0.01


class Reference:
    """The rule of ``torch.optim.Muon``, matrix by matrix in float64."""

    def __init__(
        self, params: list[nn.Parameter], lr: float, decay: float, mu: float, nesterov: bool, scale: str
    ) -> None:
        self.params, self.lr, self.decay, self.mu, self.nesterov, self.scale = params, lr, decay, mu, nesterov, scale
        self.momenta = [torch.zeros_like(p, dtype=torch.float64) for p in params]

    def step(self) -> None:
        for p, m in zip(self.params, self.momenta, strict=True):
            g = p.grad.double()
            m.mul_(self.mu).add_(g, alpha=1 - self.mu)
            u = (1 - self.mu) * g + self.mu * m if self.nesterov else m
            x = u / u.norm().clamp(min=1e-7)
            for _ in range(5):
                a = x @ x.T
                x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
            rows, columns = p.shape
            scale = {"spectral": max(1, rows / columns) ** 0.5, "match_rms_adamw": 0.2 * max(rows, columns) ** 0.5}
            with torch.no_grad():
                p.mul_(1 - self.lr * self.decay)
                p.sub_((self.lr * scale[self.scale] * x).to(p.dtype))


@pytest.mark.parametrize("scale", ["spectral", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_the_rule_is_torchs_in_float32(scale: str, nesterov: bool) -> None:
    a, b = parameters(), parameters()
    ours = Muon(
        a,
        0.02,
        weight_decay=0.1,
        momentum=0.9,
        nesterov=nesterov,
        orthogonalization="newton_schulz",
        scale=scale,
        cautious=False,
        split=None,
    )
    train(a, ours)
    train(b, Reference(b, 0.02, 0.1, 0.9, nesterov, scale))  # type: ignore[arg-type]
    assert far(a, b) < 1e-5
    # torch's own is in bfloat16, so only about as near as that
    c = parameters()
    adjust = {"spectral": "original", "match_rms_adamw": "match_rms_adamw"}[scale]
    train(c, torch.optim.Muon(c, 0.02, weight_decay=0.1, momentum=0.9, nesterov=nesterov, adjust_lr_fn=adjust))
    assert 1e-6 < far(a, c) < 0.02


def test_what_is_no_matrix_is_stepped_as_by_adamw() -> None:
    a, b = parameters(shapes=[(7,), (24, 24), (5,)]), parameters(shapes=[(7,), (24, 24), (5,)])
    adam = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.2}
    ours = Muon(a, adam=adam)
    assert [(g["algorithm"], len(g["params"]), g["lr"]) for g in ours.param_groups] == [
        ("muon", 1, 0.02),
        ("adamw", 2, 0.01),
    ]
    train(a, ours)
    train(b, torch.optim.AdamW([b[0], b[2]], **adam))
    assert far([a[0], a[2]], [b[0], b[2]]) < 1e-6
    assert far([a[1]], [b[1]]) > 0.01


def test_cautious_decay_shrinks_only_what_moves_towards_zero() -> None:
    decayed, plain, before = parameters(), parameters(), parameters()
    train(decayed, Muon(decayed, weight_decay=0.5, cautious=True, split=None), steps=1)
    train(plain, Muon(plain, weight_decay=0.0, split=None), steps=1)
    for with_decay, without, start in zip(decayed, plain, before, strict=True):
        step = start - without  # lr scale O
        assert (without != start).all()
        towards = (step * start >= 0).detach()
        assert 0.3 < towards.float().mean() < 0.7
        assert torch.allclose((without - with_decay)[towards], (0.02 * 0.5 * start)[towards], atol=1e-6)
        assert torch.allclose(without[~towards], with_decay[~towards], atol=1e-7)


def test_normuon_gives_neurons_equal_steps_and_keeps_the_norm() -> None:
    a, b = parameters(shapes=[(96, 24)]), parameters(shapes=[(96, 24)])
    settings: dict[str, Any] = {"weight_decay": 0.0, "split": None}
    before = a[0].detach().clone()
    optimizer = Muon(a, normalization="neuron", beta2=0.0, **settings)
    train(a, optimizer, steps=1)
    train(b, Muon(b, **settings), steps=1)
    normed, plain = before - a[0], before - b[0]
    normed, plain = normed.detach(), plain.detach()
    rows = normed.norm(dim=1)
    assert float(rows.max() / rows.min()) < 1.001 < 1.2 < float(plain.norm(dim=1).max() / plain.norm(dim=1).min())
    assert torch.isclose(normed.norm(), plain.norm(), rtol=1e-4)
    # with beta2, S is the mean of squares so far
    c = parameters(shapes=[(96, 24)])
    train(c, optimizer := Muon(c, normalization="neuron", beta2=0.5, **settings), steps=1)
    expected = 0.5 * (plain / 0.02 / 2).square().mean(dim=1)  # the step is lr sqrt(96 / 24) O
    assert torch.allclose(optimizer.state[c[0]]["second_moment"], expected, rtol=1e-3)


def test_fused_projections_are_stepped_as_if_they_were_apart() -> None:
    fused = parameters(shapes=[(72, 24)])
    apart = [nn.Parameter(part.detach().clone()) for part in fused[0].split(24)]
    one, three = Muon([("blocks.0.qkv.weight", fused[0])]), Muon(apart, split=None)
    for _ in range(3):
        fused[0].grad = torch.randn(72, 24)
        for p, g in zip(apart, fused[0].grad.split(24), strict=True):
            p.grad = g
        one.step()
        three.step()
    assert torch.allclose(fused[0], torch.cat(apart), atol=1e-6)
    whole = parameters(shapes=[(72, 24)])
    train(whole, Muon([("blocks.0.qkv.weight", whole[0])], split=None), steps=1)
    again = parameters(shapes=[(72, 24)])
    train(again, Muon([("blocks.0.qkv.weight", again[0])]), steps=1)
    assert far(whole, again) > 1e-3


def test_split_by_patterns_and_sizes() -> None:
    held = [("a.kv.weight", nn.Parameter(torch.randn(40, 24))), ("a.up.weight", nn.Parameter(torch.randn(48, 24)))]
    optimizer = Muon(held, split={"*.kv.weight": (24, 8, 8), "*.up.*": 2})
    assert [optimizer._layouts[p].parts for _, p in held] == [(24, 8, 8), (24, 24)]
    with pytest.raises(ValueError, match=r"a.kv.weight of shape \(40, 24\) has 40 outputs, but got 3. Pass"):
        Muon(held, split={"*.kv.*": 3})


def test_convolutions_stacks_and_transposed_maps() -> None:
    """A convolution is (out, in * ...), also with its channels last; experts are matrices each; Conv1D is (in, out)."""
    kernel = torch.randn(8, 4, 3, 3)
    conv = nn.Parameter(kernel.clone())
    last = nn.Parameter(kernel.clone(memory_format=torch.channels_last))
    flat = nn.Parameter(kernel.flatten(1).clone())
    for p in (conv, last, flat):
        g = torch.Generator().manual_seed(1)
        p.grad = torch.randn(8, 4, 3, 3, generator=g).reshape(p.shape)
        Muon([p], split=None).step()
    assert torch.equal(conv.flatten(1), flat)
    assert torch.equal(last.contiguous().flatten(1), flat) and last.is_contiguous(memory_format=torch.channels_last)

    experts = nn.Parameter(torch.randn(3, 16, 8))
    alone = [nn.Parameter(e.clone()) for e in experts.detach()]
    experts.grad = torch.randn(3, 16, 8)
    for p, g in zip(alone, experts.grad, strict=True):
        p.grad = g.clone()
    Muon([("mlp.experts.up", experts)], split=None).step()
    Muon(alone, split=None).step()
    assert torch.equal(experts, torch.stack(list(alone)))

    net = quiet(module("gpt2"))
    optimizer = Muon(net)
    by_name = dict(net.named_parameters())
    fc = by_name["model.transformer.h.0.mlp.c_fc.weight"]
    assert fc.shape == (32, 128) and optimizer._layouts[fc].transposed
    before = fc.detach().clone()
    net.training_step(make_batch("gpt2"), 0).backward()
    optimizer.step()
    # out / in = 4, so the step's largest singular value is lr sqrt(4), about
    assert 0.03 < float(torch.linalg.matrix_norm((fc - before).detach(), ord=2)) < 0.05
    qkv = by_name["model.transformer.h.0.attn.c_attn.weight"]
    assert optimizer._layouts[qkv].parts == (32, 32, 32) and optimizer._layouts[qkv].transposed


def matrices_of(net: nn.Module) -> set[str]:
    held = Muon(net)._layouts
    return {name for name, p in net.named_parameters() if p in held}


def resnet() -> nn.Module:
    class Residual(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.conv1, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
            self.conv2, self.depthwise = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, groups=width)

    return nn.ModuleDict(
        {"stem": nn.Conv2d(3, 8, 3), "stage": nn.Sequential(Residual(8), Residual(8)), "fc": nn.Linear(8, 5)}
    )


@pytest.mark.parametrize(("name", "per_block"), [("gpt2", 4), ("llama", 7), ("bert", 6), ("vit", 6), ("tiny_gpt", 4)])
def test_the_hidden_matrices_of_a_module_are_those_of_its_blocks(name: str, per_block: int) -> None:
    found = matrices_of(module(name))
    assert len(found) == 4 * per_block
    assert not [one for one in found if "embed" in one or "head" in one or "norm" in one or "wte" in one]


def test_the_hidden_matrices_of_other_modules() -> None:
    assert matrices_of(resnet()) == {f"stage.{i}.{conv}.weight" for i in (0, 1) for conv in ("conv1", "conv2")}
    mlp = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2))
    assert matrices_of(mlp) == {"2.weight"}, "neither what reads the input nor what writes the output"
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    found = matrices_of(encoder)
    assert {one.split(".", 2)[2] for one in found} == {
        "self_attn.in_proj_weight",
        "self_attn.out_proj.weight",
        "linear1.weight",
        "linear2.weight",
    }
    layouts = Muon(encoder)._layouts
    assert layouts[encoder.layers[0].self_attn.in_proj_weight].parts == (16, 16, 16)


def test_an_end_counts_where_an_embedding_or_a_head_stands_there() -> None:
    width = 8

    def net(**parts: nn.Module) -> set[str]:
        return matrices_of(nn.ModuleDict(parts))

    table, head = nn.Embedding(9, width), nn.Linear(width, 9)
    first, last = nn.Linear(width, width), nn.Linear(width, width)
    assert net(embed=table, a=first, b=last, head=head) == {"a.weight", "b.weight"}
    assert net(table=table, a=first, b=last) == {"a.weight"}, "the last one writes the output"
    assert net(a=first, b=last, head=head) == {"b.weight"}, "the first one reads the input"
    assert net(position=nn.Embedding(5, width), a=first, b=last, head=head) == {"b.weight"}, "positions embed no input"
    stack = nn.Sequential(*(nn.TransformerEncoderLayer(width, 2) for _ in range(2)))
    inside = net(layers=stack)
    assert len(inside) == 8
    assert net(embed=table, layers=stack, pooler=last, head=head) == inside | {"pooler.weight"}
    assert net(stem=first, layers=stack, out=last) == inside


def test_mixture_of_experts_and_state_space_models() -> None:
    from transformers import MambaConfig, MambaForCausalLM, MixtralConfig, MixtralForCausalLM

    mixtral = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_local_experts=3,
        )
    )
    optimizer = Muon(mixtral)
    stacks = {
        n: optimizer._layouts[p] for n, p in mixtral.named_parameters() if p in optimizer._layouts and p.ndim == 3
    }
    assert {n.rsplit(".", 1)[1]: (one.form, one.parts) for n, one in stacks.items()} == {
        "gate_up_proj": ("stack", (48, 48)),
        "down_proj": ("stack", ()),
    }
    mamba = MambaForCausalLM(MambaConfig(vocab_size=61, hidden_size=16, num_hidden_layers=2, state_size=4))
    found = {name.rsplit("mixer.", 1)[-1] for name in matrices_of(mamba)}
    assert found == {"in_proj.weight", "x_proj.weight", "dt_proj.weight", "out_proj.weight"}, found


def test_names_tell_embeddings_and_heads_and_bare_tensors_do_not() -> None:
    net = module("tiny_gpt")
    by_name = {n for n, p in net.named_parameters() if p in Muon(net.named_parameters())._layouts}
    assert by_name == matrices_of(net)
    bare = Muon(net.parameters())._layouts
    assert {n for n, p in net.named_parameters() if p in bare} - by_name == {
        "embed.weight",
        "position.weight",
        "head.weight",
    }
    groups = [
        {"params": [net.embed.weight], "algorithm": "adamw", "lr": 0.3},
        {"params": [net.blocks[0].proj.weight, net.blocks[0].proj.bias], "lr": 0.1},
    ]
    optimizer = Muon(groups)
    found = [(g["algorithm"], g["lr"], [tuple(p.shape) for p in g["params"]]) for g in optimizer.param_groups]
    assert found == [("adamw", 0.3, [(61, 16)]), ("muon", 0.1, [(16, 16)]), ("adamw", 3e-4, [(16,)])]


def test_tied_embeddings_stay_with_adamw() -> None:
    net = module("gpt2")
    assert net.model.lm_head.weight is net.model.transformer.wte.weight
    assert not any(p is net.model.lm_head.weight for p in Muon(net)._layouts)


# -- in a run


def quiet(net: Any) -> Any:
    """The module without a trainer, whose ``self.log`` would warn."""
    net.log = lambda *args, **kwargs: None
    return net


def with_muon(name: str, net: pl.LightningModule, **settings: Any) -> pl.LightningModule:
    net.configure_optimizers = lambda: Muon(net, **settings)  # type: ignore[method-assign]
    return net


@pytest.mark.parametrize("name", ["tiny_gpt", "gpt2", "classifier"])
def test_a_plain_run_trains_and_resumes(name: str, tmp_path: Any) -> None:
    """Two kinds of optimizer in one module under automatic optimization: clipping, accumulation, a scheduler, resume."""

    def run(resume: Any = None, directory: Any = None) -> dict[str, Tensor]:
        pl.seed_everything(1, verbose=False)
        net = module(name)

        def configure_optimizers() -> dict[str, Any]:
            optimizer = Muon(net, momentum=lambda u: 0.85 + 0.1 * u, num_steps=8, normalization="neuron")
            return {
                "optimizer": optimizer,
                "lr_scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / (1 + s)),
            }

        net.configure_optimizers = configure_optimizers  # type: ignore[method-assign]
        extra = (
            [pl.callbacks.ModelCheckpoint(directory, every_n_train_steps=3, save_top_k=-1, filename="{step}")]
            if directory
            else []
        )
        t = trainer(
            *extra,
            max_steps=8,
            gradient_clip_val=0.5,
            accumulate_grad_batches=2,
            enable_checkpointing=directory is not None,
        )
        t.fit(net, loader(name, 64, shuffle=False), ckpt_path=resume)
        assert t.global_step == 8
        return final_state(net, t)

    whole = run(directory=tmp_path)
    saved = checkpoints(tmp_path)
    torch.load(saved[0], weights_only=True)
    # plain Lightning repeats a stopped epoch: what must be the same is what the optimizer holds, from equal gradients
    optimizer = Muon(net := quiet(module(name)), normalization="neuron", momentum=lambda u: 0.5, num_steps=8)
    for _ in range(2):
        net.training_step(make_batch(name), 0).backward()
        optimizer.step()
    again = Muon(other := copy.deepcopy(net), normalization="neuron", momentum=lambda u: 0.5, num_steps=8)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, two in ((net, optimizer), (other, again)):
        torch.manual_seed(3)
        two.zero_grad()
        one.training_step(make_batch(name), 0).backward()
        two.step()
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))
    assert all(value.isfinite().all() for value in whole.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_state_loads_bit_for_bit_and_survives_copies(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(6, 6).to(dtype)), nn.Parameter(torch.randn(4).to(dtype))]

    def made(held: list[nn.Parameter]) -> Muon:
        groups = [{"params": held[:1], "algorithm": "muon"}, {"params": held[1:], "algorithm": "adamw"}]
        return Muon(groups, 0.01, normalization="neuron")

    def train(held: list[nn.Parameter], optimizer: Muon) -> list[Tensor]:
        torch.manual_seed(1)
        for _ in range(3):
            for p in held:
                p.grad = torch.randn(p.shape).to(dtype)
            optimizer.step()
        return [p.detach().clone() for p in held]

    train(params, optimizer := made(params))
    others = [nn.Parameter(p.detach().clone()) for p in params]
    again = made(others)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    copied, copied_params = copy.deepcopy((optimizer, params))
    pickled, pickled_params = pickle.loads(pickle.dumps((optimizer, params)))
    expected = train(params, optimizer)
    for held, one in ((others, again), (copied_params, copied), (pickled_params, pickled)):
        assert all(torch.equal(x, y) for x, y in zip(train(held, one), expected, strict=True))


def test_it_resumes_bit_for_bit_beside_a_technique(tmp_path: Any) -> None:
    from lightning_eff import LatestWeightAveraging

    def run(**kwargs: Any) -> dict[str, Tensor]:
        build = lambda: [LatestWeightAveraging(window=2, interval=2)]  # noqa: E731
        import tests.runs as runs

        original = runs.module
        runs.module = lambda name: with_muon(name, original(name), momentum=0.9)  # type: ignore[assignment]
        try:
            return final_state(*fit("tiny_gpt", build, **kwargs))
        finally:
            runs.module = original

    whole = run(directory=tmp_path)
    for path in checkpoints(tmp_path)[2:9:3]:
        assert differences(whole, run(resume=path)) == []


def test_momentum_and_decay_follow_the_run() -> None:
    params = parameters()
    optimizer = Muon(params, weight_decay=lambda u: 0.1 * (1 - u), momentum=lambda u: 0.85 + 0.1 * u, num_steps=4)
    seen = []
    for _ in range(6):
        train(params, optimizer, steps=1)
        seen += [optimizer.param_groups[0]["momentum"], optimizer.param_groups[0]["weight_decay"]]
    assert seen == pytest.approx([x for u in (0, 0.25, 0.5, 0.75, 1, 1) for x in (0.85 + 0.1 * u, 0.1 * (1 - u))])
    optimizer.u = 0.5
    train(params, optimizer, steps=1)
    assert optimizer.param_groups[0]["momentum"] == pytest.approx(0.9)
    with pytest.raises(
        ValueError, match=r"\['momentum'\] are functions of the run's progress u, which is unknown. Give num_steps="
    ):
        train(params, Muon(params, momentum=lambda u: u), steps=1)


def test_one_optimizer_step_keeps_no_more_state_than_momentum() -> None:
    net = quiet(module("tiny_gpt"))
    optimizer = Muon(net)
    net.training_step(make_batch("tiny_gpt"), 0).backward()
    optimizer.step()
    for p in net.parameters():
        held = sum(value.numel() for value in optimizer.state[p].values())
        assert held == (p.numel() if p in optimizer._layouts else 2 * p.numel() + 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, r"Muon\(lr=-1.0\): expected a finite number >= 0"),
        ({"momentum": 1.0}, r"momentum=1.0\): expected a number in \[0, 1\)"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        (
            {"orthogonalization": "svd"},
            r"orthogonalization='svd'\): expected 'polar_express' or 'newton_schulz'",
        ),
        ({"num_iterations": 0}, "num_iterations=0"),
        ({"scale": "rms"}, "scale='rms'"),
        ({"normalization": "row"}, "normalization='row'"),
        ({"beta2": 1.0}, "beta2=1.0"),
        ({"split": 3}, "split=3"),
        ({"dtype": "float16"}, "dtype='float16'"),
        ({"num_steps": 0}, "num_steps=0"),
        ({"adam": {"lrr": 1}}, r"there is no setting 'lrr'\. Choose from \['betas', 'eps', 'lr', 'weight_decay'\]"),
        ({"adam": {"betas": (0.9, 1.0)}}, "betas must be in"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Muon(parameters(), **settings)


def test_bad_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="no hidden matrix among 1 parameters"):
        Muon([nn.Parameter(torch.zeros(3))])
    with pytest.raises(ValueError, match="got no parameters"):
        Muon([])
    with pytest.raises(ValueError, match="\"algorithm\": 'sgd'"):
        Muon([{"params": parameters(), "algorithm": "sgd"}])
    with pytest.raises(ValueError, match="fewer than two dimensions"):
        Muon([{"params": [nn.Parameter(torch.zeros(3))], "algorithm": "muon"}])
    table = nn.Embedding(5, 4, sparse=True)
    optimizer = Muon(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"is sparse\. Set sparse=False in its embedding"):
        optimizer.step()


# -- over ranks


@pytest.fixture(scope="module")
def two(two_processes: dict[str, Any]) -> dict[str, Any]:
    return two_processes["muon"]


def test_under_ddp_matrices_are_divided_and_the_weights_are_those_of_one_process(two: dict[str, Any]) -> None:
    found = two["ddp"]
    assert found["same_as_one_process"] and found["alike"]
    # 16 matrices, fused ones apart 24: each rank made half of them orthogonal
    assert found["here"] == [12, 12]


def test_ranks_that_train_apart_divide_nothing(two: dict[str, Any]) -> None:
    assert two["apart"]["same_as_alone"] and not two["apart"]["alike"]
    assert two["apart"]["nan_is_finished"]
    assert two["apart"]["one_that_has_none"] == [True, True]


def test_sharded_parameters_end_where_one_process_does(two: dict[str, Any]) -> None:
    assert two["fsdp2"]["error"] < 1e-5 < two["fsdp2"]["moved"]


def test_in_a_hybrid_run_matrices_end_where_one_process_has_them(two: dict[str, Any]) -> None:
    """Tensor parallelism by the pack's own strategy, whichever way Muon knows the module."""
    for given in HYBRID:
        assert (torch.tensor(two["hybrid"][given]) - in_one_process(given)).abs().max() < 1e-5, given


@functools.cache
def in_one_process(given: str) -> Tensor:
    weights = torch.tensor(hybrid({}, given, 1))
    torch.manual_seed(3)
    assert (weights - flat(module("tiny_gpt", dropout=0.0, num_layers=2))).abs().max() > 0.01, "it moved"
    return weights


@pytest.mark.slow  # four processes in 12 runs
@pytest.mark.timeout(900)
def test_in_every_layout_of_four_processes_too() -> None:
    found = launch("tests.optim.optimizers.muon_jobs", "hybrid_in_four", world_size=4)
    assert len(found) == 12
    for name, weights in found.items():
        alone = in_one_process(name.partition(", ")[2])
        assert (torch.tensor(weights) - alone).abs().max() < 1e-5, name
