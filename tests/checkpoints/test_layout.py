from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrft.checkpoints import layout
from lightrft.checkpoints.layout import (
    checked_tag,
    damage,
    find_checkpoint,
    keep_others_out,
    let_others_in,
    list_checkpoints,
    read_manifest,
    write_checkpoint,
)
from lightrft.errors import CheckpointError


def writes(text: str) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        (directory / "weights.bin").write_text(text)
        (directory / "sub").mkdir()
        (directory / "sub" / "more.bin").write_text(text * 2)

    return write


def save(
    root: Path,
    tag: str,
    text: str = "x",
    write: Callable[[Path], None] | None = None,
    max_num: int = 3,
    max_mem: float = 1000,
    save_latest: bool = True,
) -> Path:
    return write_checkpoint(
        root,
        tag,
        write or writes(text),
        backend="local",
        world_size=1,
        step=7,
        max_num=max_num,
        max_mem=max_mem,
        save_latest=save_latest,
        extra={"why": "test", 2: "b", 10: "a"},  # type: ignore[dict-item]  # what JSON turns into strings is no damage
    )


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def content(root: Path, tag: str) -> str:
    return (find_checkpoint(root, tag) / "weights.bin").read_text()


def flip(file: Path, position: int = 0) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(bytes(data))


EVIL = ["../x", "/abs", "a/../../b", "", "a\0b", "..", ".", ".hidden", "a/b", "a\\b", " ", "a\n", "latest", "x" * 300]


@pytest.mark.parametrize("tag", EVIL)
def test_K9_FC31_a_tag_that_leaves_the_directory_is_refused(tmp_path: Path, tag: str) -> None:
    root = tmp_path / "deep" / "ckpts"
    save(root, "good")
    before = sorted(map(str, tmp_path.rglob("*")))
    for refused in (checked_tag, lambda tag: save(root, tag), lambda tag: find_checkpoint(root, tag)):
        with pytest.raises(CheckpointError, match="tag"):
            refused(tag)
    assert sorted(map(str, tmp_path.rglob("*"))) == before


@given(st.text(max_size=12))
def test_K9_FC31_an_accepted_tag_is_a_direct_child(tag: str) -> None:
    try:
        checked_tag(tag)
    except CheckpointError:
        return
    assert os.path.normpath(os.path.join("/root", tag)) == f"/root/{tag}"
    assert os.path.dirname(f"/root/{tag}") == "/root"


def test_K9_FC31_an_evil_latest_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "ckpts"
    save(tmp_path, "x")
    save(root, "good")
    (root / "latest").write_text("../x")
    with pytest.raises(CheckpointError, match=r"latest.*'\.\./x'"):
        find_checkpoint(root)
    save(root, "b", max_num=1, save_latest=False)
    assert find_checkpoint(tmp_path, "x").exists()
    save(root, "c")
    assert find_checkpoint(root) == root / "c"


def test_K9_a_manifest_cannot_list_files_outside(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")

    for name in ("../../secret", str(tmp_path / "secret")):
        path = save(tmp_path / "c", "a")
        body = json.loads((path / "manifest.json").read_text())
        del body["checksum"]
        body["files"][name] = {"size": 1, "sha256": "00"}
        body["checksum"] = layout_digest(body)
        (path / "manifest.json").write_text(json.dumps(body))
        with pytest.raises(CheckpointError, match="outside"):
            read_manifest(path)


def layout_digest(body: dict[str, object]) -> str:
    from lightrft.checkpoints.manifest import _digest

    return _digest(body)


def test_K1_manifest_says_what_is_there(tmp_path: Path) -> None:
    path = save(tmp_path, "step7")
    manifest = read_manifest(path)
    assert path == tmp_path / "step7"
    assert (manifest.backend, manifest.world_size, manifest.step, manifest.tag) == ("local", 1, 7, "step7")
    assert set(manifest.files) == {"weights.bin", "sub/more.bin"}
    assert manifest.size == 3
    assert manifest.extra["why"] == "test"
    assert "python" in manifest.versions
    assert damage(path) == ()
    assert names(tmp_path) == ["latest", "step7"]
    assert (tmp_path / "latest").read_text() == "step7"


def test_K6_without_a_tag_latest_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, "a")
    save(tmp_path, "b", save_latest=False)
    assert find_checkpoint(tmp_path) == tmp_path / "a"
    assert not caplog.records


