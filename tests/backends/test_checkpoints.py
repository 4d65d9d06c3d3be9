"""Checkpoints through the strategy (K1, K2, K9), on every backend of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrft.checkpoints import checksums
from lightrft.errors import CheckpointError
from lightrft.strategy.record import StrategyRecord
from support import MakeStrategy


def start(make_strategy: MakeStrategy) -> tuple[StrategyRecord, nn.Module, Optimizer, LRScheduler]:
    strategy = make_strategy(train_batch_size=2, seed=3)
    strategy.setup_distributed()
    with strategy.init_model_context():
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    optimizer = strategy.create_optimizer(model, lr=1e-2)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5)
    return strategy, *strategy.prepare((model, optimizer, warm_up))


def train(
    run: tuple[StrategyRecord, nn.Module, Optimizer, LRScheduler], first: int, steps: int
) -> tuple[list[Tensor], list[float]]:
    strategy, model, optimizer, scheduler = run
    rates = []
    for step in range(first * 2, (first + steps) * 2):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(1, 4, generator=generator), torch.randn(1, 2, generator=generator)
        strategy.backward(mse_loss(model(x), y), model, optimizer)
        strategy.optimizer_step(optimizer, model, scheduler)
        rates.append(optimizer.param_groups[0]["lr"])
    return [parameter.detach().clone() for parameter in model.parameters()], rates


def test_K1_K2_FC28_a_resumed_run_is_the_run(make_strategy: MakeStrategy, tmp_path: Path) -> None:
    whole = start(make_strategy)
    train(whole, 0, 3)
    expected, expected_rates = train(whole, 3, 3)

    begun = start(make_strategy)
    train(begun, 0, 3)
    begun[0].save_ckpt(begun[1], tmp_path, client_state={"seen": [1, 2]})
    torch.rand(5)  # the state of randomness is the checkpoint's, not this process's

    resumed = start(make_strategy)
    path, client_state = resumed[0].load_ckpt(resumed[1], tmp_path)
    assert Path(path).name == "step3"
    assert client_state == {"seen": [1, 2]}
    found, rates = train(resumed, 3, 3)
    assert all(map(torch.equal, expected, found))
    assert rates == expected_rates


def test_K9_a_tag_that_would_leave_the_directory_is_refused(make_strategy: MakeStrategy, tmp_path: Path) -> None:
    strategy, model, _, _ = start(make_strategy)
    for tag in ("../x", "/abs", "a/../../b", "", "nul\0"):
        with pytest.raises(CheckpointError):
            strategy.save_ckpt(model, tmp_path / "inside", tag=tag)
        with pytest.raises(CheckpointError):
            strategy.load_ckpt(model, tmp_path / "inside", tag=tag)
    assert [path.name for path in tmp_path.iterdir()] in ([], ["inside"])


def test_a_save_in_the_middle_of_a_window_warns(
    make_strategy: MakeStrategy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strategy, model, optimizer, _ = start(make_strategy)
    strategy.backward(model(torch.ones(1, 4)).sum(), model, optimizer)
    strategy.optimizer_step(optimizer, model)
    strategy.save_ckpt(model, tmp_path)
    assert "gradients of 1 micro-batches are not saved" in caplog.text


def test_save_model_and_load_model(make_strategy: MakeStrategy, tmp_path: Path) -> None:
    strategy, model, _, _ = start(make_strategy)
    strategy.save_model(model, None, tmp_path / "model")
    other = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    strategy.load_model(other, tmp_path / "model", strict=True)
    assert all(map(torch.equal, other.parameters(), model.parameters()))
    with pytest.raises(CheckpointError, match=r"missing.*2\.weight|shapes"):
        strategy.load_model(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), tmp_path / "model", strict=True)
    with pytest.raises(CheckpointError, match="no safetensors"):
        strategy.load_model(other, tmp_path / "nothing")


def test_K10_save_model_writes_what_from_pretrained_reads(make_strategy: MakeStrategy, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from lightrft.rlvr.models import tiny_model

    strategy = make_strategy()
    model = tiny_model().train(False)
    strategy.save_model(model, None, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, again(input_ids=ids).logits)
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_a_save_does_not_read_what_it_wrote(
    make_strategy: MakeStrategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    file_entry = checksums.file_entry

    def noted(path: Path) -> checksums.FileEntry:
        read.append(path.name)
        return file_entry(path)

    monkeypatch.setattr("lightrft.checkpoints.manifest.file_entry", noted)
    strategy, model, _, _ = run = start(make_strategy)
    train(run, 0, 1)
    strategy.save_ckpt(model, tmp_path)
    assert "client_state.json" in read
    assert not {"model.safetensors", "optimizer.safetensors"} & set(read)
