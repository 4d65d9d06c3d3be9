"""What the ranks of test_ranks.py do.

As a script, ``ranks_bodies.py worlds BACKEND DIRECTORY SCENARIO...`` imports everything once and makes each rank a fork of
itself, and ``ranks_bodies.py train BACKEND STAGE HOW`` is what torchrun starts. The rest is sent to a rank pool.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightrft import Strategy, get_strategy
from lightrft.ops import ranks
from lightrft.ops.peers import is_running
from lightrft.strategy.record import Peer

Report = dict[str, object]
TIMEOUT = timedelta(seconds=20)
PARTING = timedelta(seconds=1)
IMPATIENT = timedelta(seconds=1)
AT_ONCE = 4
"""Processes: more of them, and those that wait with a time limit give up for want of a core."""
LIBRARIES_OWN = {"TORCHINDUCTOR_CACHE_DIR", "PYTORCH_NVML_BASED_CUDA_CHECK"}
"""What torch sets with the first optimizer of a process, and DeepSpeed with its import."""


class Blocks(nn.Module):
    """Two blocks, each sharded by itself; ``meet`` is called in the forward of the second one, or in its backward."""

    def __init__(self, how: str = "", meet: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.how, self.meet = how, meet

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.blocks[0](x)
        if self.how == "forward":
            self.meet()
        if self.how == "backward" and hidden.requires_grad:
            hidden.register_hook(lambda gradient: self.meet())
        return torch.as_tensor(self.blocks[1](hidden)).mean()


def strategy_of(backend: str, stage: int = 2, **fields: object) -> Strategy:
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    zero = {"zero_stage": stage} if backend == "deepspeed" else {}
    sizes = {"micro_train_batch_size": 1, "train_batch_size": world_size}
    return get_strategy({"backend": backend, "bf16": False, **sizes, **zero, **fields})


def kill_rank_1() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def train(strategy: Strategy, how: str = "", meet: Callable[[], None] = lambda: None, steps: int = 1) -> list[float]:
    """The parameters after ``steps`` steps; each rank has its own sample."""
    model = Blocks(how, meet)
    optimizer = strategy.create_optimizer(model, lr=0.1)
    model, optimizer = strategy.prepare((model, optimizer))
    for _ in range(steps):
        loss = model(torch.full((1, 4), 1.0 + strategy.get_rank()))
        strategy.backward(loss, model, optimizer)
        if how == "optimizer_step":
            meet()
        strategy.optimizer_step(optimizer, model)
    return [float(value) for value in torch.cat([weight.reshape(-1) for weight in whole_weights(model)])]


def whole_weights(model: nn.Module) -> list[Tensor]:
    """Of ``fsdp``; of DeepSpeed nothing is asked."""
    plain = getattr(model, "module", model)
    weights = [parameter.detach() for parameter in plain.parameters()]
    return [weight.full_tensor() if isinstance(weight, DTensor) else weight for weight in weights]


# ------------------------------------------------------------------------------------------- what a process has open


def listening() -> list[int]:
    """The TCP ports on which this process listens."""
    inodes = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:
            continue
    rows = [
        line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return [int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]


def children() -> list[str]:
    """The processes that this one has started and that are still there."""
    return [
        entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit() and parent_of(entry) == str(os.getpid())
    ]


def parent_of(process: Path) -> str:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[1]
    except OSError:
        return ""


# ------------------------------------------------------------------------------------------------------- the scenarios


def alone(backend: str) -> Report:
    """Without a launcher."""
    before = listening()
    strategy = strategy_of(backend, 2)
    built = listening()
    strategy.setup_distributed(TIMEOUT)
    return {"opened_by_build": [port for port in built if port not in before], **trained_and_closed(strategy)}


def alone_stage_3(backend: str) -> Report:
    strategy = strategy_of(backend, 3)
    strategy.setup_distributed(TIMEOUT)
    return trained_and_closed(strategy)


def trained(backend: str) -> Report:
    strategy = strategy_of(backend, 3)
    strategy.setup_distributed(TIMEOUT)
    return trained_and_closed(strategy)


def trained_and_closed(strategy: Strategy) -> Report:
    files = set(os.listdir(tempfile.gettempdir()))
    train(strategy)
    strategy.close()
    strategy.close()
    port = int(os.environ.get("MASTER_PORT", "0"))
    return {
        "world_size": strategy.world_size,
        "group": dist.is_initialized(),
        "meeting_place_is_open": port in listening(),
        "listening": len(listening()),
        "children": children(),
        "files": sorted(set(os.listdir(tempfile.gettempdir())) - files),
    }


def met(backend: str) -> Report:
    """Nothing but collectives: what remains after ``close`` is of the process group."""
    strategy = strategy_of(backend)
    strategy.setup_distributed(timedelta(seconds=1234))
    assert dist.group.WORLD is not None
    # The one place where a group says it: `options` of its backend.
    timeout = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    total = strategy.all_reduce({"x": 1.0}, "sum")["x"]
    strategy.close()
    gc.collect()
    return {"timeout": timeout.total_seconds(), "total": total, "listening": listening()}


def never_comes(backend: str) -> Report:
    strategy_of(backend).setup_distributed(IMPATIENT)
    return {}


def port_in_use(backend: str) -> Report:
    """Another program has the port, and it listens and accepts and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        os.environ["MASTER_PORT"] = str(server.getsockname()[1])
        return never_comes(backend)


