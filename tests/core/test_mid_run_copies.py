"""Copies of a module that are made within a fit are plain modules: no hooks and patches of the run go with them."""

import ast
import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lightning_eff
from lightning_eff._core._architecture.technique import Architecture
from lightning_eff._core.patches import Patches, hook_before, hook_behind
from tests.cases import CASES
from tests.models import TinyGPT, loader, make_batch, module, trainer
from tests.plugins import PLUGINS

STEPS = 6
Copy = tuple[str, nn.Module]


def saved(net: nn.Module) -> nn.Module:
    """What ``torch.save`` makes of a network."""
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


class Agent(pl.LightningModule):
    """Holds its network among its hyperparameters, as rl4co's modules do, and copies it while it trains.

    Args:
        network: a language model, or one that computes its own loss.
        copies: whether to make copies.
    """

    def __init__(self, network: nn.Module, copies: bool = True) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = network
        self.target: nn.Module | None = None
        self.made: list[Copy] = []
        self.pickles: list[bytes] = []

    def take(self, when: str) -> None:
        if self.hparams["copies"]:
            self.made += [
                (f"copied {when}", copy.deepcopy(self.network)),
                (f"pickled {when}", pickle.loads(pickle.dumps(self.network))),
                (f"saved {when}", saved(self.network)),
            ]
            self.pickles.append(pickle.dumps(self.network))

    def loss(self, batch: dict[str, Any]) -> torch.Tensor:
        if "pixel_values" in batch:
            return self.network(**batch).loss
        return F.cross_entropy(self.network(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    def on_train_start(self) -> None:
        if self.hparams["copies"]:
            self.__dict__["target"] = copy.deepcopy(self.network)  # no child: its parameters are not to be trained
        self.take("as training starts")

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        if self.trainer.global_step in (0, 3):
            self.take(f"in step {self.trainer.global_step}")
        return loss

    def on_before_backward(self, loss: torch.Tensor) -> None:
        if self.trainer.global_step == 3:
            self.take("before the backward pass")

    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.global_step == 4:
            self.take("behind a step")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def fit(model: str, *techniques: Any, copies: bool = True, path: Path | None = None, plugin: Any = None) -> Agent:
    """An agent that was trained, and saved in mid-run if ``path`` is given."""
    pl.seed_everything(1, verbose=False)
    network = module(model)
    agent = Agent(network if model == "tiny_gpt" else network.get_submodule("model"), copies)

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if path is not None and trainer.global_step == 3:
                trainer.save_checkpoint(path)

    settings = {} if plugin is None else {"plugins": plugin}
    trainer(*techniques, Save(), max_steps=STEPS, **settings).fit(agent, loader(model))
    return agent


def fresh(model: str, *techniques: Any) -> nn.Module:
    """A network as it was before the fit."""
    network = module(model)
    holder = Agent(network if model == "tiny_gpt" else network.get_submodule("model"))
    changing = [t for t in techniques if isinstance(t, Architecture)]
    if changing:
        lightning_eff.apply(holder, *changing)
    return holder.network


def attributes(net: nn.Module) -> dict[str, tuple[type, set[str], int]]:
    """What a network is made of: each part's class, the names of its attributes, and how many hooks it has."""
    return {
        path: (type(m), set(vars(m)), len(m._forward_hooks) + len(m._forward_pre_hooks))
        for path, m in net.named_modules()
    }


def outputs(net: nn.Module, model: str) -> torch.Tensor:
    batch = make_batch(model)
    with torch.no_grad():
        return net.eval()(**batch).logits if "pixel_values" in batch else net.eval()(batch["input_ids"])


def check(agent: Agent, model: str, *techniques: Any) -> None:
    """That all copies are plain networks, which compute what a plain one of the same weights does."""
    expected = fresh(model, *techniques)
    made = [*agent.made, ("the target network", agent.target)]
    assert len(made) >= 13
    for when, one in made:
        assert one is not None
        parts = attributes(one)
        assert {path: kind for path, (kind, _, _) in parts.items()} == {
            p: type(m) for p, m in expected.named_modules()
        }, when
        assert not any(hooks for _, _, hooks in parts.values()), when
        plain = {path: names for path, (_, names, _) in attributes(expected).items()}
        more = {path: names - plain[path] for path, (_, names, _) in parts.items() if names - plain[path]}
        assert not more, f"{when}: {more}"
        expected.load_state_dict(one.state_dict())
        torch.testing.assert_close(outputs(one, model), outputs(expected, model), rtol=0, atol=0, msg=when)


NAMES = [
    "ActivationCompression",
    "ActivationOffload",
    "AttentionWindowWarmup",
    "ExactResume",
    "ExponentialMovingAverage",
    "FusedLinearCrossEntropy",
    "ImportanceSampling",
    "KFAC",
    "LabelSmoothing",
    "LayerFreezing",
    "LayerScale",
    "LoRA",
    "ManifoldMixup",
    "PatchDropout",
    "ProgressiveResizing",
    "ProgressiveStacking",
    "RandomLTD",
    "ReplaceOptimizer",
    "ReSprop",
    "Rematerialization",
    "RigL",
    "SequenceLengthWarmup",
    "SharpnessAwareMinimization",
    "StochasticDepth",
    "TokenDropping",
    "TokenMerging",
]
holding = pytest.mark.filterwarnings("ignore:Attribute 'network' is an instance of `nn.Module`")


@holding
@pytest.mark.parametrize("name", NAMES)
def test_copies_under_a_technique_are_plain(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    technique = case.active()
    agent = fit(case.model, technique, path=tmp_path / "mid.ckpt")
    check(agent, case.model, technique)
    if not case.architecture:
        assert not any(b"lightning_eff" in data for data in agent.pickles), "who loads them may have no lightning_eff"
    held = torch.load(tmp_path / "mid.ckpt", weights_only=False)["hyper_parameters"]["network"]
    check_like(held, agent.made[-1][1])
    assert all("__reduce_ex__" not in vars(m) for m in agent.modules())


def check_like(one: nn.Module, other: nn.Module) -> None:
    assert attributes(one) == attributes(other)
    assert one.state_dict().keys() == other.state_dict().keys()


@holding
def test_copies_under_a_stack_are_plain() -> None:
    names = ["StochasticDepth", "TokenDropping", "SharpnessAwareMinimization", "Rematerialization", "LabelSmoothing"]
    agent, undisturbed = (fit("tiny_gpt", *[CASES[n].active() for n in names], copies=c) for c in (True, False))
    check(agent, "tiny_gpt")
    assert not any(b"lightning_eff" in data for data in agent.pickles)
    for p, q in zip(agent.parameters(), undisturbed.parameters(), strict=True):
        assert torch.equal(p, q), "the copies changed the run"


@holding
@pytest.mark.parametrize("name", ["INT8Precision", "Wang2018FP8Precision"])
def test_copies_under_a_precision_plugin_are_plain(name: str) -> None:
    agent = fit("tiny_gpt", plugin=PLUGINS[name].build("32-true"))
    check(agent, "tiny_gpt")
    assert not any(b"lightning_eff" in data for data in agent.pickles)


@holding
def test_the_whole_module_is_copied_in_mid_run() -> None:
    found: list[Any] = []

    class Whole(Agent):
        def on_train_batch_end(self, *args: Any) -> None:
            found.append(copy.deepcopy(self))

    pl.seed_everything(1, verbose=False)
    agent = Whole(TinyGPT(), copies=False)
    names = {path: set(vars(m)) for path, m in agent.named_modules()}
    trainer(CASES["StochasticDepth"].active(), max_steps=2).fit(agent, loader("tiny_gpt"))
    for one in found:
        assert {path: set(vars(m)) for path, m in one.named_modules()} == names
        assert one.training_step.__self__ is one


class Copying(nn.Linear):
    """Copies its attributes by itself."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Copying":
        made = Copying.__new__(Copying)
        memo[id(self)] = made
        for name, value in self.__dict__.items():
            made.__dict__[name] = copy.deepcopy(value, memo)
        return made


class State(nn.Linear):
    """Says by itself what is pickled, in another form than a dict."""

    def __getstate__(self) -> Any:
        return [*self.__dict__.items()]

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(dict(state))


@pytest.mark.parametrize("kind", [nn.Linear, Copying, State])
@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved])
def test_a_copy_acts_as_what_stood_there_before(kind: type[nn.Linear], how: Callable[[nn.Module], Any]) -> None:
    m, patches, own = kind(3, 3), Patches(), _negated
    m.__dict__["own"], x = own, torch.ones(1, 3)
    expected = m(x)

    def refuse(*args: Any) -> Any:
        raise AssertionError("the run's own")

    handles = [hook_before(m, refuse), hook_behind(m, refuse, always_call=True, with_kwargs=True)]
    patches.set(m, "forward", refuse)
    patches.set(m, "forward", refuse)
    patches.set(m, "own", refuse)
    patches.set(m, "extra_repr", lambda: "ours")
    made = how(m)
    assert torch.equal(made(x), expected) and made.own(x) is not None and "ours" not in repr(made)
    if kind is nn.Linear:
        assert vars(made).keys() == vars(kind(3, 3)).keys() | {"own"}
        assert not made._forward_hooks and not made._forward_hooks_always_called and not made._forward_pre_hooks
    made.weight.data.zero_()
    assert torch.equal(made(x), made.bias[None]), "it is bound to itself, not to what it is a copy of"
    assert torch.equal(how(made)(x), made.bias[None])
    for handle in handles:
        handle.remove()
        handle.remove()
    patches.restore()
    assert torch.equal(m(x), expected) and vars(m).keys() == vars(kind(3, 3)).keys() | {"own"}


def test_hooks_of_the_users_stay_in_a_copy() -> None:
    m = nn.Linear(2, 2)
    m.register_forward_hook(_doubled)
    hook_behind(m, lambda m, args, output: output * 100, prepend=True)
    made = copy.deepcopy(m)
    x = torch.ones(1, 2)
    assert len(made._forward_hooks) == 1
    assert torch.equal(m(x), made(x) * 100)


def test_values_that_are_no_callables_are_those_of_before() -> None:
    m, patches = nn.Linear(2, 2), Patches()
    m.width, before = 3, set(vars(m)) | {"width"}
    patches.set(m, "width", 5)
    patches.set(m, "width", 7)
    patches.set(m, "length", 9)
    made = copy.deepcopy(m)
    assert (m.width, m.length, made.width, set(vars(made))) == (7, 9, 3, before)


def test_all_hooks_on_modules_are_registered_where_copies_go_without_them() -> None:
    """The rest stays with the module for good, or is of modules whose copies need it: divided ones, and the planner's."""
    exempt = {
        "_core/patches.py",
        "_core/_architecture/surgeon.py",
        "_core/_architecture/derived.py",
    }
    root = Path(lightning_eff.__file__).parent
    found = [
        f"{path.relative_to(root)}:{node.lineno}"
        for path in sorted(root.rglob("*.py"))
        if str(path.relative_to(root)) not in exempt
        and path.relative_to(root).parts[0] not in ("strategies", "planner")
        if "register_forward" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and node.attr in ("register_forward_hook", "register_forward_pre_hook")
    ]
    assert not found, f"use hook_before and hook_behind of _core/patches.py at {found}"


def _negated(x: torch.Tensor) -> torch.Tensor:
    return -x


def _doubled(m: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2
