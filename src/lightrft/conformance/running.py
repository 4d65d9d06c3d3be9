"""Runs a program on a strategy: what is seen after each operation, on all ranks, and how two such stories compare."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor, nn
from torch.nn import Module
from torch.nn.functional import mse_loss
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR

from lightrft.conformance.checkpoints import shared_directory
from lightrft.conformance.law import Make, Target, run_body
from lightrft.conformance.pool import RankPool
from lightrft.conformance.probes import Recorder
from lightrft.conformance.program import (
    NAMES,
    Barrier,
    Broadcast,
    Flush,
    Gather,
    Generate,
    GradNorm,
    Load,
    LoadModel,
    MovingAverage,
    Name,
    Offload,
    Operation,
    Program,
    Reduce,
    Restart,
    Save,
    SaveModel,
    Setup,
    Sleep,
    Train,
    UpdateWeights,
    Wake,
    ZeroGrad,
)
from lightrft.engines.protocol import Capabilities, Completion, Request, Sampling
from lightrft.engines.scripted import ScriptedEngine, scripted
from lightrft.errors import CheckpointError, EngineError, UnsupportedOperation
from lightrft.strategy.protocol import ReduceOp, StepOutcome, Strategy


def made(setup: Setup, model: Name | Literal["average"]) -> Module:
    """A model of the program, always with the same values."""
    with torch.random.fork_rng():
        torch.manual_seed({"actor": 1, "critic": 2, "average": 3}[model])
        if setup.shape == "line":
            return nn.Linear(1, 1)
        width = setup.width
        first, second = nn.Linear(width, width), nn.Linear(width, width)
        if setup.shape == "tied":
            second.weight = first.weight
        if setup.shape == "frozen":
            first.requires_grad_(False)
        return nn.Sequential(first, nn.Tanh(), second)


def data_of(setup: Setup, operation: Train) -> tuple[Tensor, Tensor]:
    """Inputs and targets of all lanes, [lanes * micro, width]."""
    generator = torch.Generator().manual_seed(operation.seed)
    shape = (setup.lanes * setup.micro, 1 if setup.shape == "line" else setup.width)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def fingerprint(weights: Mapping[str, Sequence[float]]) -> float:
    """One number for all weights; 0 where there are none."""
    return sum(sum((i + 1) * value for i, value in enumerate(weights[name])) for name in sorted(weights))


@define(eq=False)
class Serving:
    """An engine whose log-probabilities tell which weights it computes with. It remembers them until its cache is flushed."""

    inner: ScriptedEngine = field(factory=scripted)
    weights: dict[str, list[float]] = field(factory=dict)
    cached: float | None = None
    updates: int = 0
    name: str = "serving"
    capabilities: Capabilities = Capabilities(sleep=True)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """What the script says."""
        completions = self.inner.generate(requests, sampling)
        if self.cached is None:
            self.cached = fingerprint(self.weights)
        said = self.cached
        return [evolve(each, logprobs=(said,) * len(each.output_token_ids)) for each in completions]

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Takes them whole, or not at all."""
        new = {name: flat(tensor) for name, tensor in named_tensors}
        self.inner.update_weights((name, torch.tensor(values)) for name, values in new.items())
        self.weights = new
        self.updates += 1

    def flush_cache(self) -> None:
        """Looks at its weights again."""
        self.cached = None

    def sleep(self, level: int = 1) -> None:
        """Refuses what it is asked from here on."""
        self.inner.sleep(level)

    def wake_up(self, *, weights_only: bool = False) -> None:
        """Undoes it."""
        self.inner.wake_up(weights_only=weights_only)

    def close(self) -> None:
        """There is nothing to free."""


def flat(tensor: Tensor) -> list[float]:
    """All values, in order."""
    values: list[float] = tensor.detach().double().flatten().tolist()
    return values


# ------------------------------------------------------------------------------------------------------------- running

