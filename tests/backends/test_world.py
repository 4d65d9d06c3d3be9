"""The laws of the world (W): alone without a launcher, seeds, set-up and close."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightrft import StrategyConfig, get_fake_strategy, get_strategy
from lightrft.errors import ConfigError, UnsupportedOperation
from lightrft.ops.world import World, discover
from support import MakeStrategy

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def python(code: str, **environ: str) -> str:
    """Standard output of a fresh interpreter without launcher variables."""
    clean = {key: value for key, value in os.environ.items() if key not in TORCHRUN}
    result = subprocess.run(
        [sys.executable, "-c", code], env=clean | environ, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_W1_importing_loads_neither_torch_nor_an_engine() -> None:
    code = """
import sys, lightrft, lightrft.strategy, lightrft.strategy.config, lightrft.strategy.fake_strategy
import lightrft.cli, lightrft.errors, lightrft.engines.protocol
from lightrft import StrategyConfig, Sampling, Strategy
StrategyConfig.from_args({})
print(sorted({"torch", "deepspeed", "vllm", "sglang", "transformers", "numpy"} & set(sys.modules)))
"""
    assert python(code) == "[]"


def test_W1_FC43_no_launcher_is_one_rank_without_group_network_or_change(make_strategy: MakeStrategy) -> None:
    before = dict(os.environ)
    strategy = make_strategy()
    strategy.setup_distributed(timedelta(seconds=5))
    assert strategy.world_size == 1
    assert strategy.get_rank() == 0
    assert strategy.is_rank_0()
    assert not torch.distributed.is_initialized()
    strategy.barrier()
    assert dict(os.environ) == before


def test_FC40_without_cuda_or_engines_everything_imports_and_the_fake_works() -> None:
    code = """
import sys, torch, pkgutil, importlib
for name in ("vllm", "sglang", "deepspeed"):
    sys.modules[name] = None
def refuse(*args, **kwargs):
    raise RuntimeError("CUDA was asked")