def no_such_host(backend: str) -> Report:
    os.environ["MASTER_ADDR"] = "no-such-host.invalid"
    return never_comes(backend)


def half_set(backend: str) -> Report:
    del os.environ["WORLD_SIZE"]
    return never_comes(backend)


def impatient(backend: str) -> Report:
    """Rank 1 lives and does not come to the barrier; its process ends when rank 0's has ended."""
    strategy = strategy_of(backend)
    strategy.setup_distributed(timedelta(seconds=2))
    pids = strategy.all_gather(os.getpid())
    if strategy.get_rank() == 0:
        strategy.barrier()
    wait_for_end(pids[0])
    return {}


def leaves_early(backend: str) -> Report:
    """Rank 1 closes and ends; rank 0 is busy until then, and goes on to meet it."""
    ranks.PARTING = PARTING
    strategy = strategy_of(backend)
    strategy.setup_distributed(TIMEOUT)
    pids = strategy.all_gather(os.getpid())
    start = time.monotonic()
    if strategy.get_rank() == 0:
        wait_for_end(pids[1])
        strategy.barrier()
    strategy.close()
    return {"closed_after": time.monotonic() - start}


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + TIMEOUT.total_seconds()
    while is_running(Peer(socket.gethostname(), pid)) and time.monotonic() < deadline:
        time.sleep(0.02)


def killed_in_all_reduce(backend: str) -> Report:
    strategy = strategy_of(backend)
    strategy.setup_distributed(TIMEOUT)
    strategy.all_reduce({"x": 1.0})
    kill_rank_1()
    strategy.all_reduce({"x": torch.ones(3)})
    return {}


def killed_in_forward(backend: str) -> Report:
    return killed(backend, 3, "forward")


def killed_in_backward(backend: str) -> Report:
    return killed(backend, 2, "backward")


def killed_in_backward_stage_3(backend: str) -> Report:
    return killed(backend, 3, "backward")


def killed_in_optimizer_step(backend: str) -> Report:
    return killed(backend, 1, "optimizer_step")


def killed_at_stage_0(backend: str) -> Report:
    return killed(backend, 0, "optimizer_step")


def killed(backend: str, stage: int, how: str) -> Report:
    strategy = strategy_of(backend, stage)
    strategy.setup_distributed(TIMEOUT)
    try:
        train(strategy, how, kill_rank_1)
    finally:
        strategy.close()
    return {}