Plain: TypeAlias = "str | bool | int | float | Sequence[Plain] | None"
Observation: TypeAlias = Mapping[str, Plain]
"""What was seen, by what it is: after each operation its own results, all parameters, all learning rates, the engine."""
UNSUPPORTED = "unsupported"
"""Equal to everything: a backend may refuse what it cannot do (S2)."""
BY_LANE = frozenset({"completions", "logprobs", "asleep"})
"""Lists of each rank's own part."""


@frozen(eq=False)
class Trained:
    """What belongs to one model."""

    module: Module
    optimizer: Optimizer
    scheduler: LRScheduler


@frozen(eq=False)
class Run:
    """From one start to the next."""

    strategy: Strategy
    models: Mapping[Name, Trained]
    average: Module
    engine: Serving | None
    lanes: range


def run_program(make: Make, program: Program) -> list[Observation]:
    """What this rank sees after each operation, in order."""
    seen: list[Observation] = []
    watch = make(train_batch_size=make().world_size)
    run = begun(make, program.setup)
    with shared_directory(watch) as directory:
        for operation in program.operations:
            if isinstance(operation, Restart):
                run.strategy.close()
                run = begun(make, program.setup)
                results: Observation = {}
            else:
                try:
                    results = carried_out(run, program.setup, operation, directory)
                except (CheckpointError, EngineError) as error:
                    results = {"raised": type(error).__name__}
            seen.append({**results, **state_of(run, watch)})
    return seen


def begun(make: Make, setup: Setup) -> Run:
    """Everything at its start."""
    strategy = make(
        train_batch_size=setup.lanes * setup.micro * setup.accumulation,
        micro_train_batch_size=setup.micro,
        max_norm=setup.max_norm,
        enable_engine_sleep=setup.sleeps,
    )
    if setup.lanes % strategy.world_size:
        raise ValueError(f"{setup.lanes} lanes cannot be shared by {strategy.world_size} ranks. Make them a multiple.")
    models: dict[Name, Trained] = {}
    for name in NAMES:
        module = made(setup, name)
        if setup.optimizer == "adamw":
            optimizer = strategy.create_optimizer(module, lr=setup.lr, weight_decay=setup.weight_decay, eps=setup.eps)
        else:
            optimizer = SGD([each for each in module.parameters() if each.requires_grad], lr=setup.lr)
        models[name] = Trained(*strategy.prepare((module, optimizer, StepLR(optimizer, 1, setup.decay))))
    average = strategy.prepare(made(setup, "average").eval())
    engine = strategy.setup_inference_engine(None, engine_type=Serving())
    share = setup.lanes // strategy.world_size
    first = share * strategy.get_rank()
    return Run(strategy, models, average, engine if isinstance(engine, Serving) else None, range(first, first + share))


