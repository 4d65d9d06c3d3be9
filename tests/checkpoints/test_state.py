from __future__ import annotations

import copy
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import lr_scheduler as schedulers
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from lightrft.checkpoints.layout import find_checkpoint, write_checkpoint
from lightrft.checkpoints.state import LoadedState, load_state
from lightrft.errors import CheckpointError
from support import save_state

Trained = tuple[nn.Module, Optimizer, LRScheduler]


@pytest.fixture(autouse=True)
def _own_random_states() -> Iterator[None]:
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    yield
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def make(seed: int = 0) -> Trained:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))
    groups = [
        {"params": [p for n, p in model.named_parameters() if n.endswith("weight")], "weight_decay": 0.1},
        {"params": [p for n, p in model.named_parameters() if n.endswith("bias")], "lr": 0.02},
    ]
    optimizer = AdamW(groups, lr=0.01, betas=(0.8, 0.95))
    return model, optimizer, LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))


def train(trained: Trained, steps: int) -> list[list[float]]:
    """Data from numpy and Python, dropout from torch: each random state matters. The learning rates used."""
    model, optimizer, scheduler = trained
    rates = []
    for _ in range(steps):
        data = torch.from_numpy(np.random.standard_normal((6, 4))).float() * random.random()
        optimizer.zero_grad()
        model(data).square().mean().backward()
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return rates


def save(directory: Path, trained: Trained, **client_state: object) -> None:
    directory.mkdir(exist_ok=True, parents=True)
    model, optimizer, scheduler = trained
    save_state(
        directory,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        counters={"updates": 4},
        client_state=client_state,
    )


def load(directory: Path, trained: Trained, **options: bool) -> LoadedState:
    model, optimizer, scheduler = trained
    return load_state(directory, model=model, optimizer=optimizer, scheduler=scheduler, **options)


def bits(value: object) -> object:
    if isinstance(value, Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return str(value.dtype), tuple(value.shape), str(value.device), raw
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *(bits(item) for item in value)]
    return value


def everything(trained: Trained) -> object:
    model, optimizer, scheduler = trained
    rng = torch.get_rng_state(), np.random.get_state(), random.getstate()
    state = optimizer.state_dict()
    return bits([dict(model.state_dict()), state["state"], state["param_groups"], scheduler.state_dict(), rng])


def differences(one: Trained, other: Trained) -> list[str]:
    return [key for key, value in one[0].state_dict().items() if bits(value) != bits(other[0].state_dict()[key])]


def test_K1_all_state_comes_back_bitwise(tmp_path: Path) -> None:
    trained = make()
    train(trained, 4)
    expected = everything(trained)
    save(tmp_path, trained, epoch=3, ema=torch.ones(2), nested={"a": (1, 2.5)})
    assert everything(trained) == expected, "a save changes nothing"
    fresh = make(1)
    train(fresh, 1)
    identities = [id(parameter) for parameter in fresh[0].parameters()]
    loaded = load(tmp_path, fresh)
    assert everything(fresh) == expected
    assert [id(parameter) for parameter in fresh[0].parameters()] == identities
    assert bits(loaded.client_state) == bits({"epoch": 3, "ema": torch.ones(2), "nested": {"a": (1, 2.5)}})
    assert loaded.counters == {"updates": 4}


def test_K1_saved_files_are_named_by_parameter(tmp_path: Path) -> None:
    trained = make()
    train(trained, 1)
    save(tmp_path, trained)
    with safe_open(tmp_path / "optimizer.safetensors", "pt") as file:
        assert {"0.weight/exp_avg", "4.bias/step"} <= set(file.keys())
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(trained[0].state_dict())


def test_K2_FC28_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    whole = make()
    rates = train(whole, 6)
    half = make()
    train(half, 2)
    save(tmp_path, half)
    train(half, 1)
    resumed = make(9)
    load(tmp_path, resumed)
    assert train(resumed, 4) == rates[2:]
    assert differences(whole, resumed) == []
    assert everything(whole) == everything(resumed)