@pytest.mark.parametrize("harm", ["gone", "flipped", "truncated", "missing file", "no manifest", "manifest", "latest"])
def test_K6_a_latest_that_is_not_whole_falls_back(tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture) -> None:
    for tag in ("a", "b", "c", "d"):
        save(tmp_path, tag, text="content", max_num=0)
    flip(tmp_path / "c" / "weights.bin", 3)
    d = tmp_path / "d"
    if harm == "gone":
        shutil.rmtree(d)
    elif harm == "flipped":
        flip(d / "sub" / "more.bin", 5)
    elif harm == "truncated":
        (d / "weights.bin").write_text("con")
    elif harm == "missing file":
        (d / "weights.bin").unlink()
    elif harm == "no manifest":
        (d / "manifest.json").unlink()
    elif harm == "manifest":
        (d / "manifest.json").write_text((d / "manifest.json").read_text()[:-40])
    else:
        flip(d / "weights.bin")
        (tmp_path / "latest").unlink()
    assert find_checkpoint(tmp_path) == tmp_path / "b"
    assert "b, the newest whole" in caplog.text
    with pytest.raises(CheckpointError, match=str(d) if harm != "latest" else "checksum"):
        find_checkpoint(tmp_path, "d")


def test_K6_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    path = save(tmp_path, "a")
    for file in (path / "manifest.json", path / "weights.bin"):
        for position in range(len(file.read_bytes())):
            flip(file, position)
            assert damage(path), f"{file} at {position}"
            flip(file, position)
    assert not damage(path)


def test_K6_missing_and_foreign_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere.*no such directory"):
        find_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=f"no whole checkpoint in {tmp_path}"):
        find_checkpoint(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text('{"name": "a web app"}')
    save(tmp_path, "mine")
    with pytest.raises(CheckpointError, match=r"(?s)other.*not the manifest of a lightrft checkpoint.*mine"):
        find_checkpoint(tmp_path, "other")
    with pytest.raises(CheckpointError, match=r"ghost does not exist"):
        find_checkpoint(tmp_path, "ghost")


def test_K6_without_verify_only_sizes_are_read(tmp_path: Path) -> None:
    flip(save(tmp_path, "a") / "weights.bin")
    assert find_checkpoint(tmp_path, "a", verify=False) == tmp_path / "a"
    (tmp_path / "a" / "weights.bin").write_text("longer")
    with pytest.raises(CheckpointError, match="bytes"):
        find_checkpoint(tmp_path, "a", verify=False)


def test_K5_FC07_rotation_does_not_go_by_name(tmp_path: Path) -> None:
    save(tmp_path, "step900", max_num=1)
    save(tmp_path, "step1000", max_num=1)
    assert names(tmp_path) == ["latest", "step1000"]


def test_K5_FC08_a_higher_number_of_an_older_run_is_older(tmp_path: Path) -> None:
    save(tmp_path, "step1000")
    save(tmp_path, "step10", max_num=1)
    assert names(tmp_path) == ["latest", "step10"]
    assert find_checkpoint(tmp_path) == tmp_path / "step10"


def test_K5_FC09_never_more_than_max_num_and_a_failed_save_costs_nothing(tmp_path: Path) -> None:
    for number in range(6):
        save(tmp_path, f"s{number}")
        assert len(list_checkpoints(tmp_path)) == min(number + 1, 3)

    def fails(directory: Path) -> None:
        assert len(list_checkpoints(tmp_path)) == 3
        (directory / "half").write_text("h")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        save(tmp_path, "s6", write=fails)
    assert names(tmp_path) == ["latest", "s3", "s4", "s5"]
    assert find_checkpoint(tmp_path) == tmp_path / "s5"


def test_K5_FC16_max_num_1_keeps_one_whole(tmp_path: Path) -> None:
    save(tmp_path, "a", max_num=1)
    save(tmp_path, "b", max_num=1)
    assert find_checkpoint(tmp_path) == tmp_path / "b"
    assert names(tmp_path) == ["b", "latest"]


def test_K5_FC25_rotation_does_not_go_by_modification_time(tmp_path: Path) -> None:
    for tag in ("s1", "s2", "s3", "s4"):
        save(tmp_path, tag)
    os.utime(tmp_path / "s4", (0, 0))
    os.utime(tmp_path / "s4" / "manifest.json", (0, 0))
    save(tmp_path, "s5")
    assert names(tmp_path) == ["latest", "s3", "s4", "s5"]


@pytest.mark.parametrize("tag", ["A", "B"])
def test_K4_FC26_the_old_one_stays_if_the_writer_raises(tmp_path: Path, tag: str) -> None:
    save(tmp_path, "A", "old", max_num=1)

    def fails(directory: Path) -> None:
        (directory / "half").write_text("h")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CheckpointError, match=rf"{tmp_path}/{tag}.*No space left.*Free"):
        save(tmp_path, tag, write=fails, max_num=1)
    assert names(tmp_path) == ["A", "latest"]
    assert content(tmp_path, "A") == "old"


