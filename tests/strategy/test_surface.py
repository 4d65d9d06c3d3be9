"""The laws of the surface (S): names, order and defaults are those that existing trainers call."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable

import attrs
import pytest

from lightrft.strategy import protocol
from lightrft.strategy.record import Bound, StrategyRecord, bind, compose
from support import MakeStrategy

MISSING = inspect.Parameter.empty

# operation -> its parameters in positional order with their defaults; "*" and "**" as in Python.
SEEDS: dict[str, dict[str, object]] = {
    "setup_distributed": {"timeout": None, "num_gpu_per_node": 8},
    "is_rank_0": {},
    "get_rank": {},
    "print": {"*msg": MISSING},
    "barrier": {},
    "close": {},
    "all_reduce": {"data": MISSING, "op": "mean"},
    "all_gather": {"data": MISSING},
    "broadcast": {"data": MISSING, "src": 0},
    "create_optimizer": {"model": MISSING, "**kwargs": MISSING},
    "prepare": {"*models_or_model_optim_pairs": MISSING, "is_rlhf": False},
    "prepare_models_and_optimizers": {
        "actor": MISSING,
        "critic": MISSING,
        "reward_models": MISSING,
        "initial_model": MISSING,
        "args": MISSING,
        "max_steps": MISSING,
    },
    "backward": {"loss": MISSING, "model": MISSING, "optimizer": MISSING, "**kwargs": MISSING},
    "optimizer_step": {
        "optimizer": MISSING,
        "model": MISSING,
        "scheduler": None,
        "name": "model",
        "flush": False,
        "**kwargs": MISSING,
    },
    "get_grad_norm": {"model": MISSING},
    "unwrap_model": {"model": MISSING},
    "init_model_context": {"meta_init": False},
    "setup_dataloader": {
        "replay_buffer": MISSING,
        "batch_size": MISSING,
        "pin_memory": False,
        "shuffle": True,
        "collate_fn": None,
        "drop_last": True,
        "sampler": None,
        "consumed_samples": 0,
    },
    "moving_average": {"model": MISSING, "model_ema": MISSING, "beta": 0.992},
    "save_ckpt": {
        "model": MISSING,
        "save_dir": MISSING,
        "tag": None,
        "max_num": 3,
        "max_mem": 1000,
        "client_state": None,
        "save_latest": True,
        "optimizer": None,
        "scheduler": None,
    },
    "load_ckpt": {
        "model": MISSING,
        "load_dir": MISSING,
        "tag": None,
        "load_module_strict": True,
        "load_optimizer_states": True,
        "load_lr_scheduler_states": True,
        "load_module_only": False,
        "optimizer": None,
        "scheduler": None,
    },
    "save_model": {"model": MISSING, "tokenizer": MISSING, "output_dir": MISSING, "**kwargs": MISSING},
    "load_model": {"model": MISSING, "path": MISSING, "map_location": "cpu", "strict": False, "key_replace_fn": None},
    "maybe_offload_optimizer": {"optimizer": MISSING},
    "maybe_load_optimizer": {"optimizer": MISSING, "device": None},
    "offload_model": {"model": MISSING},
    "reload_model": {"model": MISSING},
    "report_memory": {"prefix": ""},
    "setup_inference_engine": {"args": MISSING, "engine_type": "vllm", "actor": None},
    "update_engine_weights": {"actor": MISSING},
    "maybe_sleep_inference_engine": {},
    "wakeup_inference_engine": {},
    "engine_generate_local": {"sampling_params": MISSING, "prompt_token_ids": None, "multi_modal_inputs": None},
    "gather_and_generate": {
        "sampling_params": MISSING,
        "all_prompt_token_ids": None,
        "all_prompts": None,
        "all_images": None,
        "sleep_engine": True,
        "images_num": None,
        "all_videos": None,
        "videos_num": None,
    },
}
FACTS = {
    "name", "config", "args", "seed", "max_norm", "micro_train_batch_size", "train_batch_size",
    "accumulated_gradient", "world_size", "local_rank", "device",
}  # fmt: skip


def parameters(function: Callable[..., object]) -> dict[str, object]:
    stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}
    signature = inspect.signature(function)
    return {stars.get(p.kind.name, "") + p.name: p.default for p in signature.parameters.values()}


def callback_of(operation: str) -> object:
    owner = next(c for c in inspect.getmro(protocol.Strategy) if operation in vars(c))
    callback = getattr(protocol, vars(owner)[operation].fget.__annotations__["return"])
    return parameters_without_self(callback)


def parameters_without_self(callback: type) -> dict[str, object]:
    found = parameters(callback.__call__)
    found.pop("self")
    return found


@pytest.mark.parametrize("operation", sorted(SEEDS))
def test_S3_every_backend_has_the_names_order_and_defaults(make_strategy: MakeStrategy, operation: str) -> None:
    assert list(parameters(getattr(make_strategy(), operation)).items()) == list(SEEDS[operation].items())


OVERLOADED = {"all_reduce", "all_gather", "broadcast", "prepare", "prepare_models_and_optimizers"}


@pytest.mark.parametrize("operation", sorted(SEEDS.keys() - OVERLOADED))
def test_S3_the_protocols_have_them_too(operation: str) -> None:
    assert callback_of(operation) == SEEDS[operation]


def test_S3_nothing_is_missing_and_nothing_is_beside() -> None:
    members = {
        name for cls in inspect.getmro(protocol.Strategy) for name, m in vars(cls).items() if isinstance(m, property)
    }
    assert members == SEEDS.keys() | FACTS
    fields = {field.name for field in attrs.fields(StrategyRecord)}
    properties = {name for name, member in vars(StrategyRecord).items() if isinstance(member, property)}
    assert fields | properties == SEEDS.keys() | FACTS


def test_a_record_is_frozen_and_any_operation_can_be_swapped(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy()
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        strategy.get_rank = lambda: 1  # type: ignore[misc]  # pyright: ignore
    swapped = compose(strategy, lambda s: attrs.evolve(s, get_rank=lambda: 7))
    assert swapped.get_rank() == 7
    assert strategy.get_rank() == 0


def scaled(factor: int, value: int, plus: int = 0) -> int:
    return factor * value + plus


def test_bound_is_equal_by_value_picklable_and_shows_its_signature() -> None:
    double = bind(scaled, 2)
    assert double(4, plus=1) == 9
    assert double == Bound(scaled, 2)
    assert double != bind(scaled, 3)
    assert str(inspect.signature(double)) == "(value: 'int', plus: 'int' = 0) -> 'int'"
    assert pickle.loads(pickle.dumps(Bound(abs, -3)))() == 3


def test_S1_a_backend_of_a_third_party_is_found_by_entry_point(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys
    from pathlib import Path

    from lightrft import get_strategy

    root = Path(str(tmp_path))
    (root / "theirs.py").write_text("from lightrft.backends.fake import build\n")
    info = root / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[lightrft.backends]\ntheirs = theirs:build\nlocal = theirs:build\n")
    monkeypatch.syspath_prepend(str(root))
    assert get_strategy({"backend": "theirs"}).name == "fake"
    assert get_strategy({"backend": "local"}).name == "local"  # a built-in name is not taken over
    sys.modules.pop("theirs")
