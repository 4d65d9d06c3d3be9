"""K4: killed at any moment of a save, a run leaves every checkpoint whole, and the next save leaves no debris.

The moments are seeded: half of them are the n-th call of the operating system, in its middle, half are delays.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from crash import crash_bodies
from crash.crash_bodies import MAX_NUM, Death, trained
from lightrft.checkpoints.layout import damage, find_checkpoint, list_checkpoints

pytestmark = pytest.mark.crash
KILLS = {"local": 200, "fsdp": 24}
LOADED_EVERY = 5
SEED = int(os.environ.get("LIGHTRFT_CRASH_SEED", "20"))


@pytest.mark.parametrize("backend", sorted(KILLS, reverse=True))
def test_K4_killed_at_any_moment(backend: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    root, kills = tmp_path / "ckpts", KILLS[backend]
    loader = Loader()
    in_save, loads = 0, 0
    command = [sys.executable, crash_bodies.__file__, backend, str(root), str(SEED), str(kills)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as killer:
        assert killer.stdin is not None
        assert killer.stdout is not None
        facts = json.loads(killer.stdout.readline())
        for number in range(kills):
            killer.stdin.write("\n")
            killer.stdin.flush()
            death = Death(**json.loads(killer.stdout.readline()))
            in_save += death.in_save
            check(root, death)
            if number % LOADED_EVERY == 0:
                loader.check(root)
                loads += 1
    assert killer.returncode == 0
    assert in_save >= kills // 2
    with capfd.disabled():
        sys.stdout.write(
            f"\n{backend}: {kills} kills, {in_save} in the middle of a save ({facts['events']} calls, "
            f"{1000 * facts['seconds']:.0f} ms each); {loads} times loaded\n"
        )


def check(root: Path, death: Death) -> None:
    """The directory holds what it did before the save, or that and the new checkpoint."""
    assert not [name for name in death.first_left if name.startswith((".tmp-", ".old-"))], death
    found = [found.manifest.tag for found in list_checkpoints(root)]
    directories = [path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")]
    assert sorted(found) == sorted(directories), death
    for tag in found:
        assert damage(root / tag) == (), death
    latest = (root / "latest").read_text()
    assert latest in found, death
    assert find_checkpoint(root) == root / latest
    others = [tag for tag in death.tags_before if tag != death.tag]
    committed = [death.tag, *others]
    if not death.in_save:
        assert found == committed[:MAX_NUM], death
        assert latest == death.tag, death
        return
    assert latest in (death.tag, death.latest_before), death
    if found != death.tags_before:
        assert found[:MAX_NUM] == committed[:MAX_NUM], death
        assert set(found) <= set(committed), death


class Loader:
    """A run of this process, into which checkpoints are loaded."""

    def __init__(self) -> None:
        self.strategy, self.model, self.optimizer = trained("local")

    def check(self, root: Path) -> None:
        """Parameters, moments and client_state are of one and the same save."""
        _, client_state = self.strategy.load_ckpt(self.model, root)
        value = client_state["value"]
        assert isinstance(value, int)
        assert all(bool(torch.all(parameter == value)) for parameter in self.model.parameters())
        assert all(bool(torch.all(state["exp_avg"] == value)) for state in self.optimizer.state.values())