def test_K4_FC27_half_written_is_passed_over_and_can_be_saved_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, "s20")
    save(tmp_path, "s30")
    (tmp_path / "s30" / "manifest.json").unlink()
    assert find_checkpoint(tmp_path) == tmp_path / "s20"
    assert "s30" in caplog.text
    save(tmp_path, "s30", "new")
    assert find_checkpoint(tmp_path) == tmp_path / "s30"
    assert content(tmp_path, "s30") == "new"
    (aside,) = tmp_path.glob("s30.replaced-*")
    assert (aside / "weights.bin").read_text() == "x"


def test_K5_FC45_one_name_saved_five_times_counts_once(tmp_path: Path) -> None:
    for number in range(5):
        save(tmp_path, "a", f"v{number}", max_num=2)
    save(tmp_path, "b", max_num=2)
    assert names(tmp_path) == ["a", "b", "latest"]
    assert content(tmp_path, "a") == "v4"


def test_K5_a_tag_saved_again_is_the_newest(tmp_path: Path) -> None:
    for tag in ("a", "b", "a", "c"):
        save(tmp_path, tag, max_num=2)
    assert names(tmp_path) == ["a", "c", "latest"]


def test_K5_what_is_not_ours_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "manifest.json").write_text("{}")
    (tmp_path / ".tmp-mine").mkdir()
    (tmp_path / "file").write_text("f")
    shutil.copytree(save(tmp_path, "a"), tmp_path / "best")
    for tag in ("b", "c", "d"):
        save(tmp_path, tag, max_num=1)
    assert names(tmp_path) == [".tmp-mine", "best", "d", "data", "file", "latest"]
    assert find_checkpoint(tmp_path, "best") == tmp_path / "best"


def test_K5_latest_stays_even_if_it_is_old(tmp_path: Path) -> None:
    save(tmp_path, "a")
    for tag in ("b", "c", "d"):
        save(tmp_path, tag, max_num=1, save_latest=False)
    assert names(tmp_path) == ["a", "d", "latest"]
    assert find_checkpoint(tmp_path) == tmp_path / "a"


@pytest.mark.parametrize("max_num", [0, -1])
def test_K5_max_num_0_keeps_all(tmp_path: Path, max_num: int) -> None:
    for number in range(5):
        save(tmp_path, f"s{number}", max_num=max_num)
    assert len(list_checkpoints(tmp_path)) == 5