RESUMES = """
import runpy, sys
from pathlib import Path
test = runpy.run_path(sys.argv[1])
trained = test["make"](5)
test["load"](Path(sys.argv[2]), trained)
test["train"](trained, 3)
test["save"](Path(sys.argv[3]), trained)
"""


def test_K2_resumed_in_a_new_process_equals_uninterrupted(tmp_path: Path) -> None:
    whole, half = make(), make()
    train(whole, 3)
    train(whole, 3)
    expected = everything(whole)
    half = make()
    train(half, 3)
    save(tmp_path / "half", half)
    words = [sys.executable, "-c", RESUMES, __file__, str(tmp_path / "half"), str(tmp_path / "end")]
    # Bitwise at the same number of threads: another number sums in another order.
    surroundings = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(words, check=True, env=os.environ | surroundings)
    end = make(3)
    load(tmp_path / "end", end)
    assert differences(whole, end) == []
    assert everything(end) == expected


def test_K1_through_the_layout(tmp_path: Path) -> None:
    trained = make()
    train(trained, 2)
    expected = everything(trained)
    write_checkpoint(tmp_path, "s2", lambda directory: save(directory, trained), backend="local", world_size=1, step=2)
    fresh = make(4)
    load(find_checkpoint(tmp_path), fresh)
    assert everything(fresh) == expected


def test_K1_an_optimizer_that_never_stepped(tmp_path: Path) -> None:
    trained, stepped = make(), make(2)
    save(tmp_path, trained)
    expected = everything(trained)
    train(stepped, 2)
    load(tmp_path, stepped)
    assert everything(stepped) == expected
    assert len(stepped[1].state) == 0


def test_K1_moments_keep_their_dtype_whatever_the_parameter_has(tmp_path: Path) -> None:
    model = nn.Linear(2, 2).bfloat16()
    optimizer = AdamW(model.parameters())
    for parameter in model.parameters():
        optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": torch.full(parameter.shape, 0.1)}
    expected = bits(optimizer.state_dict()["state"])
    save_state(tmp_path, model=model, optimizer=optimizer)
    fresh = AdamW(model.parameters())
    load_state(tmp_path, model=model, optimizer=fresh)
    assert bits(fresh.state_dict()["state"]) == expected


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor", "RMSprop", "SGD", "Adagrad"])
def test_K1_K2_other_optimizers(tmp_path: Path, name: str) -> None:
    def step(model: nn.Module, optimizer: Optimizer) -> None:
        def closure() -> float:
            optimizer.zero_grad()
            loss = model(torch.ones(3, 4)).square().mean()
            loss.backward()
            return float(loss.detach())

        optimizer.step(closure)

    kind = getattr(torch.optim, name)
    options = {"momentum": 0.9} if name == "SGD" else {}
    torch.manual_seed(0)
    model, other = nn.Linear(4, 2), nn.Linear(4, 2)
    optimizer, resumed = kind(model.parameters(), lr=0.1, **options), kind(other.parameters(), lr=0.3, **options)
    step(model, optimizer)
    save_state(tmp_path, model=model, optimizer=optimizer)
    load_state(tmp_path, model=other, optimizer=resumed)
    for _ in range(2):
        step(model, optimizer)
        step(other, resumed)
    assert bits(optimizer.state_dict()) == bits(resumed.state_dict())
    assert bits(dict(model.state_dict())) == bits(dict(other.state_dict()))


