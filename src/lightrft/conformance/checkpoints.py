"""The laws of checkpoints (K) that are about ranks: a resumed run is the run."""

from __future__ import annotations

import os
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
from lightrft.conformance.probes import batch, furthest, mlp, refused, same, sgd, state_of, update, weights
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


def everything_comes_back(make: Make) -> None:
    """What a resumed run of this length would not miss: buffers, the count of updates, every kind of client state."""
    client_state = {
        "kinds": [2**53 + 1, 0.1, True, None, "é"],
        "nested": {"deep": {"tensor": torch.arange(3, dtype=torch.int16)}},
    }
    run = begun(make)
    train(run, 0, 3)
    strategy = run[0]
    mine = dict(strategy.unwrap_model(run[1]).named_buffers())
    saved = {name: (buffer.clone(), strategy.broadcast(buffer)) for name, buffer in mine.items()}
    with shared_directory(strategy) as directory:
        strategy.save_ckpt(run[1], directory, client_state=client_state)
        again = begun(make)
        _, found = again[0].load_ckpt(again[1], directory)
        for name, buffer in again[0].unwrap_model(again[1]).named_buffers():
            # Running statistics are each rank's own, or rank 0's.
            assert any(torch.equal(buffer, one) for one in saved[name]), f"the buffer {name} did not come back"
        nested = cast("dict[str, dict[str, Tensor]]", found.pop("nested"))
        assert found == {"kinds": client_state["kinds"]}, f"client_state came back as {found}"
        assert torch.equal(nested["deep"]["tensor"], torch.arange(3, dtype=torch.int16))
        assert nested["deep"]["tensor"].dtype is torch.int16
        train(again, 3, 1)
        again[0].save_ckpt(again[1], directory)
        assert Path(again[0].load_ckpt(again[1], directory)[0]).name == "step4", "updates are counted from elsewhere"


def checkpoints_in(strategy: Strategy, directory: Path) -> set[str]:
    """The tags that are there, when every rank is done with writing."""
    strategy.barrier()
    found = {path.name for path in directory.iterdir() if path.is_dir() and not path.name.startswith(".")}
    strategy.barrier()
    return found - {"notes"}


def rotation_goes_by_the_commit(make: Make) -> None:
    """Not by name, number or time of modification; a name that is saved again counts once; others' files stay."""
    strategy = make(train_batch_size=make().world_size)
    model = mlp()
    model, _ = strategy.prepare((model, sgd(model)))
    with shared_directory(strategy) as directory:
        if strategy.is_rank_0():
            (directory / "notes").mkdir()
        for tag, max_num, expected in (
            ("z", 0, {"z"}),
            ("a", 0, {"a", "z"}),
            ("step900", 1, {"step900"}),
            ("step900", 1, {"step900"}),
            ("step1000", 1, {"step1000"}),
            ("step10", 1, {"step10"}),
            ("step10", 2, {"step10"}),
            ("step10", 2, {"step10"}),
            ("b", 2, {"step10", "b"}),
            ("c", 2, {"b", "c"}),
            ("d", 3, {"b", "c", "d"}),
            ("e", 0, {"b", "c", "d", "e"}),
            ("f", 2, {"e", "f"}),
        ):
            strategy.save_ckpt(model, directory, tag=tag, max_num=max_num)
            found = checkpoints_in(strategy, directory)
            assert found == expected, f"after {tag} with max_num={max_num} there are {sorted(found)}"
            assert Path(strategy.load_ckpt(model, directory)[0]).name == tag, "the last one saved is not the latest"
            strategy.barrier()
            if strategy.is_rank_0():
                os.utime(directory / tag, (1, 1))  # as a copy or an unpacked archive may have it
        assert (directory / "notes").is_dir(), "what is no checkpoint was removed"


def a_failed_save_changes_nothing(make: Make) -> None:
    strategy = make(train_batch_size=make().world_size)
    model = mlp()
    model, _ = strategy.prepare((model, sgd(model)))
    with shared_directory(strategy) as directory:
        for tag in ("a", "b"):
            strategy.save_ckpt(model, directory, tag=tag, max_num=2)
        for tag in ("c", "a"):

            def save(tag: str = tag) -> None:
                strategy.save_ckpt(model, directory, tag=tag, max_num=1, client_state={"bad": object()})

            refused(TypeError, "bad", save)
            assert checkpoints_in(strategy, directory) == {"a", "b"}, "a save that failed has removed or left something"
            latest = Path(strategy.load_ckpt(model, directory)[0]).name
            assert latest == "b", f"after a save of {tag} that failed, the latest is {latest}"


def damage_is_seen(make: Make) -> None:
    strategy = make(train_batch_size=make().world_size)
    model = mlp()
    model, optimizer = strategy.prepare((model, strategy.create_optimizer(model, lr=1e-2)))
    with shared_directory(strategy) as directory:
        saved = {}
        for tag in ("old", "new"):
            update(strategy, model, optimizer, batch(strategy.train_batch_size))
            strategy.save_ckpt(model, directory, tag=tag)
            saved[tag] = weights(strategy, model)
        update(strategy, model, optimizer, batch(strategy.train_batch_size))
        now = weights(strategy, model)
        strategy.barrier()
        if strategy.is_rank_0():
            largest = max((file for file in (directory / "new").rglob("*") if file.is_file()), key=size_of)
            content = bytearray(largest.read_bytes())
            content[-3] ^= 1
            largest.write_bytes(content)
        strategy.barrier()
        refused(CheckpointError, "new", lambda: strategy.load_ckpt(model, directory, tag="new"))
        assert same(now, weights(strategy, model)), "a checkpoint that is damaged was loaded in part"
        path, _ = strategy.load_ckpt(model, directory)
        assert Path(path).name == "old", "the newest whole one was not taken"
        assert same(saved["old"], weights(strategy, model))