def carried_out(run: Run, setup: Setup, operation: Operation, directory: Path) -> Observation:
    """Does it; what it gives back."""
    strategy, actor = run.strategy, run.models["actor"]
    match operation:
        case Train():
            return trained(run, setup, operation)
        case Flush(model):
            each = run.models[model]
            return told(strategy.optimizer_step(each.optimizer, each.module, each.scheduler, flush=True))
        case ZeroGrad(model):
            run.models[model].optimizer.zero_grad()
        case GradNorm(model):
            try:
                return {"grad_norm": finite(strategy.get_grad_norm(run.models[model].module))}
            except UnsupportedOperation:
                return {"grad_norm": UNSUPPORTED}
        case MovingAverage(beta):
            strategy.moving_average(actor.module, run.average, beta)
        case Offload(model):
            each = run.models[model]
            strategy.maybe_offload_optimizer(each.optimizer)
            strategy.offload_model(each.module)
            strategy.reload_model(each.module)
            strategy.maybe_load_optimizer(each.optimizer)
        case Reduce(values, op):
            return reduced(run, values, op)
        case Gather(values):
            gathered = strategy.all_gather(torch.tensor([values[lane] for lane in run.lanes]))
            return {"gathered": [value for part in gathered for value in part.tolist()]}
        case Broadcast(values, lane):
            share = len(run.lanes)
            mine = values[run.lanes.start + lane % share]  # on every rank; that of the rank which has the lane is sent
            return {"broadcast": strategy.broadcast(mine, src=lane // share)}
        case Barrier():
            strategy.barrier()
        case Save(model, tag, note, latest):
            strategy.save_ckpt(
                run.models[model].module,
                directory / model,
                tag=tag,
                max_num=setup.keep,
                client_state={"note": note},
                save_latest=latest,
            )
            kept = sorted(path.name for path in (directory / model).iterdir() if path.is_dir())
            strategy.barrier()  # nobody saves while another rank looks
            return {"kept": kept}
        case Load(model, tag, module_only):
            path, client_state = strategy.load_ckpt(
                run.models[model].module, directory / model, tag=tag, load_module_only=module_only
            )
            return {"tag": Path(path).name, "note": str(client_state.get("note"))}
        case SaveModel(model):
            strategy.save_model(run.models[model].module, None, directory / f"{model}-weights")
        case LoadModel(model):
            strategy.load_model(run.models[model].module, directory / f"{model}-weights", strict=True)
        case Sleep():
            strategy.maybe_sleep_inference_engine()
        case Wake():
            strategy.wakeup_inference_engine()
        case UpdateWeights():
            strategy.update_engine_weights(actor.module)
        case Generate(prompts, n, seed, sleep):
            asked = [list(prompt) for lane in run.lanes for prompt in prompts[lane]]
            sampling = Sampling(max_new_tokens=2, n=n, seed=seed)
            return completed(strategy.gather_and_generate(sampling, all_prompt_token_ids=asked, sleep_engine=sleep))
        case Restart():
            raise AssertionError("a restart is the business of run_program")
    return {}


def trained(run: Run, setup: Setup, operation: Train) -> Observation:
    """This rank's lanes."""
    each, outcome = run.models[operation.model], None
    x, y = data_of(setup, operation)
    for lane in run.lanes:
        rows = slice(lane * setup.micro, (lane + 1) * setup.micro)
        loss = mse_loss(each.module(x[rows]), y[rows])
        if operation.poisoned and lane == setup.lanes - 1:
            loss = loss * math.nan
        run.strategy.backward(loss, each.module, each.optimizer)
        flush = operation.flush and lane == run.lanes[-1]
        outcome = run.strategy.optimizer_step(each.optimizer, each.module, each.scheduler, flush=flush)
    assert outcome is not None
    return {**told(outcome), "micro_step": outcome.micro_step / len(run.lanes)}


def told(outcome: StepOutcome) -> Observation:
    """As plain values."""
    norm = None if outcome.grad_norm is None else finite(outcome.grad_norm)
    return {"applied": outcome.applied, "skipped": outcome.skipped_nonfinite, "grad_norm": norm}


def finite(norm: float) -> float | str:
    """In words where it is no number, so that equal ones are equal."""
    return norm if math.isfinite(norm) else "not finite"


def reduced(run: Run, values: Sequence[int] | Sequence[float], op: ReduceOp) -> Observation:
    """A rank's lanes are reduced here, by plain Python."""
    mine = [values[lane] for lane in run.lanes]
    own: float = {"sum": sum(mine), "mean": sum(mine) / len(mine), "max": max(mine), "min": min(mine)}[op]
    number = run.strategy.all_reduce({"n": own}, op)["n"]
    tensor = run.strategy.all_reduce(torch.tensor([own], dtype=torch.float64 if op == "mean" else None), op)
    return {"number": number, "tensor": tensor.tolist()}


def completed(completions: Sequence[Completion]) -> Observation:
    """Token ids are compared exactly, log-probabilities are not."""
    ids = [[list(each.prompt_token_ids), list(each.output_token_ids), each.finish_reason] for each in completions]
    return {"completions": ids, "logprobs": [list(each.logprobs or ()) for each in completions]}


def state_of(run: Run, watch: Strategy) -> Observation:
    """What there is to see, whatever was done last. ``watch`` reads the parameters: the run's own engine sees nothing."""
    state: dict[str, Plain] = {}
    for name, module in (*((name, each.module) for name, each in run.models.items()), ("average", run.average)):
        for parameter, value in whole(watch, module).items():
            state[f"{name}.{parameter}"] = flat(value)
    for name, each in run.models.items():
        state[f"lr of the {name}"] = float(each.optimizer.param_groups[0]["lr"])
    if run.engine is not None:
        state["asleep"] = [run.engine.inner.state.asleep] * len(run.lanes)
        state["weight updates"] = run.engine.updates
    return state


def whole(watch: Strategy, module: Module) -> dict[str, Tensor]:
    """Every parameter by its plain name, as an engine would be sent it."""
    recorder = Recorder()
    if watch.setup_inference_engine(None, engine_type=recorder) is not recorder:
        return {name: parameter.detach() for name, parameter in watch.unwrap_model(module).named_parameters()}
    watch.update_engine_weights(module)
    return recorder.weights


# ------------------------------------------------------------------------------------------------- all ranks, and equal


def run_on(target: Target, pool: RankPool | None, program: Program) -> list[Observation]:
    """What all ranks see: each part from the rank that has it, the rest from all of them alike, or ``AssertionError``."""
    if pool is None:
        return run_body(target.build, target.fields, run_program, {"program": program})
    ranks = pool.run(run_body, target.build, target.fields, run_program, {"program": program})
    return [together(program, step, seen) for step, seen in enumerate(zip(*ranks, strict=True))]


def together(program: Program, step: int, seen: Sequence[Observation]) -> Observation:
    """One observation out of every rank's."""
    merged: dict[str, Plain] = {}
    for key in seen[0]:
        values = [each.get(key) for each in seen]
        if key in BY_LANE:
            merged[key] = [lane for value in values if isinstance(value, list) for lane in value]
        else:
            merged[key] = values[0]
            for rank, value in enumerate(values):
                if value != values[0]:
                    raise Differs(program, step, key, {"rank 0": values[0], f"rank {rank}": value})
    return merged


class Differs(AssertionError):
    """Two that had to see the same saw different things. ``program`` ends where they did."""

    def __init__(self, program: Program, step: int, key: str, values: Mapping[str, Plain]) -> None:
        self.program = evolve(program, operations=program.operations[: step + 1])
        told = "".join(f"\n  {who}: {value!r}" for who, value in values.items())
        super().__init__(f"{key!r} differs after operation {step + 1}, {program.operations[step]!r}:{told}")


def compare(
    program: Program,
    first: tuple[str, Sequence[Observation]],
    second: tuple[str, Sequence[Observation]],
    without: frozenset[str] = frozenset(),
) -> None:
    """Raises ``Differs`` at the first thing that two who ran ``program`` did not see alike."""
    for step, (one, other) in enumerate(zip(first[1], second[1], strict=True)):
        for key in sorted({*one, *other} - without, key=lambda key: ("." in key, key)):
            a, b = one.get(key, "nothing"), other.get(key, "nothing")
            if not alike(a, b, key):
                raise Differs(program, step, key, {first[0]: a, second[0]: b})


def alike(first: Plain, second: Plain, key: str) -> bool:
    """Floats within 1e-6 as in law T6, or within a millionth part of large ones; all else exactly, and of one type."""
    if UNSUPPORTED in (first, second):
        return True
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(alike(a, b, key) for a, b in zip(first, second, strict=True))
    if isinstance(first, float) and isinstance(second, float):
        loose = 10 if key in {"grad_norm", "logprobs"} else 1  # these are of many values
        return abs(first - second) <= loose * 1e-6 * max(1.0, abs(second))
    return type(first) is type(second) and first == second
