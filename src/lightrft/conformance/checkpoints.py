"""The laws of checkpoints (K) that are about ranks: a resumed run is the run."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler

from lightrft.conformance.law import Law, Make
from lightrft.conformance.parity import next_token_loss, qwen2
from lightrft.conformance.probes import batch, furthest, mlp, refused, same, update, weights
from lightrft.errors import CheckpointError
from lightrft.strategy.protocol import Strategy

Run = tuple[Strategy, nn.Module, Optimizer, LRScheduler]


@contextmanager
def shared_directory(strategy: Strategy) -> Iterator[Path]:
    """A new directory, the same on all ranks of a machine."""
    name = tempfile.mkdtemp() if strategy.is_rank_0() else ""
    letters = strategy.broadcast(torch.tensor([ord(letter) for letter in name], dtype=torch.int64))
    path = Path("".join(chr(int(letter)) for letter in letters))
    try:
        yield path
        strategy.barrier()
    finally:
        if strategy.is_rank_0():
            for file in sorted(path.rglob("*"), reverse=True):
                file.rmdir() if file.is_dir() else file.unlink()
            path.rmdir()


def begun(make: Make) -> Run:
    strategy = make(train_batch_size=2 * make().world_size, seed=3)
    with strategy.init_model_context():
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = strategy.create_optimizer(model, lr=1e-2, weight_decay=0.1)
    warm_up = LinearLR(optimizer, start_factor=0.1, total_iters=5)
    return strategy, *strategy.prepare((model, optimizer, warm_up))


def train(run: Run, first: int, steps: int) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """Parameters, learning rates and this rank's random draws after so many updates."""
    strategy, model, optimizer, scheduler = run
    rates = []
    for step in range(first * 2, (first + steps) * 2):
        generator = torch.Generator().manual_seed(100 * step + strategy.get_rank())
        x, y = torch.randn(3, 4, generator=generator), torch.randn(3, 2, generator=generator)
        strategy.backward(mse_loss(model(x), y), model, optimizer)
        strategy.optimizer_step(optimizer, model, scheduler)
        rates.append(float(optimizer.param_groups[0]["lr"]))
    draws = [float(torch.rand(())), float(np.random.rand()), random.random()]
    return weights(strategy, model), rates, draws


def resumed_run_is_the_run(make: Make) -> None:
    whole = begun(make)
    train(whole, 0, 3)
    expected = train(whole, 3, 3)
    start = begun(make)
    train(start, 0, 3)
    with shared_directory(start[0]) as directory:
        start[0].save_ckpt(start[1], directory, client_state={"seen": [1, 2], "mine": torch.ones(2)})
        torch.rand(5)  # the state of randomness is the checkpoint's, not this process's
        again = begun(make)
        path, client_state = again[0].load_ckpt(again[1], directory)
    assert Path(path).name == "step3"
    assert client_state["seen"] == [1, 2]
    found = train(again, 3, 3)
    assert same(found[0], expected[0]), f"parameters differ by {furthest(found[0], expected[0])}"
    assert found[1] == expected[1], "learning rates differ"
    assert found[2] == expected[2], "random numbers differ"
    draws = start[0].all_gather(found[2][0])
    assert len(set(draws)) == len(draws), "one rank's random state was given to all"


def weights_alone(make: Make) -> None:
    run = begun(make)
    train(run, 0, 2)
    with shared_directory(run[0]) as directory:
        run[0].save_ckpt(run[1], directory, tag="a")
        run[0].save_model(run[1], None, directory / "model")
        saved = weights(run[0], run[1])
        train(run, 2, 1)
        run[0].load_ckpt(run[1], directory, tag="a", load_module_only=True)
        assert same(saved, weights(run[0], run[1]))
        train(run, 3, 1)
        run[0].load_model(run[1], directory / "model", strict=True)
        assert same(saved, weights(run[0], run[1]))
        refused(CheckpointError, "nothing", lambda: run[0].load_ckpt(run[1], directory / "nothing"))
        refused(CheckpointError, "", lambda: run[0].save_ckpt(run[1], directory, tag="../x"))
        assert not (directory.parent / "x").exists()
        assert same(saved, weights(run[0], run[1]))