@frozen
class World:
    """A scenario: who plays it."""

    body: Callable[[str], Report]
    ranks: tuple[int, ...] = (0, 1)
    launched: bool = True


WORLDS: Mapping[str, World] = {
    "alone": World(alone, (0,), launched=False),
    "alone-stage-3": World(alone_stage_3, (0,), launched=False),
    "trained": World(trained),
    "met": World(met),
    "rank 1 never comes": World(never_comes, (0,)),
    "rank 0 never comes": World(never_comes, (1,)),
    "port in use, rank 0": World(port_in_use, (0,)),
    "port in use, rank 1": World(port_in_use, (1,)),
    "no such host": World(no_such_host, (1,)),
    "half set": World(half_set, (0,)),
    "impatient": World(impatient),
    "leaves early": World(leaves_early),
    **{
        body.__name__: World(body)
        for body in (
            killed_in_all_reduce,
            killed_in_forward,
            killed_in_backward,
            killed_in_backward_stage_3,
            killed_in_optimizer_step,
            killed_at_stage_0,
        )
    },
}


# ------------------------------------------------------------------------------------------------ each rank is a fork


def as_rank(world: World, rank: int, port: int, backend: str, report: Path) -> None:
    """The life of a rank, up to the end of the interpreter; its report is written before."""
    if world.launched:
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
        os.environ.update(place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    # A directory of its own for what libraries, and the compilers that they try, write for a moment.
    tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp()
    seen: Report = {}
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]  # for one process
    logging.getLogger("lightrft").addHandler(handler)
    start, before = time.monotonic(), dict(os.environ)
    try:
        seen |= world.body(backend)
    except Exception as error:
        seen |= {"error": type(error).__name__, "text": str(error), "notes": getattr(error, "__notes__", [])}
        raise
    finally:
        names = {name for name in before.keys() | os.environ.keys() if before.get(name) != os.environ.get(name)}
        seen |= {"seconds": time.monotonic() - start, "log": records, "environ": sorted(names - LIBRARIES_OWN)}
        report.write_text(json.dumps(seen))


def play(worlds: Mapping[str, World], backend: str, directory: Path) -> dict[str, dict[int, Report]]:
    """The reports of each scenario by rank, and the ``code`` with which each rank's process ended; a few at once."""
    started: dict[int, tuple[str, int, Path]] = {}
    reports: dict[str, dict[int, Report]] = {name: {} for name in worlds}

    def collect() -> None:
        pid, status = os.wait()
        name, rank, report = started.pop(pid)
        seen: Report = json.loads(report.read_text()) if report.exists() else {}
        reports[name][rank] = seen | {"code": os.waitstatus_to_exitcode(status)}

    for position, (name, world) in enumerate(worlds.items()):
        while len(started) > AT_ONCE - 2:
            collect()
        port = free_port()
        for rank in world.ranks:
            report = directory / f"{position}-{rank}.json"
            pid = os.fork()
            if pid == 0:
                as_rank(world, rank, port, backend, report)
                sys.exit()
            started[pid] = (name, rank, report)
    while started:
        collect()
    return reports


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ----------------------------------------------------------------------------------------------------- in a rank pool


def refusals(backend: str) -> dict[str, str]:
    """The texts of the errors for bad input; the ranks are in step after each."""
    strategy = strategy_of(backend, 2)
    strategy.setup_distributed()
    model, other = Blocks(), Blocks()
    scattered = Blocks()
    scattered.blocks[1].to("meta")
    attempts: dict[str, Callable[[], object]] = {
        "devices": lambda: strategy.prepare(Blocks(), (scattered, strategy.create_optimizer(scattered))),
        "optimizer": lambda: strategy.prepare((model, strategy.create_optimizer(other))),
        "unprepared": lambda: unprepared(strategy),
    }
    texts = {name: text_of(attempt) for name, attempt in attempts.items()}
    strategy.barrier()
    strategy.close()
    return texts


