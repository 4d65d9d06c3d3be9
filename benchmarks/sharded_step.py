"""Two ranks on the CPU: an update through the strategy against the same update written for the library by hand.

Both are set up in the same two processes and take turns, so that a busy machine is busy for both. Peak memory is measured
in processes of their own. Beside it, what the rank pool, ``checked`` and ``traced`` cost for each call.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Literal, TypeAlias, cast

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, but not in an __all__
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.figures import Figure, alternate, milliseconds, paired_ratio, seconds, spread
from lightrft import Strategy, StrategyConfig, get_strategy
from lightrft.backends import deepspeed as deepspeed_backend
from lightrft.conformance.pool import RankPool, rank_pool
from lightrft.ops.clipping import local_part
from lightrft.strategy.strategy import as_record
from lightrft.wrappers import checked, traced

TARGET = 1.02
POOL_TARGET_S = 0.005
TIMEOUT = 300.0
WORLD = 2
ACCUMULATION = 2
MODEL = "Qwen2 of 6.8 M parameters"
MICRO_BATCH = 2
TOKENS = 96
LEARNING_RATE = 1e-4
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.01
MAX_NORM = 1.0
SAME = 5e-5
"""Both sides end with the same parameters, or they did not do the same work."""
ENVIRON = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
MAPPED_FROM = 65_536
"""Bytes from which a block of memory goes back to the system as soon as it is freed, where peaks are measured."""

Side: TypeAlias = Literal["ours", "raw"]
Update: TypeAlias = Callable[[], None]


@frozen
class Setting:
    """What is compared."""

    backend: Literal["fsdp", "deepspeed"]
    zero_stage: int = 2

    def __str__(self) -> str:
        return self.backend if self.backend == "fsdp" else f"{self.backend}, ZeRO {self.zero_stage}"


SETTINGS = (Setting("fsdp"), Setting("deepspeed", 2), Setting("deepspeed", 3))


@frozen
class Turn:
    """One update on one rank."""

    wall: float
    """Seconds, the wait for the other rank among them."""
    processor: float
    """Seconds of this process on a core: other processes cannot take from it."""


@frozen
class Turns:
    """All updates of one rank, and how far the two sides' parameters are from each other afterwards."""

    ours: Sequence[Turn]
    raw: Sequence[Turn]
    difference: float


@frozen
class Memory:
    """Bytes that one rank held at the peak, beyond what it held with everything imported."""

    imported: int
    """That is not counted in the others."""
    prepared: int
    """While the model was made and prepared."""
    trained: int
    """During the updates."""


@frozen
class CallCost:
    """Seconds of one ``all_reduce`` of a number."""

    plain: float
    checked: float
    traced: float


# ----------------------------------------------------------------------------------------------------- the two contenders


def language_model() -> nn.Module:
    """Qwen2 with 6.8 million parameters in six layers."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    shape = Qwen2Config(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return Qwen2ForCausalLM(shape).train()


def micro_batches() -> list[Tensor]:
    """The tokens of one update on this rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return list(torch.randint(2048, (ACCUMULATION, MICRO_BATCH, TOKENS), generator=generator))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of the next token."""
    return cast(Tensor, model(input_ids=tokens, labels=tokens).loss)


def config_of(setting: Setting) -> StrategyConfig:
    """As ``lightrft`` is told of it."""
    return StrategyConfig(
        backend=setting.backend,
        zero_stage=setting.zero_stage,
        bf16=False,
        max_norm=MAX_NORM,
        micro_train_batch_size=MICRO_BATCH,
        train_batch_size=MICRO_BATCH * ACCUMULATION * WORLD,
        actor_learning_rate=LEARNING_RATE,
        adam_betas=BETAS,
        l2=WEIGHT_DECAY,
    )


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """As one writes it by hand."""
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    undecayed = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": undecayed, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS)


def through_strategy(setting: Setting) -> tuple[nn.Module, Update]:
    """The model as prepared, and one update of it through the strategy."""
    strategy = set_up_strategy(setting)
    model = language_model()
    model, optimizer = strategy.prepare((model, strategy.create_optimizer(model)))
    batches = micro_batches()

    def update() -> None:
        for tokens in batches:
            strategy.backward(loss_of(model, tokens), model, optimizer)
            strategy.optimizer_step(optimizer, model)

    return model, update


def set_up_strategy(setting: Setting) -> Strategy:
    """A strategy of the ranks of the pool."""
    strategy = get_strategy(config_of(setting))
    strategy.setup_distributed()
    return strategy


def in_raw_fsdp(setting: Setting) -> tuple[nn.Module, Update]:
    """The model sharded layer by layer, and the same update as one writes it for ``fully_shard``."""
    mesh = init_device_mesh("cpu", (WORLD,))
    model = language_model()
    for layer in cast(nn.ModuleList, model.get_submodule("model.layers")):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model)
    batches = micro_batches()

    def update() -> None:
        for tokens in batches:
            torch.autograd.backward(loss_of(model, tokens) / ACCUMULATION)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return model, update


def in_raw_deepspeed(setting: Setting) -> tuple[nn.Module, Update]:
    """DeepSpeed's engine, which counts the micro-batches itself, with the same settings of ZeRO otherwise."""
    import deepspeed

    meet_in_deepspeed()
    model = language_model()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    settings = deepspeed_backend.settings(config_of(setting), ACCUMULATION, parameters)
    settings.pop("managed_gradient_accumulation", None)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=settings)
    batches = micro_batches()

    def update() -> None:
        for tokens in batches:
            engine.backward(loss_of(engine, tokens))
            engine.step()

    return engine, update