def loaders_go_on(make: Make, taken: int, shuffle: bool, drop_last: bool) -> None:
    """A loader that was made before ``load_ckpt`` goes on after the batches that were seen before ``save_ckpt``."""

    def begin() -> tuple[Strategy, nn.Module, Iterable[list[int]]]:
        strategy = make(train_batch_size=make().world_size, seed=5)
        # Without drop_last the last batches of an epoch may be rank 0's alone: here all ranks have as many.
        samples = list(range(10 * strategy.world_size + 1 if drop_last else 12 * strategy.world_size))
        loader = strategy.setup_dataloader(samples, 3, shuffle=shuffle, drop_last=drop_last, collate_fn=list)
        return strategy, strategy.prepare(mlp()), cast("Iterable[list[int]]", loader)

    strategy, model, loader = begin()
    batches = chain.from_iterable(iter(loader) for _ in range(9))
    for _ in range(taken):
        next(batches)
    with shared_directory(strategy) as directory:
        strategy.save_ckpt(model, directory, tag="here")
        expected = list(islice(batches, 5))
        again, other_model, other_loader = begin()
        again.load_ckpt(other_model, directory)
    found = list(islice(chain.from_iterable(iter(other_loader) for _ in range(9)), 5))
    assert found == expected, f"after {taken} batches came {found}, not {expected}"


def portable_start(make: Make) -> tuple[Strategy, nn.Module, Optimizer]:
    """A run without anything random in it, so that it means the same on any number of ranks."""
    strategy = make(train_batch_size=4, actor_learning_rate=1e-2)
    model = mlp()
    return strategy, *strategy.prepare((model, strategy.create_optimizer(model, lr=1e-2, weight_decay=0.1)))


def portable_save(make: Make, directory: Path) -> None:
    """Two updates, then a checkpoint."""
    strategy, model, optimizer = portable_start(make)
    for seed in range(2):
        update(strategy, model, optimizer, batch(4, seed))
    strategy.save_ckpt(model, directory, client_state={"seen": 8})


def portable_resume(make: Make, directory: Path) -> dict[str, Tensor]:
    """Parameters after three more updates."""
    strategy, model, optimizer = portable_start(make)
    _, client_state = strategy.load_ckpt(model, directory)
    assert client_state == {"seen": 8}
    for seed in range(2, 5):
        update(strategy, model, optimizer, batch(4, seed))
    return weights(strategy, model)


def saved_in_the_background(make: Make) -> None:
    """What is written is the state at the call, whatever is trained meanwhile; what goes wrong shows at the next save."""
    strategy = make(train_batch_size=4, async_save=True)
    model = mlp()
    model, optimizer = strategy.prepare((model, strategy.create_optimizer(model, lr=1e-2)))
    update(strategy, model, optimizer, batch(4))
    with shared_directory(strategy) as directory:
        saved = weights(strategy, model)
        strategy.save_ckpt(model, directory, tag="first")
        update(strategy, model, optimizer, batch(4, 2))
        strategy.load_ckpt(model, directory, tag="first")
        assert same(saved, weights(strategy, model))
        blocked = directory / "blocked"
        if strategy.is_rank_0():
            blocked.write_text("a file where a directory has to be")
        strategy.barrier()
        strategy.save_ckpt(model, directory, tag="blocked")
        refused(CheckpointError, "blocked", lambda: strategy.save_ckpt(model, directory, tag="second"))
        strategy.save_ckpt(model, directory, tag="third")
        strategy.load_ckpt(model, directory, tag="third")