def build_scheduler(name: str, optimizer: Optimizer) -> LRScheduler:
    if name == "SequentialLR":
        parts: list[LRScheduler] = [schedulers.ConstantLR(optimizer), schedulers.CosineAnnealingLR(optimizer, 5)]
        return schedulers.SequentialLR(optimizer, parts, [2])
    options: dict[str, object] = {
        "MultiStepLR": {"milestones": [2, 3, 3]},
        "OneCycleLR": {"max_lr": 1.0, "total_steps": 20},
        "CyclicLR": {"base_lr": 0.1, "max_lr": 1.0},
        "CosineAnnealingWarmRestarts": {"T_0": 3},
    }
    chosen = options[name]
    assert isinstance(chosen, dict)
    made = getattr(schedulers, name)(optimizer, **chosen)
    assert isinstance(made, LRScheduler)
    return made


@pytest.mark.parametrize(
    "name", ["SequentialLR", "MultiStepLR", "OneCycleLR", "CyclicLR", "CosineAnnealingWarmRestarts"]
)
def test_K1_FC28_schedulers_go_on_as_they_were(tmp_path: Path, name: str) -> None:
    model = nn.Linear(2, 1)
    optimizer, resumed = (SGD(model.parameters(), lr=0.5, momentum=0.9) for _ in range(2))
    scheduler, other = build_scheduler(name, optimizer), build_scheduler(name, resumed)
    rates: list[list[float]] = [[], []]
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    save_state(tmp_path, model=model, optimizer=optimizer, scheduler=scheduler)
    load_state(tmp_path, model=model, optimizer=resumed, scheduler=other)
    for _ in range(4):
        for index, (each, its) in enumerate(((optimizer, scheduler), (resumed, other))):
            each.step()
            its.step()
            rates[index].append(each.param_groups[0]["lr"])
    assert rates[0] == rates[1]


class ListLike:
    """What configuration libraries make of a list."""

    def __iter__(self) -> Iterator[np.float64]:
        return iter([np.float64(0.8), np.float64(0.9)])

    def __getitem__(self, index: int) -> np.float64:
        return list(self)[index]


@pytest.mark.parametrize("betas", [[0.8, 0.9], (0.8, 0.9), ListLike()], ids=["list", "tuple", "list-like"])
def test_FC19_betas_are_a_tuple_of_floats(tmp_path: Path, betas: object) -> None:
    model = nn.Linear(2, 1)
    optimizer = AdamW(model.parameters())
    optimizer.param_groups[0]["betas"] = betas
    save_state(tmp_path, model=model, optimizer=optimizer)
    fresh = AdamW(model.parameters())
    load_state(tmp_path, model=model, optimizer=fresh)
    loaded = fresh.param_groups[0]["betas"]
    assert type(loaded) is tuple
    assert loaded == (0.8, 0.9)
    assert [type(beta) for beta in loaded] == [float, float]