def size_of(file: Path) -> int:
    """In bytes."""
    return file.stat().st_size


def the_model_alone_or_what_fits(make: Make) -> None:
    run = begun(make)
    train(run, 0, 2)
    strategy, model, optimizer, scheduler = run
    with shared_directory(strategy) as directory:
        strategy.save_ckpt(model, directory, tag="a")
        saved = weights(strategy, model)
        train(run, 2, 1)
        before, epoch, draws = state_of(optimizer), scheduler.last_epoch, torch.get_rng_state()
        strategy.load_ckpt(model, directory, tag="a", load_module_only=True)
        assert same(saved, weights(strategy, model))
        assert state_of(optimizer) == before, "load_module_only touched the optimizer"
        assert scheduler.last_epoch == epoch, "load_module_only touched the scheduler"
        assert torch.equal(torch.get_rng_state(), draws), "load_module_only touched the state of randomness"

        other = strategy.prepare(
            nn.Sequential(nn.Linear(4, 8), nn.Identity(), nn.Identity(), nn.Identity(), nn.PReLU())
        )
        kept = weights(strategy, other)
        for name in ("3.weight", "4.weight"):  # one is missing in the model, the other in the checkpoint
            refused(CheckpointError, name, lambda: strategy.load_ckpt(other, directory, "a", load_module_only=True))
        assert same(kept, weights(strategy, other)), "a checkpoint of another model was loaded in part"
        strategy.load_ckpt(other, directory, "a", load_module_strict=False, load_module_only=True)
        found = weights(strategy, other)
        assert torch.equal(found["0.weight"], saved["0.weight"])
        assert torch.equal(found["4.weight"], kept["4.weight"])


def what_is_not_trained_is_saved(make: Make) -> None:
    """A reference model and a moving average are prepared alone, to be evaluated."""
    strategy = make(train_batch_size=make().world_size)
    model = mlp()
    model, optimizer = strategy.prepare((model, strategy.create_optimizer(model, lr=1e-2)))
    average, reference, other = (strategy.prepare(mlp(seed).eval()) for seed in (0, 1, 2))
    update(strategy, model, optimizer, batch(strategy.train_batch_size))
    strategy.moving_average(model, average, 0.5)
    with shared_directory(strategy) as directory:
        for what, kept in (("moving average", average), ("model that is only evaluated", reference)):
            saved = weights(strategy, kept)
            strategy.save_ckpt(kept, directory, tag="a")
            strategy.save_model(kept, None, directory / "model")
            strategy.load_ckpt(other, directory, tag="a")
            assert same(saved, weights(strategy, other)), f"a {what} did not come back from a checkpoint"
            strategy.load_model(other, directory / "model", strict=True)
            assert same(saved, weights(strategy, other)), f"a {what} did not come back from save_model"
    strategy.moving_average(reference, average, 0.0)
    assert same(weights(strategy, reference), weights(strategy, average)), "the average of what does not move is that"


LAWS = (
    Law("K1 K2 FC28 FC29: a resumed run is the run, each rank with its own random numbers", resumed_run_is_the_run,
        needs="checkpoints"),
    Law("K1: a data loader goes on where it was", loaders_go_on,
        {"taken": st.integers(0, 8), "shuffle": st.booleans(), "drop_last": st.booleans()},
        needs="checkpoints"),
    Law("K1: a model that is only evaluated, and a moving average, are saved and loaded", what_is_not_trained_is_saved,
        needs="checkpoints"),
    Law("K2: a save in the background is of the moment it was asked for", saved_in_the_background, needs="checkpoints"),
    Law("K8: tied weights are stored once and stay tied", tied_weights_stay_tied, needs="checkpoints"),
    Law("K10 FC10: save_model writes what from_pretrained reads", written_for_hugging_face,
        {"adapters": st.booleans()}, needs="checkpoints"),
    Law("K6 K7 K9 FC31: weights alone, and what cannot be loaded or saved", weights_alone, needs="checkpoints"),
    Law("K1 FC30: buffers, counts and client state come back", everything_comes_back, needs="checkpoints"),
    Law("K5 FC07 FC08 FC16 FC25 FC45: rotation goes by the order of commits", rotation_goes_by_the_commit,
        needs="checkpoints"),
    Law("K4 FC09 FC26: a save that fails changes nothing", a_failed_save_changes_nothing, needs="checkpoints"),
    Law("K6: damage is seen, and the newest whole one taken", damage_is_seen, needs="checkpoints"),
    Law("K7: the model alone, or what fits", the_model_alone_or_what_fits, needs="checkpoints"),
)  # fmt: skip
