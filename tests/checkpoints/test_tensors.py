from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightrft.checkpoints.checksums import CHUNK, FileEntry, checksums_match, file_entry, write_chunks
from lightrft.checkpoints.manifest import damage, flushed_entries, read_manifest
from lightrft.checkpoints.reading import Read
from lightrft.checkpoints.tensors import read_tensors, write_tensors
from lightrft.errors import CheckpointError

COMMON = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]
RARE = [torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint64]
SHAPES = st.lists(st.integers(0, 5), max_size=3)


def random_tensor(seed: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Any bits; a bool has two."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(0, dtype=dtype).element_size()
    bits = torch.randint(256, (*shape, size), generator=generator, dtype=torch.uint8)
    return (bits[..., 0] > 127) if dtype is torch.bool else bits.view(dtype).reshape(tuple(shape))


def bits(tensor: Tensor) -> tuple[str, list[int], bytes]:
    plain = tensor.detach().resolve_conj() if tensor.is_complex() else tensor.detach()
    size = tensor.element_size()
    flat = plain.resolve_neg().reshape(-1).clone()
    whole = torch.empty(tensor.numel() * size, dtype=torch.uint8)
    whole.view(tensor.dtype).copy_(flat)
    return str(tensor.dtype), list(tensor.shape), whole.numpy().tobytes()


@st.composite
def states(draw: st.DrawFn) -> dict[str, Tensor]:
    """Tensors of all kinds by name: views of each other, tied, turned, empty."""
    tensors: dict[str, Tensor] = {}
    for name in draw(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6), unique=True)):
        again = draw(st.booleans())
        if tensors and again:
            tensor = draw(st.sampled_from(list(tensors.values())))
        else:
            dtype = draw(st.sampled_from(COMMON + RARE))
            tensor = random_tensor(draw(st.integers(0, 99)), dtype, draw(SHAPES))
        kind = draw(st.sampled_from(["as it is", "turned", "part", "every other", "conjugate", "parameter", "wide"]))
        if kind == "turned":
            tensor = tensor.mT if tensor.ndim >= 2 else tensor
        elif kind == "part" and tensor.ndim:
            tensor = tensor[1:]
        elif kind == "every other" and tensor.ndim:
            tensor = tensor[::2]
        elif kind == "conjugate" and tensor.is_complex():
            tensor = draw(st.sampled_from([tensor.conj(), tensor.conj().imag]))
        elif kind == "parameter" and tensor.dtype.is_floating_point and tensor.is_leaf:
            tensor = torch.nn.Parameter(tensor)
        elif kind == "wide":
            tensor = tensor.expand(2, *tensor.shape)
        tensors[name] = tensor
    return tensors


EVERY_TIME = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@given(states())
@EVERY_TIME
def test_K1_K8_what_is_written_is_read_bitwise(tmp_path: Path, state: dict[str, Tensor]) -> None:
    file = tmp_path / "t.safetensors"
    entry = write_tensors(file, state)
    found = read_tensors(file)
    assert {name: bits(tensor) for name, tensor in found.named().items()} == {
        name: bits(tensor) for name, tensor in state.items()
    }
    assert entry == FileEntry(file.stat().st_size, hashlib.sha256(file.read_bytes()).hexdigest())
    with safe_open(file, "pt") as other:
        assert set(other.keys()) == found.tensors.keys()
        assert other.metadata()["format"] == "pt"
    common = {name for name, tensor in found.tensors.items() if tensor.dtype in COMMON}
    for name, tensor in load_file(file).items():
        if name in common:
            assert bits(tensor) == bits(state[name])


@given(states())
@EVERY_TIME
def test_K8_a_file_holds_no_memory_twice(tmp_path: Path, state: dict[str, Tensor]) -> None:
    file = tmp_path / "t.safetensors"
    again = {f"{name} again": tensor.detach() for name, tensor in state.items() if tensor.numel()}
    write_tensors(file, {**state, **again})
    found = read_tensors(file)
    assert not found.tensors.keys() & again.keys()
    assert again.keys() <= found.aliases.keys()
    header = int.from_bytes(file.read_bytes()[:8], "little")
    assert header % 8 == 0
    assert file.stat().st_size == 8 + header + sum(
        state[name].numel() * state[name].element_size() for name in found.tensors
    )


def test_K1_equals_what_safetensors_writes(tmp_path: Path) -> None:
    state = {str(dtype): random_tensor(3, dtype, (5, 3)) for dtype in COMMON}
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    write_tensors(ours, state)
    save_file(state, theirs)
    assert {name: bits(tensor) for name, tensor in load_file(ours).items()} == {
        name: bits(tensor) for name, tensor in load_file(theirs).items()
    }


def test_K1_files_written_by_safetensors_are_read(tmp_path: Path) -> None:
    state = {"b": random_tensor(1, torch.bool, (3,)), "a": random_tensor(2, torch.float64, (2, 2))}
    save_file(state, tmp_path / "t.safetensors")
    found = read_tensors(tmp_path / "t.safetensors")
    assert found.aliases == {}
    assert {name: bits(tensor) for name, tensor in found.tensors.items()} == {
        name: bits(tensor) for name, tensor in state.items()
    }