def damaged(directory: Path, file: str) -> None:
    data = (directory / file).read_bytes()
    (directory / file).write_bytes(data[: len(data) // 2])


FILES = ["model.safetensors", "optimizer.safetensors", "optimizer.json", "scheduler.json", "rng_rank0.json"]
FILES += ["rng_rank0.safetensors", "client_state.json", "counters.json"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("gone", [True, False], ids=["gone", "truncated"])
def test_K6_a_bad_file_is_an_error_that_changes_nothing(tmp_path: Path, file: str, gone: bool) -> None:
    trained = make()
    train(trained, 2)
    save(tmp_path, trained, a=1)
    if gone:
        (tmp_path / file).unlink()
    else:
        damaged(tmp_path, file)
    fresh = make(3)
    train(fresh, 1)
    before = everything(fresh)
    with pytest.raises(CheckpointError, match=str(tmp_path / file.split(".", maxsplit=1)[0])):
        load(tmp_path, fresh)
    assert everything(fresh) == before


class Named(nn.Module):
    def __init__(self, **sizes: int) -> None:
        super().__init__()
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.full((size,), float(len(name)))))


def zero(model: nn.Module, name: str) -> None:
    with torch.no_grad():
        model.get_parameter(name).zero_()


def test_K7_strict_names_missing_and_unexpected_keys(tmp_path: Path) -> None:
    save_state(tmp_path, model=Named(a=1, old=2))
    other = Named(a=1, new=3)
    zero(other, "a")
    with pytest.raises(CheckpointError, match=r"(?s)missing.*new.*unexpected.*old"):
        load_state(tmp_path, model=other)
    assert bits(other.a) == bits(torch.zeros(1))


def test_K7_not_strict_loads_what_fits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_state(tmp_path, model=Named(a=1, old=2))
    other = Named(a=1, new=3)
    zero(other, "a")
    load_state(tmp_path, model=other, strict=False)
    assert bits(other.a) == bits(torch.ones(1))
    assert "new" in caplog.text
    assert "old" in caplog.text


@pytest.mark.parametrize("strict", [True, False])
def test_K7_a_wrong_shape_is_named(tmp_path: Path, strict: bool) -> None:
    save_state(tmp_path, model=Named(a=1, b=2))
    other = Named(a=1, b=3)
    zero(other, "a")
    with pytest.raises(CheckpointError, match=r"b: shape \(2,\) in the checkpoint, \(3,\) in the model"):
        load_state(tmp_path, model=other, strict=strict)
    assert bits(other.a) == bits(torch.zeros(1))


def test_K7_module_only_touches_nothing_else(tmp_path: Path) -> None:
    trained = make()
    train(trained, 2)
    save(tmp_path, trained)
    fresh = make(3)
    train(fresh, 1)
    rest = bits([fresh[1].state_dict(), fresh[2].state_dict(), torch.get_rng_state(), random.getstate()])
    numpy_state = bits(np.random.get_state())
    load(tmp_path, fresh, module_only=True)
    assert differences(trained, fresh) == []
    assert bits([fresh[1].state_dict(), fresh[2].state_dict(), torch.get_rng_state(), random.getstate()]) == rest
    assert bits(np.random.get_state()) == numpy_state


@pytest.mark.parametrize("part", ["load_optimizer", "load_scheduler"])
def test_K1_parts_can_be_left_out(tmp_path: Path, part: str) -> None:
    trained = make()
    train(trained, 2)
    save(tmp_path, trained)
    fresh = make(3)
    train(fresh, 1)
    index = 1 if part == "load_optimizer" else 2
    before, other = bits(fresh[index].state_dict()), bits(trained[3 - index].state_dict())
    load(tmp_path, fresh, **{part: False})
    assert bits(fresh[index].state_dict()) == before
    assert bits(fresh[3 - index].state_dict()) == other


class Tied(nn.Module):
    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.body = nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        if tie:
            self.head.weight = self.embed.weight


def test_K8_tied_weights_are_stored_once_and_tied_again(tmp_path: Path) -> None:
    model = Tied()
    model.body.weight.requires_grad_(False)
    save_state(tmp_path, model=model, optimizer=AdamW(model.parameters()))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == {"embed.weight", "body.weight", "body.bias"}
    for tie in (True, False):
        fresh = Tied(tie)
        load_state(tmp_path, model=fresh)
        assert fresh.head.weight is fresh.embed.weight
        assert torch.equal(fresh.head.weight, model.embed.weight)
        assert fresh.body.weight.requires_grad, "as torch does: not part of the state"
    fresh = Tied()
    load_state(tmp_path, model=fresh, optimizer=AdamW(fresh.parameters()))
    assert fresh.head.weight is fresh.embed.weight


def test_K8_an_optimizer_of_untied_weights_is_refused(tmp_path: Path) -> None:
    model, untied = Tied(), Tied(tie=False)
    save_state(tmp_path, model=model, optimizer=AdamW(model.parameters()))
    before = bits(dict(untied.state_dict()))
    for load_optimizer in (True, False):
        with pytest.raises(CheckpointError, match=r"head\.weight"):
            load_state(tmp_path, model=untied, optimizer=AdamW(untied.parameters()), load_optimizer=load_optimizer)
    assert bits(dict(untied.state_dict())) == before


def test_K8_overlapping_and_strided_weights(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)

    def build(base: Tensor) -> nn.Module:
        model = nn.Module()
        model.whole = nn.Parameter(base)
        model.part = nn.Parameter(base[1:])
        model.turned = nn.Parameter(base.T)
        model.strided = nn.Parameter((base + 1).T)
        model.wide = nn.Parameter(base.to(torch.complex128))
        return model

    save_state(tmp_path, model=build(base))
    fresh = build(torch.zeros(3, 4))
    load_state(tmp_path, model=fresh)
    assert bits(dict(fresh.state_dict())) == bits(dict(build(base).state_dict()))


def test_K6_an_optimizer_of_another_model_is_refused_at_save(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not in the model, of shapes"):
        save_state(tmp_path, model=nn.Linear(2, 1), optimizer=AdamW(nn.Linear(7, 1).parameters()))
    assert list(tmp_path.iterdir()) == []


def test_K6_other_optimizers_groups_and_schedulers_are_refused(tmp_path: Path) -> None:
    model, _, scheduler = trained = make()
    save(tmp_path, trained)
    before = everything(trained)
    first, *others = model.parameters()
    wrong: list[tuple[Optimizer, str]] = [
        (SGD(model.parameters(), lr=0.1), "written by AdamW, the optimizer is SGD"),
        (AdamW(model.parameters()), "has 2 parameter groups, the optimizer has 1"),
        (AdamW([{"params": [first]}, {"params": others}]), r"(?s)group 0 of the optimizer lacks 1\.weight"),
        (AdamW([{"params": [first]}, {"params": [*others, nn.Parameter(torch.ones(1))]}]), "one that the model lacks"),
    ]
    for optimizer, message in wrong:
        with pytest.raises(CheckpointError, match=message):
            load_state(tmp_path, model=model, optimizer=optimizer, scheduler=scheduler)
    other = schedulers.ConstantLR(trained[1])
    before = everything(trained)
    with pytest.raises(CheckpointError, match="written by LambdaLR, the scheduler is ConstantLR"):
        load_state(tmp_path, model=model, optimizer=trained[1], scheduler=other)
    assert everything(trained) == before


def test_FC30_an_unsavable_client_state_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"client_state\['a'\]\[0\]: object of type"):
        save_state(tmp_path, model=nn.Linear(2, 1), client_state={"a": [object()]})
    assert list(tmp_path.iterdir()) == []


def test_K1_a_model_without_anything(tmp_path: Path) -> None:
    save_state(tmp_path, model=nn.Module())
    assert load_state(tmp_path, model=nn.Module()) == LoadedState({}, {})


def test_K6_extra_state_and_meta_tensors_are_refused(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"a": 1}

    with pytest.raises(CheckpointError, match="_extra_state"):
        save_state(tmp_path, model=Extra(2, 1))
    with pytest.raises(CheckpointError, match="meta"):
        save_state(tmp_path, model=nn.Linear(2, 1, device="meta"))
    save_state(tmp_path, model=nn.Linear(2, 1))
    with pytest.raises(CheckpointError, match="meta"):
        load_state(tmp_path, model=nn.Linear(2, 1, device="meta"))


class Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("file", FILES)
def test_K9_nothing_is_unpickled(tmp_path: Path, file: str) -> None:
    trained = make()
    train(trained, 1)
    save(tmp_path, trained)
    before = everything(trained)
    (tmp_path / file).write_bytes(pickle.dumps(Touch(tmp_path / "ran")))
    with pytest.raises(CheckpointError):
        load(tmp_path, trained)
    assert not (tmp_path / "ran").exists()
    assert everything(trained) == before


def test_K1_dtype_changes_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 1)
    save_state(tmp_path, model=model)
    load_state(tmp_path, model=copy.deepcopy(model))
    assert not caplog.records
    load_state(tmp_path, model=copy.deepcopy(model).bfloat16())
    assert "change their dtype" in caplog.text
