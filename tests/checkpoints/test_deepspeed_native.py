"""What DeepSpeed itself wrote is read to the bit, and nothing of it is run (K3, K9)."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from attrs import frozen
from torch import Tensor, nn

from checkpoints.native_bodies import Tied, loaded_and_saved, save_natively
from lightrft.backends import deepspeed, fsdp, local
from lightrft.checkpoints.client_state import read_mapping
from lightrft.checkpoints.deepspeed_native import find_native, fp32_weights, optimizer_moments, updates
from lightrft.checkpoints.tensors import read_tensors
from lightrft.conformance.pool import RankPool, rank_pool
from lightrft.errors import CheckpointError
from lightrft.strategy.config import StrategyConfig
from lightrft.strategy.protocol import BuildStrategy
from lightrft.strategy.record import StrategyRecord

# ------------------------------------------------------------------------------------------- files made by hand: quick


class Net(nn.Module):
    """Ten and three elements: neither is a multiple of two ranks and their padding."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 2, bias=False)
        self.second = nn.Linear(3, 1, bias=False)


WEIGHTS = {"first.weight": torch.arange(10.0).reshape(2, 5) / 7, "second.weight": torch.arange(3.0).reshape(1, 3) / 3}
MOMENTS = {
    key: {name: tensor * factor for name, tensor in WEIGHTS.items()}
    for key, factor in (("exp_avg", 3), ("exp_avg_sq", 5))
}


def flats(tensors: Mapping[str, Tensor], stage: int, ranks: int) -> list[Tensor]:
    """What each rank has of the one group."""
    if stage < 3:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
        flat = torch.cat([flat, torch.zeros(-len(flat) % ranks)])
        return list(flat.chunk(ranks))
    padded = [torch.cat([t.reshape(-1), torch.full((-t.numel() % ranks,), 99.0)]) for t in tensors.values()]
    return [torch.cat([tensor.chunk(ranks)[rank] for tensor in padded]) for rank in range(ranks)]


def write_native(root: Path, stage: int = 2, ranks: int = 2, tag: str = "global_step7") -> Path:
    """As DeepSpeed lays it out."""
    source = root / tag
    source.mkdir(parents=True)
    (root / "latest").write_text(tag)
    shapes = [{name: tensor.shape for name, tensor in WEIGHTS.items()}]
    held = {name: torch.empty(0) if stage == 3 else tensor.bfloat16() for name, tensor in WEIGHTS.items()}
    model = {"module": held, "param_shapes": shapes, "shared_params": {}, "global_steps": 7, "note": "a client's"}
    for rank in range(ranks if stage == 3 else 1):
        prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
        torch.save(model, source / f"{prefix}mp_rank_00_model_states.pt")
    for rank in range(ranks):
        state = {key: flats(tensors, stage, ranks)[rank] for key, tensors in MOMENTS.items()} | {
            "step": torch.tensor(7.0)
        }
        stored = {
            "zero_stage": stage,
            "partition_count": ranks if stage == 3 else [ranks],
            ("fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"): [
                flats(WEIGHTS, stage, ranks)[rank]
            ],
            ("optimizer_state_dict" if stage == 3 else "base_optimizer_state"): {
                "state": {0: state},
                "param_groups": [],
            },
        }
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": stored}, source / name)
    return root


def same(found: Mapping[str, Tensor], told: Mapping[str, Tensor]) -> None:
    assert found.keys() == told.keys()
    for name, tensor in told.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def assert_read(directory: Path) -> None:
    same(fp32_weights(directory), WEIGHTS)
    moments = optimizer_moments(directory)
    for key, tensors in MOMENTS.items():
        same({name: entry[key] for name, entry in moments.items()}, tensors)
    assert {float(entry["step"]) for entry in moments.values()} == {7.0}
    assert updates(directory) == 7


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 11])
def test_K3_pieces_are_put_together_in_rank_order(tmp_path: Path, stage: int, ranks: int) -> None:
    write_native(tmp_path, stage, ranks)
    assert_read(tmp_path)
    assert_read(tmp_path / "global_step7")
    assert find_native(tmp_path) == find_native(tmp_path, "global_step7") == tmp_path / "global_step7"