# --- read when their turn comes


@given(states(), st.randoms())
@EVERY_TIME
def test_K3_placeholders_are_read_once_in_the_order_of_the_file_on_every_rank(
    tmp_path: Path, state: dict[str, Tensor], random: object
) -> None:
    standing_for: dict[int, tuple[str, Tensor]] = {}
    placeholders: dict[str, Tensor] = {}
    for name, tensor in state.items():
        placeholders[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        standing_for[id(placeholders[name])] = (name, tensor)
    if placeholders:
        placeholders["tied"] = placeholders[next(iter(placeholders))]
    order: dict[str, list[str]] = {"writer": [], "other": []}

    def reader(rank: str) -> Read:
        def read(tensor: Tensor, /) -> Tensor:
            name, values = standing_for[id(tensor)]
            order[rank].append(name)
            return values

        return read

    file = tmp_path / "t.safetensors"
    write_tensors(file, placeholders, reader("writer"))
    assert write_tensors(None, placeholders, reader("other")) is None
    assert order["writer"] == order["other"]
    assert sorted(order["writer"]) == sorted(state)
    header = file.read_bytes()[8 : 8 + int.from_bytes(file.read_bytes()[:8], "little")]
    assert [name for name in json.loads(header) if name != "__metadata__"] == order["writer"]
    named = read_tensors(file).named()
    assert {name: bits(named[name]) for name in state} == {name: bits(tensor) for name, tensor in state.items()}
    if placeholders:
        assert named["tied"] is named[next(iter(placeholders))]


@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.zeros(2, dtype=torch.float64), torch.zeros(2, device="meta")])
def test_K4_a_reader_that_gives_something_else_is_refused(tmp_path: Path, wrong: Tensor) -> None:
    with pytest.raises(CheckpointError, match="'w'"):
        write_tensors(tmp_path / "t.safetensors", {"w": torch.zeros(2, device="meta")}, lambda tensor: wrong)


def test_K4_what_cannot_be_stored_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'w'.*dense"):
        write_tensors(tmp_path / "t.safetensors", {"w": torch.eye(2).to_sparse()})
    with pytest.raises(CheckpointError, match="__metadata__"):
        write_tensors(tmp_path / "t.safetensors", {"__metadata__": torch.eye(2)})


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_K4_what_a_reader_raises_goes_through(tmp_path: Path, fails_at: int) -> None:
    state = {str(number): torch.empty(CHUNK, dtype=torch.uint8, device="meta") for number in range(3)}
    seen: list[Tensor] = []

    def read(tensor: Tensor, /) -> Tensor:
        if len(seen) == fails_at:
            raise KeyError("gone")
        seen.append(tensor)
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    with pytest.raises(KeyError, match="gone"):
        write_tensors(tmp_path / "t.safetensors", state, read)


def run(code: str, *arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_K4_a_disk_that_is_full_is_an_error_at_every_size(tmp_path: Path) -> None:
    code = """
        import resource, sys, torch
        from pathlib import Path
        from lightrft.checkpoints.tensors import write_tensors
        for limit in (5, 1 << 20, 9 << 20, 20 << 20):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            try:
                write_tensors(Path(sys.argv[1]), {"a": torch.zeros(6 << 20)})
            except OSError as error:
                print(error.errno)
    """
    assert run(code, tmp_path / "t.safetensors").stdout.split() == ["27"] * 4  # EFBIG


def test_a_write_of_200_MB_needs_some_chunks_and_the_tensor_that_is_read(tmp_path: Path) -> None:
    code = """
        import ctypes, sys, torch
        from pathlib import Path
        from lightrft.checkpoints.tensors import write_tensors
        for option in (-1, -3):  # freed memory is given back at once: what is resident is what is alive
            ctypes.CDLL(None).mallopt(option, 65_536)
        status = lambda field: int(Path("/proc/self/status").read_text().partition(field)[2].split()[0]) * 1024
        holders = {str(i): torch.empty(5 << 20, device="meta") for i in range(8)}
        real = {"r" + str(i): torch.ones(1 << 20) for i in range(8)}
        values = lambda tensor: torch.ones(tensor.shape) if tensor.is_meta else tensor
        write_tensors(Path(sys.argv[1]), {"warm": torch.ones(5)})
        torch.ones(5 << 20).sum()
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS:")
        write_tensors(Path(sys.argv[1]), {**holders, **real}, values)
        print(status("VmHWM:") - before)
    """
    peak = int(run(code, tmp_path / "t.safetensors").stdout)
    assert (tmp_path / "t.safetensors").stat().st_size > 200e6
    assert peak < (20 + 5 * 8 + 10) * 2**20, f"{peak / 2**20:.0f} MiB"


def test_K4_a_thread_finishes_its_file_while_the_interpreter_ends(tmp_path: Path) -> None:
    code = """
        import sys, threading, time, torch
        from pathlib import Path
        from lightrft.checkpoints.tensors import read_tensors, write_tensors
        main = threading.main_thread()
        def save():
            main.join()
            write_tensors(Path(sys.argv[1]), {"a": torch.ones(5 << 20)})
        threading.Thread(target=save).start()
    """
    run(code, tmp_path / "t.safetensors")
    assert read_tensors(tmp_path / "t.safetensors").tensors["a"].sum() == 5 << 20


# --- checksums


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 5 * CHUNK + 7])
def test_K6_the_entry_of_a_writer_is_that_of_the_file(tmp_path: Path, size: int) -> None:
    file = tmp_path / "f"
    content = memoryview(os.urandom(size))
    given_out = 0

    def fill(chunk: memoryview, /) -> None:
        nonlocal given_out
        chunk[:] = content[given_out : given_out + len(chunk)]
        given_out += len(chunk)

    entry = write_chunks(file, size, fill)
    assert file.read_bytes() == content
    assert entry == file_entry(file)
    digests = [hashlib.sha256(content[at : at + CHUNK]).digest() for at in range(0, size, CHUNK)]
    if size <= CHUNK:
        assert entry == FileEntry(size, hashlib.sha256(content).hexdigest())
    else:
        assert entry == FileEntry(size, hashlib.sha256(b"".join(digests)).hexdigest(), CHUNK)
    assert checksums_match([(file, entry)]) == [True]
    whole = FileEntry(size, hashlib.sha256(content).hexdigest())
    assert checksums_match([(file, whole)]) == [True], "as format version 1 has it"