def written_for_hugging_face(make: Make, adapters: bool) -> None:
    """``save_model`` writes what ``from_pretrained`` reads, tied weights once, adapters in a directory of their own."""
    from transformers import AutoModelForCausalLM

    strategy = make(train_batch_size=make().world_size)
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(strategy.get_rank()))
    base: nn.Module = qwen2()
    with shared_directory(strategy) as directory:
        if strategy.is_rank_0():
            cast("Saves", base).save_pretrained(str(directory / "base"))
        strategy.barrier()
        model = with_adapters(base) if adapters else base
        model, optimizer = strategy.prepare((model, strategy.create_optimizer(model, lr=1e-2)))
        for _ in range(2):
            strategy.backward(next_token_loss(model, ids), model, optimizer)
            assert strategy.optimizer_step(optimizer, model).applied
        trained = weights(strategy, model)
        strategy.save_model(model, None, directory / "model")
        model.eval()
        with torch.no_grad():
            expected = model(input_ids=ids).logits
        if adapters:
            from peft import PeftModel

            plain = AutoModelForCausalLM.from_pretrained(directory / "base")
            loaded: nn.Module = PeftModel.from_pretrained(plain, str(directory / "model"))
        else:
            loaded = AutoModelForCausalLM.from_pretrained(directory / "model")
            assert loaded.get_parameter("lm_head.weight") is loaded.get_parameter("model.embed_tokens.weight")
            found = {name: parameter.detach() for name, parameter in loaded.named_parameters()}
            assert same(found, trained), f"the weights differ by {furthest(found, trained)}"
        with torch.no_grad():
            difference = float((loaded.eval()(input_ids=ids).logits - expected).abs().max())
        assert difference <= 1e-5, f"the logits differ by {difference}"


class Saves(Protocol):
    """A Hugging Face model."""

    def save_pretrained(self, save_directory: str, /) -> object: ...


def with_adapters(model: nn.Module) -> nn.Module:
    """LoRA (Hu et al., arXiv:2106.09685) on the query projections, by PEFT."""
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        made: nn.Module = get_peft_model(cast(Any, model), config)
    return made


def tied_weights_stay_tied(make: Make) -> None:
    strategy = make(train_batch_size=make().world_size)
    model = qwen2()
    model, optimizer = strategy.prepare((model, strategy.create_optimizer(model, lr=1e-2)))
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(0))

    def step(model: nn.Module, optimizer: Optimizer) -> None:
        strategy.backward(next_token_loss(model, ids), model, optimizer)
        assert strategy.optimizer_step(optimizer, model).applied

    step(model, optimizer)
    with shared_directory(strategy) as directory:
        strategy.save_ckpt(model, directory)
        size = sum(file.stat().st_size for file in directory.rglob("model.safetensors"))
        again = qwen2(seed=1)
        again, other = strategy.prepare((again, strategy.create_optimizer(again, lr=1e-2)))
        strategy.load_ckpt(again, directory)
    held = sum(value.numel() * value.element_size() for value in weights(strategy, model).values())
    assert size <= held + 16_384, f"{size} bytes for parameters of {held}: a tied one was stored twice"
    step(model, optimizer)
    step(again, other)
    assert same(weights(strategy, model), weights(strategy, again))


LAWS = (
    Law("K1 K2 FC28 FC29: a resumed run is the run, each rank with its own random numbers", resumed_run_is_the_run),
    Law("K1: a data loader goes on where it was", loaders_go_on,
        {"taken": st.integers(0, 8), "shuffle": st.booleans(), "drop_last": st.booleans()}),
    Law("K2: a save in the background is of the moment it was asked for", saved_in_the_background),
    Law("K8: tied weights are stored once and stay tied", tied_weights_stay_tied),
    Law("K10 FC10: save_model writes what from_pretrained reads", written_for_hugging_face,
        {"adapters": st.booleans()}),
    Law("K6 K7 K9 FC31: weights alone, and what cannot be loaded or saved", weights_alone),
)  # fmt: skip