torch.cuda.current_device = refuse
import lightrft
for module in pkgutil.walk_packages(lightrft.__path__, "lightrft."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
strategy = lightrft.get_fake_strategy()
strategy.setup_distributed()
model, optimizer = strategy.prepare((m := torch.nn.Linear(2, 2), strategy.create_optimizer(m)))
strategy.maybe_load_optimizer(strategy.maybe_offload_optimizer(optimizer))
local = lightrft.get_strategy({"backend": "local", "bf16": False})
try:
    local.setup_inference_engine(None, engine_type="vllm")
except ImportError as error:
    print(error)
"""
    assert "pip install 'lightrft[vllm]'" in python(code)


def test_W2_half_set_and_impossible_environments() -> None:
    assert discover({}) == World()
    torchrun = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}
    assert discover(torchrun) == World(1, 4, 1, "host:29500")
    assert discover(torchrun, local_rank=3) == World(1, 4, 3, "host:29500")
    slurm = {"SLURM_PROCID": "2", "SLURM_NTASKS": "3", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}
    assert discover(slurm | {"SLURM_NNODES": "1"}) == World(2, 3, 0, "127.0.0.1:20007")
    assert discover(slurm | {"MASTER_ADDR": "n1", "MASTER_PORT": "5"}) == World(2, 3, 0, "n1:5")
    with pytest.raises(ConfigError, match="3 ranks cannot find each other: MASTER_ADDR is not set"):
        discover(slurm | {"SLURM_NNODES": "3"})
    with pytest.raises(ConfigError, match="MASTER_ADDR and MASTER_PORT is not set"):
        discover({"RANK": "0", "WORLD_SIZE": "2"})
    assert discover({"SLURM_NTASKS": "3"}) == World()  # a shell in an allocation, not a step of it
    with pytest.raises(ConfigError, match="RANK without WORLD_SIZE"):
        discover({"RANK": "0"})
    with pytest.raises(ConfigError, match="RANK=4 and WORLD_SIZE=4"):
        discover({"RANK": "4", "WORLD_SIZE": "4"})
    with pytest.raises(ConfigError, match="WORLD_SIZE='two'"):
        discover({"RANK": "0", "WORLD_SIZE": "two"})


def test_local_says_what_to_do_under_a_launcher_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(UnsupportedOperation, match=r"local.*world_size=2.*fsdp"):
        get_strategy({"backend": "local"})
    assert get_fake_strategy().world_size == 1


def test_W3_set_up_twice_and_close_twice(make_strategy: MakeStrategy) -> None:
    threads = threading.active_count()
    strategy = make_strategy()
    strategy.setup_distributed()
    state = torch.get_rng_state()
    strategy.setup_distributed()
    assert torch.equal(state, torch.get_rng_state())
    strategy.close()
    strategy.close()
    assert threading.active_count() == threads


def test_W3_a_process_group_of_somebody_else_is_left_alone(make_strategy: MakeStrategy, tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        strategy = make_strategy()
        strategy.setup_distributed()
        strategy.close()
        assert torch.distributed.is_initialized()
    finally:
        torch.distributed.destroy_process_group()


def two_models_and_a_dropout(make_strategy: MakeStrategy, seed: int, disturb: bool) -> list[Tensor]:
    strategy = make_strategy(seed=seed)
    strategy.setup_distributed()
    if disturb:
        torch.rand(3)
    models = []
    for _ in range(2):
        with strategy.init_model_context():
            models.append(nn.Linear(3, 3))
    return [model.weight.detach().clone() for model in models]


def test_W4_same_seed_same_start(make_strategy: MakeStrategy) -> None:
    first = two_models_and_a_dropout(make_strategy, 1, disturb=False)
    again = two_models_and_a_dropout(make_strategy, 1, disturb=True)
    other = two_models_and_a_dropout(make_strategy, 2, disturb=False)
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[0], first[1])  # an actor and a critic do not start as one


def test_W4_dropout_repeats_and_is_not_disturbed_by_making_models(make_strategy: MakeStrategy) -> None:
    masks = []
    for make_a_model in (False, True):
        strategy = make_strategy(seed=3)
        strategy.setup_distributed()
        if make_a_model:
            with strategy.init_model_context():
                nn.Linear(3, 3)
        masks.append(nn.functional.dropout(torch.ones(100)))
    assert torch.equal(*masks)


def test_W4_dropout_differs_between_ranks() -> None:
    from lightrft.ops.composition import run_state
    from lightrft.ops.seeds import seed_rank

    masks = []
    for rank in (0, 1):
        run = run_state(StrategyConfig(), World(rank, 2, rank), torch.device("cpu"))
        seed_rank(run)
        masks.append(nn.functional.dropout(torch.ones(100)))
    assert not torch.equal(*masks)


def test_print_speaks_on_rank_0(make_strategy: MakeStrategy, capsys: pytest.CaptureFixture[str]) -> None:
    make_strategy().print("step", 3)
    assert capsys.readouterr().out == "step 3\n"


def test_report_memory_measures_and_logs(make_strategy: MakeStrategy, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "lightrft"):
        report = make_strategy().report_memory("before")
    assert report.resident > 50_000_000
    assert "before memory: resident" in caplog.text


def test_FC20_arguments_are_left_alone_and_shared_by_nothing() -> None:
    import copy

    args = {"backend": "fake", "adam_betas": [0.8, 0.9], "mine": {"list": [1]}}
    before = copy.deepcopy(args)
    first, second = get_strategy(args), get_strategy(args)
    first.prepare(nn.Linear(1, 1))
    assert args == before
    assert first.config == second.config
    assert first.args is args


def test_C5_batch_sizes_that_do_not_fit_are_refused_at_once() -> None:
    for backend in ("fake", "local"):
        with pytest.raises(ConfigError, match=r"10.*4|4.*10"):
            get_strategy({"backend": backend, "train_batch_size": 10, "micro_train_batch_size": 4})


@pytest.mark.parametrize("field", [{"zpg": 2}, {"sp_size": 2}, {"adam_offload": True}, {"grad_accum_dtype": "fp32"}])
@pytest.mark.parametrize("backend", ["fake", "local"])
def test_C7_a_field_that_is_not_carried_out_is_refused(backend: str, field: dict[str, object]) -> None:
    (name, value), *_ = field.items()
    with pytest.raises(UnsupportedOperation, match=f"(?s){backend}.*{name}.*{value}"):
        get_strategy({"backend": backend, **field})


def test_unknown_backend_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'local'"):
        get_strategy({"backend": "lokal"})