@pytest.mark.parametrize("at", [0, CHUNK - 1, CHUNK, 2 * CHUNK, 3 * CHUNK - 1])
def test_K6_a_flipped_bit_in_any_chunk_is_noticed(tmp_path: Path, at: int) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    content = bytearray(3 * CHUNK)
    good.write_bytes(content)
    content[at] ^= 1
    bad.write_bytes(content)
    entry = file_entry(good)
    gone = tmp_path / "gone"
    found = checksums_match([(good, entry), (bad, entry), (gone, entry), (good, entry)])
    assert [found[0], found[1], found[3]] == [True, False, True]
    assert isinstance(found[2], FileNotFoundError)


def test_K6_chunks_that_changed_places_are_noticed(tmp_path: Path) -> None:
    first, second = os.urandom(CHUNK), os.urandom(CHUNK)
    (tmp_path / "f").write_bytes(first + second)
    entry = file_entry(tmp_path / "f")
    (tmp_path / "f").write_bytes(second + first)
    assert checksums_match([(tmp_path / "f", entry)]) == [False]


def test_what_was_recorded_is_not_read_again(tmp_path: Path) -> None:
    entry = write_tensors(tmp_path / "t.safetensors", {"a": torch.ones(3)})
    assert entry is not None
    (tmp_path / "other").write_text("x")
    assert flushed_entries(tmp_path, {"t.safetensors": entry}) == flushed_entries(tmp_path)
    told = FileEntry(entry.size, "as told")
    assert flushed_entries(tmp_path, {"t.safetensors": told})["t.safetensors"] == told
    grown = FileEntry(entry.size - 1, "of less than is there")
    assert flushed_entries(tmp_path, {"t.safetensors": grown})["t.safetensors"] == entry


def manifest_file(directory: Path, version: object, entry: dict[str, object]) -> None:
    """A manifest as another version of this library, or somebody else, wrote it."""
    body: dict[str, object] = {"format": "lightrft-checkpoint", "format_version": version, "tag": "a"}
    body |= {"backend": "local", "world_size": 1, "step": 1, "committed_at": 1, "saved_on": "", "versions": {}}
    body |= {"extra": {}, "files": {"f": entry}}
    body["checksum"] = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (directory / "manifest.json").write_text(json.dumps(body))


def test_K6_manifests_of_format_version_1_are_read_and_verified(tmp_path: Path) -> None:
    content = os.urandom(2 * CHUNK + 1)
    (tmp_path / "f").write_bytes(content)
    manifest_file(tmp_path, 1, {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()})
    assert damage(tmp_path) == ()
    (tmp_path / "f").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert len(damage(tmp_path)) == 1
    assert damage(tmp_path, verify=False) == ()


@pytest.mark.parametrize("version", [0, 3, "1", None])
def test_K6_manifests_of_other_versions_are_refused(tmp_path: Path, version: object) -> None:
    manifest_file(tmp_path, version, {"size": 0, "sha256": ""})
    with pytest.raises(CheckpointError, match="format version"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        {"size": 3, "sha256": "", "chunk_size": 1},
        {"size": 3, "sha256": "", "chunk_size": -1},
        {"size": 3, "sha256": "", "chunk_size": "8"},
        {"size": "3", "sha256": ""},
        {"size": 3, "sha256": None},
    ],
)
def test_K9_a_manifest_with_impossible_entries_is_refused(tmp_path: Path, entry: dict[str, object]) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    manifest_file(tmp_path, 2, entry)
    assert "not a valid manifest" in damage(tmp_path)[0]