def unprepared(strategy: Strategy) -> None:
    model = Blocks()
    optimizer = strategy.create_optimizer(model)
    strategy.backward(model(torch.ones(1, 4)), model, optimizer)


def text_of(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def warnings_about_blocks(backend: str) -> list[str]:
    """What is logged for two models without a repeated block."""
    strategy = strategy_of(backend)
    strategy.setup_distributed()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]  # for one test
    logger = logging.getLogger("lightrft.ops.sharding")
    logger.addHandler(handler)
    try:
        strategy.prepare(nn.Linear(2, 2).train())
    finally:
        logger.removeHandler(handler)
        strategy.close()
    return said


def trained_over_machines_of(per_node: int) -> tuple[tuple[int, ...], list[float]]:
    """The mesh and the parameters of two ranks that are on machines of so many GPUs."""
    strategy = strategy_of("fsdp")
    strategy.setup_distributed(num_gpu_per_node=per_node)
    shapes: list[tuple[int, ...]] = []
    model = Blocks()
    strategy.prepare(model)
    for weight in model.parameters():
        assert isinstance(weight, DTensor)
        shapes.append(tuple(weight.device_mesh.shape))
    parameters = train(strategy, steps=3)
    strategy.close()
    return shapes[0], parameters


def disagree(backend: str, variable: str | None, field: bool) -> tuple[str, float, bool]:
    """Ranks that call different operations: the error, the seconds, and whether the operations are the plain ones."""
    before = os.environ.pop("LIGHTRFT_CHECK_RANKS", None)
    if variable is not None:
        os.environ["LIGHTRFT_CHECK_RANKS"] = variable
    try:
        strategy = strategy_of(backend, check_ranks=field)
    except ValueError as error:
        return f"{type(error).__name__}: {error}", 0.0, False
    finally:
        os.environ.pop("LIGHTRFT_CHECK_RANKS", None)
        if before is not None:
            os.environ["LIGHTRFT_CHECK_RANKS"] = before
    strategy.setup_distributed()
    plain = type(strategy.barrier).__name__ == "Bound"
    text, start = "", time.monotonic()
    if not plain:
        try:
            if strategy.get_rank() == 0:
                strategy.all_reduce({"loss": 1.0})
            else:
                strategy.barrier()
        except RuntimeError as error:
            text = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - start
    strategy.close()
    return text, seconds, plain


# -------------------------------------------------------------------------------------------------------------- script


def under_torchrun(backend: str, stage: int, how: str) -> None:
    strategy = strategy_of(backend, stage)
    strategy.setup_distributed(TIMEOUT)
    try:
        train(strategy, how, kill_rank_1)
        networks = strategy.all_gather(os.stat("/proc/self/ns/net").st_ino)
        strategy.print(f"trained on {strategy.world_size} ranks in {len(set(networks))} networks")
    finally:
        strategy.close()


def main(mode: str, backend: str, *arguments: str) -> None:
    torch.set_num_threads(1)
    if mode == "train":
        stage, how = arguments
        under_torchrun(backend, int(stage), how)
        return
    # Everything that a rank imports, before the first fork: torch imports its compiler with the first optimizer.
    libraries = {
        "fsdp": ("lightrft.backends.fsdp", "torch._dynamo"),
        "deepspeed": ("lightrft.backends.deepspeed", "torch._dynamo", "torch._inductor.compile_fx"),
    }
    for module in libraries[backend]:
        importlib.import_module(module)
    if backend == "deepspeed":
        importlib.import_module(libraries[backend][0]).import_quietly()
    gc.freeze()  # else each fork looks through, and so copies, all that was imported
    directory, *names = arguments
    chosen = {name: WORLDS[name.partition("#")[0]] for name in names}
    print(json.dumps(play(chosen, backend, Path(directory))))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