@pytest.mark.parametrize("stage", [2, 3])
def test_K6_the_pieces_of_a_missing_rank_are_missed(tmp_path: Path, stage: int) -> None:
    write_native(tmp_path, stage)
    (tmp_path / "global_step7" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    for read in (fp32_weights, optimizer_moments):
        with pytest.raises(CheckpointError, match=rf"{tmp_path}/global_step7 holds the pieces of 1 ranks, and 2 wrote"):
            read(tmp_path)


def test_K9_a_pickle_that_would_run_code_is_refused_and_not_run(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
            return Path(tmp_path / "bang").mkdir, ()  # type: ignore[return-value]

    write_native(tmp_path / "run")
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"):
        bombed = shutil.copytree(tmp_path / "run", tmp_path / name)
        file = bombed / "global_step7" / name
        torch.save({**torch.load(file, weights_only=True), "extra": Bomb()}, file)
        with pytest.raises(CheckpointError, match=rf"{file} is not read: .*its code would have to run"):
            fp32_weights(bombed)
        assert not (tmp_path / "bang").exists()


@pytest.mark.parametrize("tag", ["../evil", "/evil", "", ".."])
def test_K9_FC31_a_tag_cannot_lead_out_of_the_directory(tmp_path: Path, tag: str) -> None:
    write_native(tmp_path / "evil", tag="x")
    write_native(tmp_path / "run")
    (tmp_path / "run" / "latest").write_text(tag)
    assert find_native(tmp_path / "run") is None
    assert find_native(tmp_path / "run", tag) is None
    with pytest.raises(CheckpointError, match="the tag"):
        fp32_weights(tmp_path / "run")


def test_K6_files_that_are_not_what_deepspeed_writes_are_named(tmp_path: Path) -> None:
    write_native(tmp_path / "run")
    file = tmp_path / "run" / "global_step7" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    whole = file.read_bytes()
    for content in (b"", whole[: len(whole) // 2], b"\x80\x04N."):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=str(file)):
            fp32_weights(tmp_path / "run")
    torch.save({"optimizer_state_dict": {"partition_count": [2]}}, file)
    with pytest.raises(CheckpointError, match=f"{file} is not as DeepSpeed writes it"):
        fp32_weights(tmp_path / "run")


def test_K9_other_parallelism_is_refused(tmp_path: Path) -> None:
    source = write_native(tmp_path) / "global_step7"
    shutil.copy(source / "mp_rank_00_model_states.pt", source / "mp_rank_01_model_states.pt")
    with pytest.raises(CheckpointError, match=r"tensor, pipeline or expert parallelism .mp_rank_01"):
        fp32_weights(tmp_path)


def test_what_is_no_deepspeed_directory_does_not_look_like_one(tmp_path: Path) -> None:
    assert find_native(tmp_path) is None
    assert find_native(tmp_path / "missing") is None
    write_native(tmp_path)
    assert find_native(tmp_path) is not None
    assert find_native(tmp_path, "other") is None
    (tmp_path / "global_step7" / "manifest.json").write_text("{}")
    assert find_native(tmp_path) is None


# ------------------------------------------------------------------------------------------------ into a running model


@pytest.fixture
def strategy() -> Iterator[StrategyRecord]:
    made = local.build(StrategyConfig.from_args({"backend": "local", "bf16": False}))
    yield made
    made.close()


@pytest.mark.parametrize("stage", [2, 3])
def test_K3_load_ckpt_takes_weights_and_moments(
    tmp_path: Path, strategy: StrategyRecord, caplog: pytest.LogCaptureFixture, stage: int
) -> None:
    write_native(tmp_path, stage)
    model = Net()
    optimizer = strategy.create_optimizer(model, lr=0.1)
    strategy.prepare((model, optimizer))
    with caplog.at_level(logging.INFO):
        path, client_state = strategy.load_ckpt(model, tmp_path, optimizer=optimizer)
    assert path == str(tmp_path / "global_step7")
    assert client_state == {}
    same({name: tensor.detach() for name, tensor in model.named_parameters()}, WEIGHTS)
    for name, parameter in model.named_parameters():
        for key, tensors in MOMENTS.items():
            assert torch.equal(optimizer.state[parameter][key], tensors[name])
        assert float(optimizer.state[parameter]["step"]) == 7.0
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert "restored the weights and the optimizer's state of 2 parameters; not restored:" in caplog.text
    strategy.save_ckpt(model, tmp_path / "ours", optimizer=optimizer)
    assert (tmp_path / "ours" / "latest").read_text() == "step7"


def test_K6_load_ckpt_changes_nothing_where_it_does_not_fit(tmp_path: Path, strategy: StrategyRecord) -> None:
    write_native(tmp_path)
    model = Net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match="a kind of Adam, the optimizer is SGD"):
        strategy.load_ckpt(model, tmp_path, optimizer=plain)
    model.register_buffer("more", torch.zeros(1))
    with pytest.raises(CheckpointError, match="missing in the checkpoint: more"):
        strategy.load_ckpt(model, tmp_path)
    same({name: model.state_dict()[name] for name in before}, before)
    assert not plain.state


def test_K6_our_own_checkpoint_goes_first(tmp_path: Path, strategy: StrategyRecord) -> None:
    """`latest` says which; a tag of ours is never taken for DeepSpeed's."""
    write_native(tmp_path)
    model = Net()
    strategy.save_ckpt(model, tmp_path, tag="ours")
    assert strategy.load_ckpt(model, tmp_path)[0] == str(tmp_path / "ours")
    assert strategy.load_ckpt(model, tmp_path, tag="global_step7")[0] == str(tmp_path / "global_step7")


# ---------------------------------------------------------------------------------------------- files of DeepSpeed's own


@frozen
class Native:
    """What DeepSpeed saved, and the values that it told at that moment."""

    stage: int
    ranks: int
    bf16: bool = False

    def __str__(self) -> str:
        return f"ZeRO{self.stage}-W{self.ranks}{'-bf16' if self.bf16 else ''}"


SAVED = [Native(stage, ranks) for stage in range(4) for ranks in (1, 2)] + [Native(2, 2, True), Native(3, 1, True)]


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    with ExitStack() as stack:
        yield {size: stack.enter_context(rank_pool(size, timeout=120.0)) for size in (1, 2)}


@pytest.mark.backends
@pytest.mark.parametrize("saved", SAVED, ids=str)
def test_K3_every_stage_of_deepspeed_is_read_to_the_bit(
    pools: dict[int, RankPool], tmp_path: Path, saved: Native
) -> None:
    told = pools[saved.ranks].run(save_natively, tmp_path, saved.stage, saved.bf16, 3, {"note": 1})[0]
    weights = fp32_weights(tmp_path)
    assert weights["head.weight"] is weights["embed.weight"]
    same(weights, {**told.weights, "head.weight": told.weights["embed.weight"]})
    if saved.bf16:  # the masters, not what the model computes with
        assert not torch.equal(weights["embed.weight"], weights["embed.weight"].bfloat16().float())
    moments = optimizer_moments(tmp_path)
    assert moments.keys() == told.moments.keys()
    assert bool(moments) is (saved.stage > 0)
    for name, entry in moments.items():
        assert entry["exp_avg"].any()
        assert float(entry.pop("step")) == 3.0
        same(entry, told.moments[name])


@pytest.mark.backends
@pytest.mark.parametrize(
    ("build", "ranks", "fields"),
    [(local.build, 1, {}), (fsdp.build, 2, {}), (deepspeed.build, 2, {"zero_stage": 3})],
    ids=["local", "fsdp-W2", "ZeRO3-W2"],
)
def test_K3_any_backend_goes_on_from_a_stage_2_engine(
    pools: dict[int, RankPool], tmp_path: Path, build: BuildStrategy, ranks: int, fields: dict[str, object]
) -> None:
    native, portable = tmp_path / "native", tmp_path / "portable"
    told = pools[2].run(save_natively, native, 2, False, 3, {})[0]
    said = pools[ranks].run(loaded_and_saved, build, fields, native, portable)[0]
    assert any("restored the weights and the optimizer's state of 4 parameters" in line for line in said), said
    assert (portable / "latest").read_text() == "step3"
    found = read_tensors(portable / "step3" / "model.safetensors").named()
    same(found, {**told.weights, "head.weight": told.weights["embed.weight"]})
    state = read_mapping(portable / "step3" / "optimizer.json")["state"]
    assert isinstance(state, dict)
    assert state.keys() == told.moments.keys()
    for name, entry in state.items():
        assert float(entry.pop("step")) == 3.0
        same(entry, told.moments[name])


@pytest.mark.backends
def test_K3_before_the_first_update_there_are_no_moments(pools: dict[int, RankPool], tmp_path: Path) -> None:
    pools[1].run(save_natively, tmp_path, 2, False, 0, {})
    assert optimizer_moments(tmp_path) == {}
    same(
        fp32_weights(tmp_path),
        {name: tensor.detach() for name, tensor in Tied().state_dict().items()},
    )
