"""Which process of how many this is: the only place that reads launcher variables (W1, W2)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from attrs import frozen

from lightrft.errors import ConfigError

LAUNCHERS: Mapping[str, Mapping[str, str]] = {
    "torchrun": {"rank": "RANK", "world_size": "WORLD_SIZE", "local_rank": "LOCAL_RANK"},
    "Slurm": {"rank": "SLURM_PROCID", "world_size": "SLURM_NTASKS", "local_rank": "SLURM_LOCALID"},
}


CHECK_RANKS = "LIGHTRFT_CHECK_RANKS"
"""The variable that turns ``check_ranks`` on without a change of the program."""
SLURM_PORTS = 20_000
"""Where a job step's port comes from: jobs that share a node get different ones."""


@frozen
class World:
    """This process among ``world_size``; ``local_rank`` counts within the node."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    address: str | None = None
    """``host:port`` where the ranks meet; None where a process is alone and no launcher started it."""


def discover(environ: Mapping[str, str] | None = None, local_rank: int = -1) -> World:
    """The world that the launcher describes; alone when no launcher variable is set.

    ``local_rank`` >= 0, as DeepSpeed's launcher passes it on the command line, goes before the environment. Raises
    ``ConfigError`` for a half-set environment, or numbers that cannot be. Nothing is opened and nothing is changed.
    """
    environ = os.environ if environ is None else environ
    for launcher, names in LAUNCHERS.items():
        # Slurm sets its variables in an interactive shell too, where one process is meant: only a step has PROCID.
        if launcher == "Slurm" and "SLURM_PROCID" not in environ:
            continue
        found = {key: environ[name] for key, name in names.items() if name in environ}
        if not found:
            continue
        lacking = [names[key] for key in ("rank", "world_size") if key not in found]
        if lacking:
            present = ", ".join(names[key] for key in found)
            raise ConfigError(
                f"the environment of a launcher is half set: {present} without {', '.join(lacking)}. "
                f"Start with torchrun, set the rest, or unset what is there to run one process."
            )
        numbers = {key: _whole(names[key], text) for key, text in found.items()}
        rank, world_size = numbers["rank"], numbers["world_size"]
        if world_size < 1 or not 0 <= rank < world_size:
            raise ConfigError(
                f"{names['rank']}={rank} and {names['world_size']}={world_size} do not fit: ranks count from 0 to "
                f"{names['world_size']} - 1. Start all processes with one launcher."
            )
        place = local_rank if local_rank >= 0 else numbers.get("local_rank", 0)
        return World(rank, world_size, place, meeting_place(environ, launcher, world_size))
    return World(local_rank=max(local_rank, 0))


def ranks_are_to_be_checked(environ: Mapping[str, str] | None = None) -> bool:
    """Whether ``LIGHTRFT_CHECK_RANKS`` is on. Raises ``ConfigError`` when it is neither on nor off."""
    environ = os.environ if environ is None else environ
    text = environ.get(CHECK_RANKS, "0")
    if text.lower() not in ("", "0", "1", "false", "true", "no", "yes"):
        raise ConfigError(f"{CHECK_RANKS}={text!r} is neither on nor off. Set it to 1 or 0.")
    return text.lower() in ("1", "true", "yes")


def place_on_machine(environ: Mapping[str, str] | None = None, local_rank: int = -1) -> int:
    """This process's number on its machine, as the caller or the launcher says; 0 if nobody does."""
    environ = os.environ if environ is None else environ
    named = [names["local_rank"] for names in LAUNCHERS.values() if names["local_rank"] in environ]
    return local_rank if local_rank >= 0 else _whole(named[0], environ[named[0]]) if named else 0


def meeting_place(environ: Mapping[str, str], launcher: str, world_size: int) -> str | None:
    """Where the ranks meet, as ``host:port``; None for one rank that nobody told.

    torchrun says it. Slurm does not, but on one node it can only be this one.
    """
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if (
        launcher == "Slurm"
        and address is None
        and environ.get("SLURM_NNODES", environ.get("SLURM_JOB_NUM_NODES")) == "1"
    ):
        address = "127.0.0.1"
    if launcher == "Slurm" and port is None:
        port = str(SLURM_PORTS + _whole("SLURM_JOB_ID", environ.get("SLURM_JOB_ID", "0")) % SLURM_PORTS)
    if address is not None and port is not None:
        host = f"[{address}]" if ":" in address else address  # IPv6
        return f"{host}:{_whole('MASTER_PORT', port)}"
    if world_size == 1:
        return None
    lacking = " and ".join(name for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)) if value is None)
    raise ConfigError(
        f"{world_size} ranks cannot find each other: {lacking} is not set. Start with torchrun, or set "
        f"MASTER_ADDR to the name of rank 0's machine and MASTER_PORT to a port that is free there."
    )


def launcher_set_local_rank() -> bool:
    """Whether ``LOCAL_RANK`` is there, as torchrun leaves it and Slurm does not."""
    return "LOCAL_RANK" in os.environ


@contextmanager
def kept_environment(**values: str) -> Iterator[None]:
    """``values`` in the environment for as long as a library demands them; afterwards all is as it was."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is no whole number. Set it by the launcher, or unset it.") from None
