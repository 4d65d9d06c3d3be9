"""Laws C1 to C7 of the configuration, and the field cases that are its business."""

from __future__ import annotations

import argparse
import copy
import json
import logging
import math
import pickle
import subprocess
import sys
import tomllib
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, make_dataclass
from enum import Enum, StrEnum
from functools import cached_property
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import get_args

import attrs
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from lightrft.errors import ConfigError, UnsupportedOperation
from lightrft.strategy.config import (
    DEFAULTS,
    AdvantageEstimator,
    EngineType,
    GradAccumDtype,
    KLEstimator,
    Owner,
    StrategyConfig,
    accumulated_gradient,
    config_summary,
    from_dict,
    group_of,
    owner_of,
    refuse_ignored,
    to_dict,
)
from lightrft.strategy.flags import dump_toml
from lightrft.strategy.structuring import nearest, structure

patient = settings(suppress_health_check=[HealthCheck.too_slow])
"""For generated configurations: how long that takes says something about the machine, not about the law."""

REFERENCE = {
    "seed": 42,
    "max_norm": 1.0,
    "micro_train_batch_size": 1,
    "train_batch_size": 128,
    "bf16": True,
    "zero_stage": 2,
    "fsdp": False,
    "fsdp_cpu_offload": False,
    "adam_offload": False,
    "zpg": 1,
    "grad_accum_dtype": None,
    "overlap_comm": False,
    "engine_type": "vllm",
    "engine_tp_size": 1,
    "enable_engine_sleep": False,
    "local_rank": -1,
    "sp_size": 1,
    "actor_learning_rate": 1e-5,
    "critic_learning_rate": 1e-5,
    "adam_betas": (0.9, 0.95),
    "l2": 0.0,
    "lr_warmup_ratio": 0.03,
    "critic_pretrain": False,
    "remote_rm_url": None,
    "pretrain_data": None,
    "fused_linear_logprob": False,
    "reward_running_norm": False,
    "reward_running_norm_minus_mean": False,
    "advantages_norm": False,
    "advantage_clip": 0.0,
    "reward_clip": 0.0,
    "micro_rollout_batch_size": 2,
    "n_samples_per_prompt": 8,
    "overlong_buffer": False,
    "overlong_buffer_len": 1024,
    "overlong_buffer_penalty_factor": 1.0,
    "dynamic_sampling": False,
    "advantage_estimator": "group_norm",
    "use_kl_loss": False,
    "kl_estimator": "k3",
    "mixed_mm_data": False,
    "use_mp_opt": False,
    "plot_every": -1,
    "use_tensorboard": False,
    "backend": None,
    "engine_mem_util": 0.5,
    "weight_sync_bucket_mb": 256,
    "log_dir": None,
    "check_ranks": False,
    "async_save": False,
    "verify_weight_sync": False,
}
"""The reference's fields and defaults, and ours: written out, so that a changed default is seen."""

BOOLS = sorted(name for name, default in REFERENCE.items() if isinstance(default, bool))
INTS = sorted(name for name, default in REFERENCE.items() if type(default) is int)
FLOATS = sorted(name for name, default in REFERENCE.items() if isinstance(default, float))
TEXTS = ["backend", "log_dir", "pretrain_data", "remote_rm_url"]
BELOW = {"seed": -1, "local_rank": -2, "plot_every": -2, "zero_stage": -1, "overlong_buffer_len": -1}
"""The largest whole number that is too small; 0 where it is not named."""
AT_MOST_ONE = {"lr_warmup_ratio", "engine_mem_util"}


def an_int(name: str) -> st.SearchStrategy[int]:
    high = {"seed": 2**32 - 1, "zero_stage": 3}.get(name, 10**6)
    return st.integers(BELOW.get(name, 0) + 1, high)


def a_float(name: str) -> st.SearchStrategy[float]:
    high = 1.0 if name in AT_MOST_ONE else 1e9
    return st.floats(0.0, high, exclude_min=name == "engine_mem_util")


NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
LEAVES = st.booleans() | NUMBERS | st.text(max_size=8)
EXTRA_NAMES = st.text("abcxyz_- .\"'ü\n", min_size=1, max_size=6).map("my".__add__)
EXTRAS = st.dictionaries(
    EXTRA_NAMES,
    st.recursive(
        LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_size=3,
)
BETA = st.floats(0.0, 1.0, exclude_max=True)
GIVEN: dict[str, st.SearchStrategy[object]] = {
    **{name: st.booleans() for name in BOOLS},
    **{name: an_int(name) for name in INTS},
    **{name: a_float(name) for name in FLOATS},
    **{name: st.none() | st.text(max_size=8) for name in TEXTS},
    "adam_betas": st.tuples(BETA, BETA),
    "engine_type": st.sampled_from(get_args(EngineType)),
    "advantage_estimator": st.sampled_from(get_args(AdvantageEstimator)),
    "kl_estimator": st.sampled_from(get_args(KLEstimator)),
    "grad_accum_dtype": st.none() | st.sampled_from(get_args(GradAccumDtype)),
}


@st.composite
def contents(draw: st.DrawFn) -> dict[str, object]:
    """Values for some of the fields: few at a time, since generating all of them is slow."""
    names = draw(st.lists(st.sampled_from(sorted(GIVEN)), unique=True, max_size=8))
    return {name: draw(GIVEN[name]) for name in names}


CONTENT = contents()


@st.composite
def configs(draw: st.DrawFn) -> StrategyConfig:
    """Any configuration, extra arguments included."""
    return quiet({**draw(CONTENT), **draw(EXTRAS)})


def quiet(args: object) -> StrategyConfig:
    """``from_args`` where a generated name may look like a misspelling."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return StrategyConfig.from_args(args)


constructed: Callable[..., StrategyConfig] = StrategyConfig
"""The constructor, for values that a type checker would refuse."""


class Holder:
    """Any object with attributes."""


def value_of(config: StrategyConfig, name: str) -> object:
    return getattr(config, name)


# ------------------------------------------------------------------------------------------------------------ C1


@patient
@given(CONTENT, EXTRAS)
def test_C1_the_same_content_from_anywhere_is_the_same_config(
    content: dict[str, object], extras: dict[str, object]
) -> None:
    args = {**content, **extras}
    expected = quiet(args)
    holder = Holder()
    holder.__dict__.update(args)
    sources: list[object] = [
        argparse.Namespace(**args),
        SimpleNamespace(**args),
        OrderedDict(reversed(args.items())),
        MappingProxyType(args),
        holder,
        expected,
        attrs.evolve(expected),
        {**content, "extra_args": extras},
    ]
    for source in sources:
        assert quiet(source) == expected
        assert hash(quiet(source)) == hash(expected)


@patient
@given(CONTENT, EXTRAS)
def test_C1_the_input_is_never_changed(content: dict[str, object], extras: dict[str, object]) -> None:
    args = argparse.Namespace(**{**content, **extras, "adam_betas": [0.5, 0.6]})
    before = copy.deepcopy(args)
    quiet(args)
    assert vars(args) == vars(before)


def test_C1_attributes_of_the_object_and_its_class_but_not_its_methods() -> None:
    class Base:
        seed = 1
        l2 = 0.5
        mine = "base"

    class Args(Base):
        seed = 2
        _private = 3

        def __init__(self) -> None:
            self.max_norm = 0.5

        @property
        def zero_stage(self) -> int:
            return 1

        @property
        def device(self) -> str:
            raise RuntimeError("a property that is no setting is not computed")

        @cached_property
        def slow(self) -> str:
            raise RuntimeError("nor is this")

        def method(self) -> None: ...
        @classmethod
        def of_class(cls) -> None: ...
        @staticmethod
        def static() -> None: ...

    config = StrategyConfig.from_args(Args())
    assert (config.seed, config.l2, config.max_norm, config.zero_stage) == (2, 0.5, 0.5, 1)
    assert dict(config.extra_args) == {"mine": "base"}
    assert StrategyConfig.from_args(Args).seed == 2


def test_C1_dataclasses_and_attrs_objects_slots_too() -> None:
    plain = make_dataclass("Plain", [("seed", int, 3), ("mine", str, "x")])
    slots = make_dataclass("Slots", [("seed", int), ("mine", str)], slots=True)
    ours = attrs.make_class("Ours", {"seed": attrs.field(), "mine": attrs.field()}, slots=True)
    expected = StrategyConfig(seed=3, extra_args={"mine": "x"})
    for source in (plain(), slots(3, "x"), ours(3, "x")):
        assert StrategyConfig.from_args(source) == expected


@pytest.mark.parametrize("nothing", [None, 3, "seed=3", [("seed", 3)], b"x", {1, 2}])
def test_C1_what_holds_no_settings_is_refused(nothing: object) -> None:
    with pytest.raises(ConfigError, match=r"give a mapping, an argparse\.Namespace or an object"):
        StrategyConfig.from_args(nothing)


def test_C1_dashes_are_underscores_and_twice_is_an_error() -> None:
    assert StrategyConfig.from_args({"train-batch-size": 64}).train_batch_size == 64
    with pytest.raises(ConfigError, match="given twice"):
        StrategyConfig.from_args({"train-batch-size": 64, "train_batch_size": 32})


# ------------------------------------------------------------------------------------------------------------ C2


def test_C2_every_field_of_the_reference_has_its_default() -> None:
    assert dict(DEFAULTS) == REFERENCE
    config = StrategyConfig()
    for name, default in REFERENCE.items():
        assert value_of(config, name) == default
        assert type(value_of(config, name)) is type(default)
    assert StrategyConfig.from_args({}) == config == StrategyConfig.from_args(argparse.Namespace())


class Sampler(Enum):
    K1 = "k1"


class Spelled(StrEnum):
    SGLANG = "sglang"


LOSSLESS: list[tuple[str, object, object]] = [
    *[
        ("seed", spelling, 8)
        for spelling in ("8", " 8 ", 8.0, "8.0", "+8", "8e0", np.int64(8), np.float32(8), np.uint8(8))
    ],
    ("train_batch_size", "1e3", 1000),
    ("train_batch_size", torch.tensor(64), 64),
    ("zero_stage", "3", 3),
    *[("l2", spelling, 1e-5) for spelling in ("1e-5", "0.00001", 1e-5, np.float64(1e-5), " 1E-5 ")],
    ("max_norm", 2, 2.0),
    ("max_norm", np.int32(2), 2.0),
    ("max_norm", np.float32(0.5), 0.5),
    ("max_norm", torch.tensor(0.5), 0.5),
    *[("bf16", no, False) for no in ("false", "False", "FALSE", "no", "0", "off", "n", 0, np.bool_(False), np.int8(0))],
    *[("fsdp", yes, True) for yes in ("true", "True", "yes", "1", "on", "y", 1, np.bool_(True))],
    *[("backend", none, None) for none in (None, "None", "none", "null")],
    *[("grad_accum_dtype", none, None) for none in (None, "None")],
    ("log_dir", Path("runs") / "a", str(Path("runs") / "a")),
    ("log_dir", np.str_("runs"), "runs"),
    ("kl_estimator", Sampler.K1, "k1"),
    ("engine_type", Spelled.SGLANG, "sglang"),
    ("adam_betas", "0.5,0.6", (0.5, 0.6)),
    ("adam_betas", "(0.5, 0.6)", (0.5, 0.6)),
    ("adam_betas", ["0.5", 0], (0.5, 0.0)),
]


@pytest.mark.parametrize(("name", "spelling", "meaning"), LOSSLESS, ids=lambda value: repr(value)[:30])
def test_C2_a_value_becomes_the_fields_type_where_nothing_is_lost(name: str, spelling: object, meaning: object) -> None:
    made = value_of(StrategyConfig.from_args({name: spelling}), name)
    assert made == meaning
    assert type(made) is type(meaning)
    # the constructor, and so attrs.evolve, takes the same values
    assert constructed(**{name: spelling}) == StrategyConfig.from_args({name: meaning})


LOSSY: list[tuple[str, object]] = [
    *[
        ("seed", bad)
        for bad in (8.5, "8.5", True, False, np.bool_(True), None, "eight", "", math.nan, math.inf, "inf", "1e99999999")
    ],
    *[("seed", bad) for bad in ("8.0000000000000000001", -1, 2**32, [8], np.array([8]), 8 + 0j)],
    *[("bf16", bad) for bad in ("maybe", 2, -1, 0.5, None, "", [1])],
    *[
        ("actor_learning_rate", bad)
        for bad in (math.nan, math.inf, "nan", "-inf", -1e-5, "fast", True, None, 2**53 + 1, 10**400)
    ],
    *[("zero_stage", bad) for bad in (4, -1, "4", 2.5)],
    *[("engine_type", bad) for bad in ("tgi", "", None, 0, "VLLM")],
    *[("kl_estimator", bad) for bad in ("k4", 3)],
    *[("advantage_estimator", bad) for bad in ("ppo", None)],
    *[("grad_accum_dtype", bad) for bad in ("fp8", "float32", 16)],
    *[
        ("adam_betas", bad)
        for bad in ((0.9, 0.9, 0.9), (0.9,), (), (0.9, 1.0), (-0.1, 0.9), (0.9, math.nan), 0.9, None, "0.9", {0.1, 0.2})
    ],
    *[("adam_betas", bad) for bad in ({"a": 0.1, "b": 0.2}, (True, 0.9), (None, 0.9), b"ab", iter([0.1, 0.2]))],
    *[("engine_mem_util", bad) for bad in (0, 0.0, 1.01, -0.5)],
    *[("lr_warmup_ratio", bad) for bad in (-0.01, 1.01)],
    *[("log_dir", bad) for bad in (3, True, ["a"])],
    *[("backend", bad) for bad in (0, False)],
    *[(name, BELOW.get(name, 0)) for name in INTS],
    *[(name, -0.5) for name in FLOATS],
]


@pytest.mark.parametrize(("name", "bad"), LOSSY, ids=lambda value: repr(value)[:30])
def test_C2_what_would_lose_something_is_refused_with_its_value_and_what_is_accepted(name: str, bad: object) -> None:
    with pytest.raises(ConfigError) as caught:
        StrategyConfig.from_args({name: bad})
    line = str(caught.value).splitlines()[1]
    assert line.startswith(f"  - {name}={repr(bad)[:20]}")
    assert ": accepted is " in line
    with pytest.raises(ConfigError):
        constructed(**{name: bad})


def test_C2_one_error_lists_every_bad_field() -> None:
    bad = {
        "seed": 8.5,
        "bf16": "maybe",
        "l2": math.nan,
        "zero_stage": 4,
        "engine_type": "tgi",
        "adam_betas": (0.9,) * 3,
    }
    attempts: list[Callable[[], StrategyConfig]] = [
        lambda: StrategyConfig.from_args(bad | {"max_norm": 3.0}),
        lambda: constructed(**bad),
    ]
    for attempt in attempts:
        with pytest.raises(ConfigError) as caught:
            attempt()
        text = str(caught.value)
        assert [line.split("=")[0] for line in text.splitlines()[1:]] == [
            f"  - {name}" for name in ("seed", "bf16", "zero_stage", "engine_type", "adam_betas", "l2")
        ]
        for accepted in ("a whole number", "true or false", "[0, 3]", "'vllm', 'sglang'", "2 values", "at least 0"):
            assert accepted in text
        assert "max_norm" not in text


@given(
    st.sampled_from(INTS),
    st.integers(-(10**40), 10**40),
    st.sampled_from([str, float, lambda n: f"{n}.0", lambda n: n]),
)
def test_C2_a_whole_number_is_kept_exactly_or_refused(name: str, number: int, spell: Callable[[int], object]) -> None:
    spelling = spell(number)
    number = int(spelling) if isinstance(spelling, float) else number
    low, high = BELOW.get(name, 0) + 1, {"seed": 2**32 - 1, "zero_stage": 3}.get(name, math.inf)
    # a whole number of 31 digits or more is taken as digits, not as 1e40 or with a point
    try:
        made = value_of(StrategyConfig.from_args({name: spelling}), name)
    except ConfigError:
        assert not low <= number <= high or (isinstance(spelling, str) and "." in spelling and number >= 10**30)
    else:
        assert type(made) is int
        assert made == number


@given(st.floats(), st.sampled_from(INTS))
def test_C2_no_fraction_becomes_a_whole_number(number: float, name: str) -> None:
    assume(not number.is_integer())
    for spelling in (number, repr(number), np.float64(number)):
        with pytest.raises(ConfigError):
            StrategyConfig.from_args({name: spelling})


@patient
@given(CONTENT)
def test_C2_values_written_as_text_mean_the_same(content: dict[str, object]) -> None:
    spelled = {name: value if isinstance(value, str) else str(value) for name, value in content.items()}
    assert StrategyConfig.from_args(spelled) == StrategyConfig.from_args(content)


class ListLike:
    """Neither list nor tuple nor Sequence, as the list types of configuration libraries are."""

    def __init__(self, *items: object) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[object]:
        return iter(self.items)


@pytest.mark.parametrize(
    "betas",
    [[0.5, 0.25], (0.5, 0.25), ListLike(0.5, "0.25"), np.array([0.5, 0.25]), torch.tensor([0.5, 0.25])],
    ids=lambda betas: type(betas).__name__,
)
def test_FC19_betas_are_exactly_a_tuple_of_floats(betas: object) -> None:
    for config in (StrategyConfig.from_args({"adam_betas": betas}), constructed(adam_betas=betas)):
        assert config.adam_betas == (0.5, 0.25)
        assert type(config.adam_betas) is tuple
        assert [type(beta) for beta in config.adam_betas] == [float, float]


# ------------------------------------------------------------------------------------------------------------ C3


@patient
@given(EXTRAS)
def test_C3_nothing_is_dropped(extras: dict[str, object]) -> None:
    config = quiet({**extras, "seed": 3})
    assert config.extra_args == extras
    for name, value in extras.items():
        assert config.get_extra_arg(name) == value
    assert config.get_extra_arg("absent") is None
    assert config.get_extra_arg("absent", 7) == 7


def test_C3_extra_args_and_other_names_are_joined() -> None:
    for args in ({"extra_args": {"one": 1}, "two": 2}, argparse.Namespace(extra_args={"one": 1}, two=2)):
        assert StrategyConfig.from_args(args).extra_args == {"one": 1, "two": 2}


def test_C3_names_that_begin_with_an_underscore_are_kept_too() -> None:
    for args in ({"_mine": 1}, argparse.Namespace(_mine=1)):
        assert StrategyConfig.from_args(args).extra_args == {"_mine": 1}


def test_C3_a_given_none_is_not_the_default() -> None:
    assert StrategyConfig.from_args({"mine": None}).get_extra_arg("mine", 5) is None


def test_FC17_a_misspelt_field_is_kept_and_its_warning_names_the_nearest() -> None:
    with pytest.warns(UserWarning, match=r"max_nrom \(did you mean max_norm\?\)") as caught:
        config = StrategyConfig.from_args({"max_nrom": 2.0})
    assert config.extra_args == {"max_nrom": 2.0}
    assert config.max_norm == 1.0
    assert caught[0].filename == __file__


def test_C3_one_warning_for_all_misspelt_names() -> None:
    with pytest.warns(UserWarning, match="No such setting") as caught:
        StrategyConfig.from_args(argparse.Namespace(train_batchsize=1, zgp=2, sede=3, other=4))
    (only,) = caught
    text = str(only.message)
    assert all(near in text for near in ("train_batch_size?", "zpg?", "seed?"))
    assert "other" not in text


@given(st.sampled_from(sorted(REFERENCE)), st.data())
def test_C3_two_swapped_letters_are_recognised(name: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(name) - 2))
    swapped = name[:at] + name[at + 1] + name[at] + name[at + 2 :]
    assume(swapped != name)
    assert nearest(swapped, set(REFERENCE)) == name


@pytest.mark.parametrize(
    "own",
    [
        "rollout_batch_size",
        "eval_n_samples_per_prompt",
        "lr_warmup_steps",
        "prompt_data",
        "reward_learning_rate",
        "max_len",
    ],
)
def test_C3_a_name_of_its_own_is_not_warned_about(own: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert StrategyConfig.from_args({own: 1}).extra_args == {own: 1}


def test_C3_extra_args_that_hold_a_field_or_no_mapping_are_refused() -> None:
    with pytest.raises(ConfigError, match="seed is a setting of its own"):
        StrategyConfig(extra_args={"seed": 3})
    with pytest.raises(ConfigError, match="extra_args"):
        StrategyConfig.from_args({"extra_args": [1]})
    with pytest.raises(ConfigError, match="a setting's name is text"):
        StrategyConfig.from_args({3: 1})


# ------------------------------------------------------------------------------------------------------------ C4


@patient
@given(configs(), configs())
def test_C4_equal_configs_have_equal_hashes_and_serve_as_keys(one: StrategyConfig, other: StrategyConfig) -> None:
    twin = from_dict(to_dict(one))
    assert twin == one
    assert hash(twin) == hash(one)
    assert {one: 1}[twin] == 1
    assert (one == other) == (to_dict(one) == to_dict(other))


@patient
@given(configs())
def test_C4_through_dict_json_toml_pickle_and_copy(config: StrategyConfig) -> None:
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
    assert from_dict(tomllib.loads(dump_toml(to_dict(config)))) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config
    assert attrs.evolve(config) == config
    assert structure(StrategyConfig, to_dict(config)) == config


@example({"mine": (1, [2, {"a": {3}}])})
@example({"mine": math.nan})
@example({"mine": np.arange(3)})
@example({"mine": SimpleNamespace(a=[1])})
@patient
@given(EXTRAS)
def test_C4_hashable_whatever_the_extra_arguments_hold(extras: dict[str, object]) -> None:
    one, twin = quiet(copy.deepcopy(extras)), quiet(copy.deepcopy(extras))
    assert one == twin
    assert hash(one) == hash(twin)
    assert quiet(to_dict(one)) == one


def test_C4_different_extra_arguments_are_different_configs() -> None:
    @dataclass
    class Own:
        items: list[int]

    pairs: list[tuple[object, object]] = [
        ([1, 2], [2, 1]),
        ({"a": 1}, {"a": 2}),
        ({1}, {2}),
        (np.arange(3), np.arange(4)),
        (torch.zeros(2), torch.ones(2)),
        (Own([1]), Own([2])),
        (SimpleNamespace(a=1), SimpleNamespace(a=2)),
        (math.nan, 1.0),
        (None, 0),
    ]
    for one, other in pairs:
        assert StrategyConfig(extra_args={"mine": one}) != StrategyConfig(extra_args={"mine": other})
    assert StrategyConfig(extra_args={"mine": None}) != StrategyConfig()


def test_C4_nan_equals_nan() -> None:
    one, twin = (StrategyConfig(extra_args={"mine": [float("nan")]}) for _ in range(2))
    assert one == twin
    assert hash(one) == hash(twin)
    assert from_dict(json.loads(json.dumps(to_dict(one)))) == one


def test_C4_frozen() -> None:
    config = StrategyConfig()
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        config.seed = 3  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]  # the point of the test


@dataclass
class Mutable:
    items: list[int]


def test_C4_FC20_nothing_is_shared_with_the_input_nor_with_another_config() -> None:
    given_args = {"mine": {"deep": [1, {2}], "array": np.zeros(2), "own": Mutable([1])}, "adam_betas": [0.5, 0.6]}
    before = copy.deepcopy(given_args)
    one, other = StrategyConfig.from_args(given_args), StrategyConfig.from_args(given_args)
    evolved = attrs.evolve(one, seed=3)
    mark = hash(one)

    def spoil(mine: object) -> None:
        assert isinstance(mine, dict)
        mine["deep"][1].add(9)
        mine["deep"].append(9)
        mine["array"][0] = 9
        mine["own"].items.append(9)
        mine["new"] = 9

    spoil(one.extra_args["mine"])
    spoil(one.get_extra_arg("mine"))
    to_dict_mine = to_dict(one)["extra_args"]
    assert isinstance(to_dict_mine, dict)
    spoil(to_dict_mine["mine"])
    assert repr(given_args) == repr(before)
    spoil(given_args["mine"])
    for config in (one, other, evolved):
        assert repr(config.extra_args["mine"]) == repr(before["mine"])
    assert one == other
    assert hash(one) == mark


# ------------------------------------------------------------------------------------------------------------ C5


@given(st.integers(1, 10**6), st.integers(1, 64), st.integers(1, 64))
def test_C5_a_whole_number_of_micro_batches_or_an_error_with_the_nearest_that_fits(
    batch: int, micro: int, world: int
) -> None:
    config = StrategyConfig(train_batch_size=batch, micro_train_batch_size=micro)
    unit = micro * world
    if batch % unit == 0:
        assert accumulated_gradient(config, world) * unit == batch
        return
    with pytest.raises(ConfigError) as caught:
        accumulated_gradient(config, world)
    text = str(caught.value)
    assert f"train_batch_size={batch} " in text
    assert f"micro_train_batch_size={micro} " in text
    assert f"world_size={world} " in text
    nearest_fit = int(text.rstrip(".").split()[-1])
    assert accumulated_gradient(attrs.evolve(config, train_batch_size=nearest_fit), world) >= 1
    assert abs(nearest_fit - batch) == min(abs(k * unit - batch) for k in (max(1, batch // unit), batch // unit + 1))


def test_C5_the_default_on_one_rank() -> None:
    assert accumulated_gradient(StrategyConfig(), 1) == 128


# ------------------------------------------------------------------------------------------------------------ C6


@patient
@given(configs())
def test_C6_the_summary_shows_every_field_and_marks_what_was_overridden(config: StrategyConfig) -> None:
    lines = config_summary(config).splitlines()
    heading = ""
    seen: dict[str, tuple[str, bool]] = {}
    for line in lines[1:]:
        if line == "  extra_args":
            break
        if line[2] not in " *":
            heading = line.strip()
        else:
            seen[line[4:].split()[0]] = (heading, line[2] == "*")
    assert seen == {name: (group_of(name), value_of(config, name) != default) for name, default in REFERENCE.items()}
    assert ("  extra_args" in lines) == bool(config.extra_args)


def test_C6_the_values_and_the_defaults_that_they_replace() -> None:
    text = config_summary(StrategyConfig(max_norm=2.0, extra_args={"mine": [1]}))
    assert "1 overridden" in text
    (line,) = [line for line in text.splitlines() if "max_norm" in line]
    assert line.split() == ["*", "max_norm", "2.0", "(default", "1.0)"]
    (extra,) = [line for line in text.splitlines() if "mine" in line]
    assert extra.split() == ["*", "mine", "[1]"]


def test_C6_only_rank_0_logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="lightrft")
    StrategyConfig().print_config_summary(rank=1)
    assert not caplog.records
    StrategyConfig().print_config_summary()
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.getMessage() == config_summary(StrategyConfig())


# ------------------------------------------------------------------------------------------------------------ C7


@patient
@given(CONTENT, st.sets(st.sampled_from(sorted(REFERENCE))), st.sampled_from(["backend", "trainer"]))
def test_C7_exactly_the_set_and_not_carried_fields_of_the_owner_are_refused(
    content: dict[str, object], carried: set[str], owner: str
) -> None:
    config = StrategyConfig.from_args(content)
    owners = {"backend": {"backend", "engine"}, "trainer": {"trainer"}}[owner]
    ignored = [
        name
        for name in DEFAULTS
        if value_of(config, name) != REFERENCE[name] and owner_of(name) in owners and name not in carried
    ]
    try:
        refuse_ignored(config, "some", carried, owner="trainer" if owner == "trainer" else "backend")
    except UnsupportedOperation as error:
        lines = [line for line in str(error).splitlines() if line.startswith("  - ")]
        assert lines == [
            f"  - {name}={value_of(config, name)!r} (the default is {REFERENCE[name]!r})" for name in ignored
        ]
    else:
        assert not ignored


def test_C7_the_error_names_field_value_and_backend() -> None:
    with pytest.raises(UnsupportedOperation, match=r"(?s)backend 'fsdp' does not carry out.*zpg=2 .*the default is 1"):
        refuse_ignored(StrategyConfig(zpg=2), "fsdp", frozenset({"sp_size"}))
    refuse_ignored(StrategyConfig(zpg=2), "deepspeed", frozenset({"zpg"}))
    with pytest.raises(UnsupportedOperation, match=r"(?s)^the reference trainer does not.*critic_pretrain=True"):
        refuse_ignored(StrategyConfig(critic_pretrain=True), "the reference trainer", frozenset(), owner="trainer")


def test_C7_every_field_has_an_owner() -> None:
    assert {owner_of(name) for name in REFERENCE} == set(get_args(Owner))
    for name in ("seed", "max_norm", "train_batch_size", "micro_train_batch_size", "backend", "fsdp", "engine_type"):
        assert owner_of(name) == "every backend"
    for name in ("zero_stage", "zpg", "sp_size", "bf16", "overlap_comm", "grad_accum_dtype"):
        assert owner_of(name) == "backend"


# ------------------------------------------------------------------------------------------- any attrs class; import


@attrs.frozen(kw_only=True)
class Inner:
    rate: float = 0.5
    names: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class Outer:
    steps: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    where: Path | None = None
    inner: Inner = attrs.field(factory=Inner)
    strategy: StrategyConfig = attrs.field(factory=StrategyConfig)
    needed: str


def test_any_attrs_class_is_structured_by_the_same_rules() -> None:
    content = {
        "steps": "3",
        "where": "a/b",
        "inner": {"rate": 1, "names": ["x"]},
        "strategy": {"seed": "7"},
        "needed": "y",
    }
    made = structure(Outer, content)
    assert made == Outer(
        steps=3, where=Path("a/b"), inner=Inner(rate=1.0, names=("x",)), strategy=StrategyConfig(seed=7), needed="y"
    )
    assert structure(Outer, made) is made


def test_any_attrs_class_lists_unknown_missing_and_bad_settings() -> None:
    with pytest.raises(ConfigError) as caught:
        structure(Outer, {"steps": 0, "whree": "a", "strategy": {"seed": "x", "l2": -1}, "needed": "y"})
    text = str(caught.value)
    for part in ("whree: no such setting; did you mean where?", "must be >= 1", "seed='x'", "l2=-1"):
        assert part in text
    with pytest.raises(ConfigError, match="needed: missing"):
        structure(Outer, {})


def test_importing_the_configuration_loads_no_heavy_library() -> None:
    probe = (
        "import sys, lightrft.strategy.config; lightrft.strategy.config.StrategyConfig();"
        "print(*({'torch', 'numpy', 'tyro', 'rich', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
