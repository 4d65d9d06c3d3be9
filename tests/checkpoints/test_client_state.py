from __future__ import annotations

import collections
import json
import math
import pickle
import struct
from collections import Counter, OrderedDict
from enum import IntEnum
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightrft.checkpoints.client_state import decode, encode, read_value, write_value
from lightrft.errors import CheckpointError

DTYPES = [
    *(
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.complex64,
        torch.complex128,
    ),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint64, torch.bool),
]


def same(one: object, other: object) -> bool:
    """Equal with equal types all the way down, floats and tensors by their bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float) and isinstance(other, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        raw_one, raw_other = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
        facts = [(t.shape, t.dtype, t.requires_grad) for t in (one, other)]
        return facts[0] == facts[1] and torch.equal(raw_one, raw_other)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, np.generic) and isinstance(other, np.generic):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return same(list(one), list(other)) and same(list(one.values()), list(other.values()))
    return one == other


def through_files(value: object, directory: Path) -> object:
    tensors: dict[str, Tensor] = {}
    write_value(directory / "value.json", encode(value, "client_state", tensors), tensors)
    return read_value(directory / "value.json")


def make_tensor(dtype: torch.dtype, shape: list[int], seed: int) -> Tensor:
    count = math.prod(shape)
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool().reshape(shape)
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (count * size,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


tensors_ = st.builds(
    make_tensor, st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3), st.integers(0, 2**31)
)


def make_array(dtype: str, shape: list[int], seed: int) -> object:
    return np.asarray(np.random.RandomState(seed).randint(0, 2, shape)).astype(dtype)


arrays = st.builds(
    make_array,
    st.sampled_from(["f8", "f4", "f2", "i8", "u2", "?", "c16", ">i4", "U5", "S3", "M8[s]"]),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 2**31),
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.floats().map(np.float64),
    st.integers(-128, 127).map(np.int8),
    st.booleans().map(np.bool_),
    st.text().map(np.str_),
    st.text(alphabet="abc/. ", max_size=9).map(Path),
)
keys = st.one_of(st.text(), st.integers(), st.sampled_from(["$", "a/b", "a", "__metadata__", "", "\ud800", "\0"]))
values = st.recursive(
    st.one_of(scalars, tensors_, arrays),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.dictionaries(keys, st.integers(), max_size=3).map(Counter),
    ),
    max_leaves=12,
)


@given(values)
@settings(max_examples=200, deadline=None)
def test_K1_FC30_any_client_state_comes_back_equal(tmp_path_factory: pytest.TempPathFactory, value: object) -> None:
    assert same(through_files(value, tmp_path_factory.mktemp("state")), value)


def test_FC30_the_case_as_reported(tmp_path: Path) -> None:
    value = {"nested": {"dict": {"a": (1, (2.5, None))}}, "np": np.float64(0.1), "path": Path("/data/x"), "none": None}
    assert same(through_files(value, tmp_path), value)


@pytest.mark.parametrize(
    "value",
    [
        10**5000,
        -(2**63),
        math.nan,
        -math.nan,
        struct.unpack(">d", bytes.fromhex("7ff0000000000123"))[0],
        -math.inf,
        -0.0,
        5e-324,
        0.1 + 0.2,
        "\ud800 lone",
        {"a/b": torch.ones(1), "a": {"b": torch.zeros(1), "b#": torch.ones(2)}},
        {"__metadata__": torch.ones(2), "": torch.ones(3), 1: torch.ones(4), "1": torch.ones(5)},
        {"$": "tuple", "items": [1]},
        {(1, ("a", None)): 1, True: 2, 2.5: 3, b"x": 4, None: 5},
        torch.ones(3, requires_grad=True),
        torch.nn.Parameter(torch.ones(2), requires_grad=False),
        torch.tensor(3.0, dtype=torch.bfloat16),
        torch.empty(0, 3),
        torch.arange(6.0).reshape(2, 3).T,
        torch.tensor([1 + 2j]).conj().resolve_conj(),
        np.array([], dtype="f4"),
        np.array(3),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.datetime64("2020-01-01"),
        np.bytes_(b"a\0"),
        Counter({3: 2, 2: 1}),
    ],
    ids=lambda value: f"{type(value).__name__}",
)
def test_K1_corner_values(tmp_path: Path, value: object) -> None:
    assert same(through_files(value, tmp_path), value)


def test_K1_views_of_one_memory_come_back_apart(tmp_path: Path) -> None:
    base = torch.arange(4.0)
    loaded = through_files({"a": base, "b": base, "c": base[1:]}, tmp_path)
    assert isinstance(loaded, dict)
    loaded["a"].zero_()
    assert loaded["b"].tolist() == [0, 1, 2, 3]
    assert loaded["c"].tolist() == [1, 2, 3]


class Color(IntEnum):
    RED = 1


class Pair(NamedTuple):
    a: int


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        raise AssertionError("this object must never be pickled")


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": [Lock()]}, "client_state['a'][0]"),
        ({"a": (1, {"b": Color.RED})}, "client_state['a'][1]['b']"),
        ({"a": Pair(1)}, "client_state['a']"),
        ({"a": {1, 2}}, "client_state['a']"),
        ({"a": lambda: None}, "client_state['a']"),
        ({"a": Evil()}, "client_state['a']"),
        ({"a": np.array([object()])}, "client_state['a']"),
        ({"a": np.ma.masked_array([1])}, "client_state['a']"),
        ({"a": torch.eye(2).to_sparse()}, "client_state['a']"),
        ({"a": torch.empty(2, device="meta")}, "client_state['a']"),
        ({"a": collections.defaultdict(list)}, "client_state['a']"),
        ({"a": {Path("x"): 1}}, "client_state['a']"),
    ],
)
def test_K9_FC30_what_cannot_come_back_is_refused_with_its_place(value: object, where: str) -> None:
    with pytest.raises(TypeError) as caught:
        encode(value, "client_state", {})
    assert str(caught.value).startswith(where + ":")


def test_FC30_a_cycle_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(TypeError, match="contains itself"):
        encode(loop, "client_state", {})


def test_FC30_the_deepest_that_is_saved_can_be_loaded(tmp_path: Path) -> None:
    deep: object = 1
    for level in range(100):
        deep = (deep,) if level % 2 else {1: deep}
    assert same(through_files(deep, tmp_path), deep)
    with pytest.raises(TypeError, match="deeper"):
        encode([deep], "client_state", {})


class Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.target,))


def test_K9_a_pickle_in_the_place_of_a_file_is_not_run(tmp_path: Path) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    through_files({"a": torch.ones(2)}, tmp_path)
    (tmp_path / "value.safetensors").write_bytes(bomb)
    with pytest.raises(CheckpointError, match=r"value\.safetensors"):
        read_value(tmp_path / "value.json")
    (tmp_path / "value.json").write_bytes(bomb)
    (tmp_path / "value.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"value\.json"):
        read_value(tmp_path / "value.json")
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    "tree",
    [
        {"$": "eval"},
        {"$": ["tuple"]},
        {"$": "tuple"},
        {"$": "int", "hex": 3},
        {"$": "float", "bits": "zz"},
        {"$": "float", "bits": "00"},
        {"$": "numpy", "dtype": "O", "base64": ""},
        {"$": "array", "dtype": "f8", "shape": [3], "key": "t"},
        {"$": "tensor", "key": "nowhere", "requires_grad": False, "parameter": False},
        {"$": "dict", "pairs": [[[1], 2]]},
    ],
)
def test_K9_malformed_values_are_errors_with_the_path(tmp_path: Path, tree: object) -> None:
    file = tmp_path / "value.json"
    write_value(file, {}, {"t": torch.ones(1)})
    file.write_text(json.dumps(tree))
    with pytest.raises(CheckpointError, match=r"value\.json"):
        read_value(file)


def test_K1_decoded_tensors_own_their_memory() -> None:
    stored = torch.ones(2)
    tensors: dict[str, Tensor] = {}
    loaded = decode(encode({"a": stored}, "state", tensors), tensors)
    assert isinstance(loaded, dict)
    loaded["a"].zero_()
    assert stored.tolist() == [1, 1]