def meet_in_deepspeed() -> None:
    """What DeepSpeed needs on a CPU: no extension that is compiled for a minute."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)


def contender(side: Side, setting: Setting) -> tuple[nn.Module, Update]:
    """The model and its update."""
    if side == "ours":
        return through_strategy(setting)
    return in_raw_fsdp(setting) if setting.backend == "fsdp" else in_raw_deepspeed(setting)


def held_here(parameter: Tensor) -> Tensor:
    """What this rank holds of a parameter: both sides cut it alike."""
    return cast(Tensor, getattr(parameter, "ds_tensor", local_part(parameter))).detach()


# ---------------------------------------------------------------------------------------------------------- in each rank


def import_all(setting: Setting) -> None:
    """What either side needs, so that neither pays for it."""
    from transformers.models.qwen2 import modeling_qwen2  # noqa: F401

    warnings.filterwarnings("ignore", category=FutureWarning)  # torch, of the collectives that DeepSpeed calls
    if setting.backend == "deepspeed":
        deepspeed_backend.import_quietly()
        meet_in_deepspeed()


def timed(update: Update) -> Turn:
    """One update that all ranks begin together."""
    dist.barrier()
    wall, processor = time.perf_counter(), time.process_time()
    update()
    return Turn(time.perf_counter() - wall, time.process_time() - processor)


def take_turns(setting: Setting, rounds: int, warm_up: int = 2) -> Turns:
    """Both sides in this process, the first of a round being the second of the next."""
    import_all(setting)
    (model, ours), (rival, raw) = contender("ours", setting), contender("raw", setting)
    turns: tuple[list[Turn], list[Turn]] = ([], [])
    for turn in range(warm_up + rounds):
        for side in (0, 1) if turn % 2 == 0 else (1, 0):
            turns[side].append(timed((ours, raw)[side]))
    pairs = zip(model.parameters(), rival.parameters(), strict=True)
    difference = max(float((held_here(mine) - held_here(theirs)).abs().max()) for mine, theirs in pairs)
    return Turns(turns[0][warm_up:], turns[1][warm_up:], difference)


def resident(field: Literal["VmRSS", "VmHWM"]) -> int:
    """What the kernel says of this process: its memory now, or the most since it was last asked to forget."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition(f"{field}:")[2].split()[0]) * 1024


def forget_peak() -> None:
    """Makes VmHWM begin again."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def give_back_freed_memory() -> None:
    """Fixes glibc's threshold, which else moves, and one arena: what is resident then is what is alive, to 0.2 %."""
    libc = ctypes.CDLL(None)
    trim_threshold, mmap_threshold, arena_max = -1, -3, -8  # malloc.h
    for option, value in ((mmap_threshold, MAPPED_FROM), (trim_threshold, MAPPED_FROM), (arena_max, 1)):
        if not libc.mallopt(option, value):
            raise RuntimeError(f"mallopt({option}, {value}) was refused: peak memory is measured under glibc alone")


def peak_memory(side: Side, setting: Setting, updates: int = 3) -> Memory:
    """Of one side, in a process that has trained nothing before."""
    give_back_freed_memory()
    import_all(setting)
    gc.collect()
    imported = resident("VmRSS")
    forget_peak()
    _, update = contender(side, setting)
    prepared = resident("VmHWM")
    forget_peak()
    for _ in range(updates):
        update()
    return Memory(imported, prepared - imported, resident("VmHWM") - imported)


def join_by_tcp() -> None:
    """Puts the process group on a store as launchers give it, in place of the pool's, which is a file."""
    rank, host = dist.get_rank(), "127.0.0.1"
    store = TCPStore(host, 0, WORLD, True, wait_for_workers=False) if rank == 0 else None
    port = [store.port if store else 0]
    dist.broadcast_object_list(port)
    store = store or TCPStore(host, port[0], WORLD, False)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)


def cost_of_calls(calls: int) -> CallCost:
    """The same operation plain, checked and traced, turn by turn; medians."""
    join_by_tcp()
    plain = as_record(set_up_strategy(Setting("fsdp")))
    with tempfile.TemporaryDirectory() as directory:
        strategies = (plain, checked(plain, timedelta(seconds=60)), traced(plain, Path(directory) / "trace.json"))

        def call(strategy: Strategy) -> Callable[[], object]:
            return lambda: strategy.all_reduce(1.0)

        found = [statistics.median(each) for each in alternate([call(strategy) for strategy in strategies], calls)]
        for strategy in strategies[1:]:
            strategy.close()
    return CallCost(*found)