def test_K5_max_mem_bounds_the_bytes_in_gigabytes(tmp_path: Path) -> None:
    for number in range(4):
        save(tmp_path, f"s{number}", "x" * 100, max_num=9, max_mem=890 / 10**9)
    assert names(tmp_path) == ["latest", "s2", "s3"]
    save(tmp_path, "big", "x" * 1000, max_num=9, max_mem=890 / 10**9)
    assert names(tmp_path) == ["big", "latest"]


saves = st.tuples(st.sampled_from("abcdef"), st.integers(-1, 4), st.booleans(), st.booleans())


@given(st.lists(saves, max_size=9))
@settings(max_examples=25, deadline=None)
def test_K4_K5_as_a_plain_model_of_the_directory(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, bool, bool]]
) -> None:
    root = tmp_path_factory.mktemp("root")
    order: list[str] = []
    latest = None

    def raises(directory: Path) -> None:
        raise RuntimeError

    for tag, max_num, save_latest, fails in steps:
        if fails:
            with pytest.raises(RuntimeError):
                save(root, tag, write=raises, max_num=max_num)
        else:
            save(root, tag, max_num=max_num, save_latest=save_latest)
            order = [tag, *(other for other in order if other != tag)]
            latest = tag if save_latest else latest
            if max_num > 0:
                order = [other for place, other in enumerate(order) if place < max_num or other in (tag, latest)]
        assert [found.manifest.tag for found in list_checkpoints(root)] == order
        if order:
            assert find_checkpoint(root).name == (latest or order[0])
    assert names(root) == sorted([*order, *(["latest"] if latest else [])])


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from lightrft.checkpoints import layout

    def write(directory):
        (directory / "weights.bin").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)

    layout.write_checkpoint(Path(sys.argv[1]), "a", write, backend="local", world_size=1, step=1)
"""


def test_K4_debris_of_a_killed_save_goes_with_the_next_save_only(tmp_path: Path) -> None:
    save(tmp_path, "a", "old")
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)], check=False)
    assert result.returncode == -signal.SIGKILL
    assert len(names(tmp_path)) == 3
    assert find_checkpoint(tmp_path) == tmp_path / "a"
    assert len(names(tmp_path)) == 3, "a load removes nothing"
    save(tmp_path, "b")
    assert names(tmp_path) == ["a", "b", "latest"]


def test_K4_a_save_in_progress_is_not_debris(tmp_path: Path) -> None:
    def saves_another(directory: Path) -> None:
        (directory / "weights.bin").write_text("outer")
        save(tmp_path, "inner")
        assert (directory / "weights.bin").exists()

    save(tmp_path, "outer", write=saves_another)
    assert content(tmp_path, "outer") == "outer"
    assert names(tmp_path) == ["inner", "latest", "outer"]


class Killed(BaseException):
    pass


def test_K4_a_tag_is_replaced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before or after any single call that changes names, the tag holds the old or the new checkpoint, whole."""
    calls = ("rename", "replace", "rmdir", "unlink", "fsync")
    for swap in (layout._swap, lambda one, other: False):
        for moment in range(60):
            root = tmp_path / f"{moment}-{swap is layout._swap}"
            save(root, "a", "old")
            left = moment

            def dies(call: Callable[..., object]) -> Callable[..., object]:
                def dying(*args: object, **kwargs: object) -> object:
                    nonlocal left
                    left -= 1
                    if left < 0:
                        raise Killed
                    return call(*args, **kwargs)

                return dying

            with monkeypatch.context() as patch:
                patch.setattr(layout, "_swap", dies(swap))
                for name in calls:
                    patch.setattr(os, name, dies(getattr(os, name)))
                try:
                    save(root, "a", "new")
                    done = True
                except Killed:
                    done = False
            assert content(root, "a") in (("new",) if done else ("old", "new"))
            assert find_checkpoint(root).name in ("a", *[path.name for path in root.glob(".old-*")])
            save(root, "b")
            assert names(root) == ["a", "b", "latest"]
            if done:
                break
        else:
            pytest.fail("the save never got through")


