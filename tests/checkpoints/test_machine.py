"""K4, K5, K6: a directory of checkpoints does what a list in plain Python does, whatever happens to it in whatever order."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import define, evolve, field, frozen
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from lightrft.checkpoints.layout import damage, find_checkpoint, list_checkpoints, write_checkpoint
from lightrft.errors import CheckpointError

TAGS = ("a", "b", "step9", "step10")
UNIT = 100
"""Bytes."""
AUDITED = ("open", "os.", "shutil.", "fcntl.", "ctypes.")
HIDDEN = (".tmp-", ".old-")


@frozen
class Saved:
    """What the model knows about a checkpoint."""

    tag: str
    number: int
    """Which save it is of: its content."""
    size: int
    whole: bool = True


@frozen
class Directory:
    """The plain-Python model: what is there, the last committed first."""

    order: tuple[Saved, ...] = ()
    latest: str | None = None
    foreign: frozenset[str] = frozenset()
    """Directories that hold no manifest of ours (any more)."""
    aside: int = 0
    """Those that were in the way of a checkpoint and have another name now."""

    def committed(self, new: Saved) -> Directory:
        return Directory(
            (new, *(old for old in self.order if old.tag != new.tag)),
            self.latest,
            self.foreign - {new.tag},
            self.aside + (new.tag in self.foreign),
        )

    def rotated(self, max_num: int, room: float) -> Directory:
        """``room``: bytes for all together. The newest and the one that ``latest`` names stay, and use it first."""
        if max_num <= 0:
            return self
        spared = {self.order[0].tag, self.latest}
        room -= sum(saved.size for saved in self.order if saved.tag in spared)
        kept = []
        for place, saved in enumerate(self.order):
            if saved.tag not in spared:
                room -= saved.size
                if place >= max_num or room < 0:
                    continue
            kept.append(saved)
        return evolve(self, order=tuple(kept))

    def wanted(self) -> Saved | None:
        """What a load without a tag takes."""
        whole = [saved for saved in self.order if saved.whole]
        return next((saved for saved in whole if saved.tag == self.latest), whole[0] if whole else None)


@frozen
class Save:
    """The arguments of a save."""

    tag: str
    units: int
    max_num: int
    max_units: int | None
    save_latest: bool


SAVES = st.builds(
    Save,
    tag=st.sampled_from(TAGS),
    units=st.integers(1, 4),
    max_num=st.integers(-1, 3),
    max_units=st.none() | st.integers(1, 9),
    save_latest=st.booleans(),
)


@define
class State:
    root: Path
    model: Directory = field(factory=Directory)
    number: int = 0
    debris: bool = False


class Machine(RuleBasedStateMachine):
    """What happens to a directory."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.state = State(root)

    def write(self, save: Save, before_end: Callable[[], None] = lambda: None) -> None:
        number = self.state.number

        def write(directory: Path) -> None:
            (directory / "weights.bin").write_bytes(content(number, save.units))
            before_end()

        write_checkpoint(
            self.state.root,
            save.tag,
            write,
            backend="local",
            world_size=1,
            step=number,
            max_num=save.max_num,
            max_mem=1000 if save.max_units is None else save.max_units * UNIT / 10**9,
            save_latest=save.save_latest,
        )

    def steps_of(self, save: Save) -> list[Directory]:
        """The directory before the save, when it is committed, with ``latest``, and when old ones are gone."""
        before = self.state.model
        committed = before.committed(Saved(save.tag, self.state.number, save.units * UNIT))
        named = evolve(committed, latest=save.tag) if save.save_latest else committed
        room = float("inf") if save.max_units is None else float(save.max_units * UNIT)
        return [before, committed, named, named.rotated(save.max_num, room)]

    @rule(save=SAVES)
    def saves(self, save: Save) -> None:
        self.state.number += 1
        *_, self.state.model = self.steps_of(save)
        self.write(save)
        self.state.debris = False

    @rule(save=SAVES, how=st.sampled_from([RuntimeError, OSError, KeyboardInterrupt]))
    def fails_to_save(self, save: Save, how: type[BaseException]) -> None:
        self.state.number += 1

        def fails() -> None:
            raise how("no")

        with pytest.raises(CheckpointError if how is OSError else how):
            self.write(save, fails)
        self.state.debris = False

    @rule(save=SAVES, moment=st.integers(1, 90))
    def is_killed_as_it_saves(self, save: Save, moment: int) -> None:
        """In the middle of its ``moment``-th call of the operating system."""
        self.state.number += 1
        pid = os.fork()
        if pid == 0:
            try:
                killed_at(moment)
                self.write(save)
                os._exit(0)
            finally:
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in (0, -signal.SIGKILL)
        self.state.model = self.after_death(self.steps_of(save), code == 0)
        self.state.debris = code != 0

    def after_death(self, steps: list[Directory], done: bool) -> Directory:
        """The step up to which the save came. Old checkpoints go one by one: it may have been between two of them."""
        before, committed, named, rotated = steps
        found = [listed.manifest.tag for listed in list_checkpoints(self.state.root)]
        number = {listed.manifest.tag: listed.manifest.step for listed in list_checkpoints(self.state.root)}
        if done:
            return rotated
        moved = len(list(self.state.root.glob("*.replaced-*"))) if self.state.root.is_dir() else 0
        if number.get(committed.order[0].tag) != committed.order[0].number:
            if moved > before.aside:  # what was in the way is gone, and nothing has come yet
                return evolve(before, foreign=before.foreign - {committed.order[0].tag}, aside=moved)
            return before
        model = named if latest_of(self.state.root) == named.latest else committed
        if set(found) != {saved.tag for saved in model.order}:
            assert {saved.tag for saved in rotated.order} <= set(found)
            model = evolve(named, order=tuple(saved for saved in named.order if saved.tag in found))
        return model

    @precondition(lambda self: bool(self.state.model.order))
    @rule(tag=st.sampled_from(TAGS), what=st.sampled_from(["flipped", "shortened", "gone"]))
    def damages_weights(self, tag: str, what: str) -> None:
        file = self.state.root / tag / "weights.bin"
        if not any(saved.tag == tag and saved.whole for saved in self.state.model.order):
            return
        data = file.read_bytes()
        if what == "gone":
            file.unlink()
        else:
            file.write_bytes(data[:-1] if what == "shortened" else bytes([data[0] ^ 1, *data[1:]]))
        self.state.model = evolve(
            self.state.model,
            order=tuple(evolve(saved, whole=saved.whole and saved.tag != tag) for saved in self.state.model.order),
        )

    @precondition(lambda self: bool(self.state.model.order))
    @rule(tag=st.sampled_from(TAGS), keep=st.integers(0, 50))
    def damages_manifest(self, tag: str, keep: int) -> None:
        """From then on it is nobody's, and no save removes it."""
        model = self.state.model
        if not any(saved.tag == tag for saved in model.order):
            return
        file = self.state.root / tag / "manifest.json"
        file.write_bytes(file.read_bytes()[:keep])
        order = tuple(saved for saved in model.order if saved.tag != tag)
        self.state.model = evolve(model, order=order, foreign=model.foreign | {tag})

    @precondition(lambda self: bool(self.state.model.order))
    @rule()
    def deletes_latest(self) -> None:
        (self.state.root / "latest").unlink(missing_ok=True)
        self.state.model = evolve(self.state.model, latest=None)

    @rule(tag=st.sampled_from(TAGS))
    def loads(self, tag: str) -> None:
        known = [saved for saved in self.state.model.order if saved.tag == tag and saved.whole]
        if known:
            self.holds(find_checkpoint(self.state.root, tag), known[0])
        else:
            with pytest.raises(CheckpointError, match=str(self.state.root)):
                find_checkpoint(self.state.root, tag)

    @rule()
    def loads_the_latest(self) -> None:
        wanted = self.state.model.wanted()
        if wanted is None:
            with pytest.raises(CheckpointError, match=str(self.state.root)):
                find_checkpoint(self.state.root)
        else:
            self.holds(find_checkpoint(self.state.root), wanted)

    def holds(self, path: Path, saved: Saved) -> None:
        assert (path / "weights.bin").read_bytes() == content(saved.number, saved.size // UNIT)

    @invariant()
    def is_as_the_model_says(self) -> None:
        root, model = self.state.root, self.state.model
        if not root.is_dir():
            assert model == Directory()
            return
        assert [found.manifest.tag for found in list_checkpoints(root)] == [saved.tag for saved in model.order]
        names = [path.name for path in root.iterdir()]
        shown = {name for name in names if not name.startswith(HIDDEN) and ".replaced-" not in name}
        assert shown == {saved.tag for saved in model.order} | model.foreign | ({"latest"} if model.latest else set())
        assert sum(".replaced-" in name for name in names) == model.aside
        assert latest_of(root) == model.latest
        assert self.state.debris or not any(name.startswith(HIDDEN) for name in names)
        for saved in model.order:
            assert (damage(root / saved.tag) == ()) == saved.whole


def content(number: int, units: int) -> bytes:
    return (f"{number} ".encode() * units * UNIT)[: units * UNIT]


def latest_of(root: Path) -> str | None:
    return (root / "latest").read_text() if (root / "latest").exists() else None


def killed_at(moment: int) -> None:
    """Kills this process at its ``moment``-th call of the operating system from now on."""
    left = moment

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event.startswith(AUDITED):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def test_K4_K5_K6_the_directory_is_as_the_model_says(tmp_path_factory: pytest.TempPathFactory) -> None:
    def machine() -> Machine:
        return Machine(tmp_path_factory.mktemp("machine") / "ckpts")

    run_state_machine_as_test(
        machine,  # type: ignore[arg-type]  # any factory will do
        settings=settings(max_examples=40, stateful_step_count=20, deadline=None),
    )