def nothing() -> None:
    """What the pool runs to show what it costs itself."""


# --------------------------------------------------------------------------------------------------------------- figures


def speed(pool: RankPool, setting: Setting, rounds: int) -> Figure:
    """Time of an update: of the slowest rank, since the others wait for it."""
    ranks = pool.run(take_turns, setting, rounds)
    sides = [
        list(zip(*(rank.ours for rank in ranks), strict=True)),
        list(zip(*(rank.raw for rank in ranks), strict=True)),
    ]
    ours, raw = ([max(turn.wall for turn in turns) for turns in side] for side in sides)
    ours_busy, raw_busy = ([sum(turn.processor for turn in turns) for turns in side] for side in sides)
    difference = max(rank.difference for rank in ranks)
    if difference > SAME:
        raise RuntimeError(f"{setting}: after the same updates the two sides' parameters differ by {difference:.1e}")
    ratio = paired_ratio(ours, raw)
    return Figure(
        name=named(setting, f"backward x {ACCUMULATION} + optimizer_step"),
        ours=milliseconds(ours),
        rival=milliseconds(raw),
        ratio=ratio,
        target=f"<= {TARGET}",
        met=ratio <= TARGET,
        note=f"middle half of the ratios {spread(ours, raw)}; processor time {paired_ratio(ours_busy, raw_busy):.3f} "
        f"({spread(ours_busy, raw_busy)}); parameters equal within {difference:.0e}",
    )


def named(setting: Setting, quantity: str) -> str:
    """A figure's name."""
    rival = "raw fully_shard" if setting.backend == "fsdp" else "raw DeepSpeed engine"
    return f"{setting}, {WORLD} ranks, {MODEL}: {quantity} (rival: {rival})"


def memory(setting: Setting) -> Figure:
    """The most that any rank held, from before its model was made to after its updates, each side in new processes."""
    found: dict[Side, Memory] = {}
    sides: tuple[Side, ...] = ("ours", "raw")
    for side in sides:
        with rank_pool(WORLD, timeout=TIMEOUT, environ=ENVIRON) as pool:
            found[side] = max(pool.run(peak_memory, side, setting), key=highest)
    ours, raw = found["ours"], found["raw"]
    ratio = highest(ours) / highest(raw)
    return Figure(
        name=named(setting, "peak memory a rank"),
        ours=megabytes(highest(ours)),
        rival=megabytes(highest(raw)),
        ratio=ratio,
        target=f"<= {TARGET}",
        met=ratio <= TARGET,
        note=f"VmHWM beyond the {megabytes(raw.imported)} of the imports; while preparing {megabytes(ours.prepared)} "
        f"against {megabytes(raw.prepared)}",
    )


def highest(found: Memory) -> int:
    """The peak of the whole run."""
    return max(found.prepared, found.trained)


def megabytes(number: int) -> str:
    """To read."""
    return f"{number / 1e6:.1f} MB"


def pool_overhead(pool: RankPool, runs: int) -> Figure:
    """A run that does nothing, the ranks being there."""
    pool.run(nothing)
    times = [seconds(lambda: pool.run(nothing)) for _ in range(runs)]
    median = statistics.median(times)
    return Figure(
        name=f"rank pool, {WORLD} ranks: a warm run of a function that does nothing",
        ours=milliseconds(times),
        rival="",
        ratio=None,
        target=f"<= {1e3 * POOL_TARGET_S:g} ms",
        met=median <= POOL_TARGET_S,
        note=f"19 of 20 within {1e3 * statistics.quantiles(times, n=20)[-1]:.2f} ms",
    )


def wrapper_overheads(pool: RankPool, calls: int) -> list[Figure]:
    """What ``checked`` and ``traced`` add to a call, on the rank where it is most. Off, neither is there."""
    ranks = pool.run(cost_of_calls, calls)
    plain = max(rank.plain for rank in ranks)
    wrapped = {
        "checked": max(rank.checked for rank in ranks),
        "traced": max(rank.traced for rank in ranks),
    }
    return [
        Figure(
            name=f"{name}, {WORLD} ranks: all_reduce of a number (rival: the same, not {name})",
            ours=f"{1e6 * took:.0f} us",
            rival=f"{1e6 * plain:.0f} us",
            ratio=took / plain,
            target="",
            met=None,
            note=f"{1e6 * (took - plain):.0f} us a call",
        )
        for name, took in wrapped.items()
    ]


def measure(rounds: int = 32) -> list[Figure]:
    """FSDP2, ZeRO 2 and ZeRO 3; then the pool and the wrappers."""
    figures = []
    with rank_pool(WORLD, timeout=TIMEOUT, environ=ENVIRON) as pool:
        overhead = pool_overhead(pool, runs=200)
        for setting in SETTINGS:
            figures += [speed(pool, setting, rounds), memory(setting)]
        figures += [overhead, *wrapper_overheads(pool, calls=200)]
    return figures