def test_K4_latest_is_replaced_not_overwritten(tmp_path: Path) -> None:
    """A crash between truncation and write would leave it empty: too short a moment for a test that kills."""
    save(tmp_path, "a")
    with (tmp_path / "latest").open() as before:
        save(tmp_path, "b")
        assert before.read() == "a"
    assert (tmp_path / "latest").read_text() == "b"


def test_K4_a_directory_that_cannot_be_written_is_an_error_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("f")
    with pytest.raises(CheckpointError, match=f"{tmp_path}/file/a"):
        save(tmp_path / "file", "a")
    with pytest.raises(CheckpointError, match="a file or link has that name"):
        save(tmp_path, "file")
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match="a file or link has that name"):
        save(tmp_path, "link")


def test_K1_layout_needs_no_torch() -> None:
    code = "import sys, lightrft.checkpoints.layout; assert not {'torch', 'numpy', 'safetensors'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


SAVES = """
    import os, sys
    from lightrft.checkpoints.layout import keep_others_out

    keep_others_out(sys.argv[1], {})
    print("mine", flush=True)
    sys.stdin.read()
"""


def another_run(root: Path) -> subprocess.Popen[str]:
    """A process that wants to save into ``root``, and lives until its stdin is closed."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SAVES), str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_K4_a_second_run_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    held: dict[Path, int] = {}
    with another_run(tmp_path / "new") as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "mine\n"
        for _ in range(2):
            with pytest.raises(
                CheckpointError, match=rf"{tmp_path}/new: another run saves there, process {first.pid} on \S+\. W"
            ):
                keep_others_out(tmp_path / "new", held)
        assert held == {}
        keep_others_out(tmp_path / "other", held)
        first.kill()
    keep_others_out(tmp_path / "new", held)
    assert sorted(path.name for path in held) == ["new", "other"]
    let_others_in(held)


def test_K4_a_run_keeps_others_out_until_it_lets_them_in(tmp_path: Path) -> None:
    held: dict[Path, int] = {}
    keep_others_out(tmp_path, held)
    save(tmp_path, "a")
    keep_others_out(tmp_path, held)
    _, said = another_run(tmp_path).communicate()
    assert f"another run saves there, process {os.getpid()} on" in said
    let_others_in(held)
    assert held == {}
    assert another_run(tmp_path).communicate() == ("mine\n", "")


def test_K4_the_lock_is_of_the_process_not_of_a_strategy(tmp_path: Path) -> None:
    one: dict[Path, int] = {}
    other: dict[Path, int] = {}
    keep_others_out(tmp_path, one)
    keep_others_out(tmp_path / "." / "", other)
    let_others_in(other)
    keep_others_out(tmp_path, one)
    assert "another run" in another_run(tmp_path).communicate()[1], "locked again by the next save"
    shutil.rmtree(tmp_path)
    keep_others_out(tmp_path, one)
    assert "another run" in another_run(tmp_path).communicate()[1], "it is the new file that is locked"
    let_others_in(one)


def test_K4_a_fork_does_not_keep_the_lock_of_a_dead_run(tmp_path: Path) -> None:
    """A worker of a data loader may outlive a run by some time."""
    code = textwrap.dedent(SAVES).replace("sys.stdin.read()", "os.fork() or sys.stdin.read()")
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "mine\n"
        worker.wait()
        assert another_run(tmp_path).communicate() == ("mine\n", "")


def test_K4_without_locks_a_run_goes_on_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    held: dict[Path, int] = {}
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "lockf", fails)
        keep_others_out(tmp_path, held)
    assert f"{tmp_path} cannot be locked (No locks available)" in caplog.text
    let_others_in(held)


def test_K9_a_lock_file_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("p")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(CheckpointError, match=f"{tmp_path}/root.*lock"):
        keep_others_out(tmp_path / "root", {})
    assert (tmp_path / "precious").read_text() == "p"
