"""The model of what must come out of a program.

Plain Python: windows, checkpoints on a shelf, an engine that is awake or not. Parameters come from SGD and AdamW written out
below on the global batch, in float64; no code is shared with the backends.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy

import torch
from attrs import define, field
from torch import Tensor
from torch.func import functional_call
from torch.nn import Module
from torch.nn.functional import mse_loss

from lightrft.conformance.law import Target
from lightrft.conformance.program import (
    NAMES,
    Broadcast,
    Flush,
    Gather,
    Generate,
    GradNorm,
    Load,
    LoadModel,
    MovingAverage,
    Name,
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
from lightrft.conformance.running import Observation, Plain, data_of, fingerprint, flat, made
from lightrft.engines.protocol import Request, Sampling
from lightrft.engines.scripted import scripted
from lightrft.ops.seeds import derived_seed

Weights = dict[str, Tensor]


@define(eq=False)
class Expected:
    """One model and its optimizer: all of it is on a checkpoint, but for the window."""

    weights: Weights
    first: Weights = field(factory=dict)
    second: Weights = field(factory=dict)
    moments_of: int = 0
    """Updates that the moments have seen."""
    lr: float = 0.0


@define(eq=False)
class Window:
    """Micro-batches since the last update, of all lanes."""

    gradients: list[Weights] = field(factory=list)
    lanes: int = 0
    poisoned: bool = False


@define(eq=False)
class Shelf:
    """The checkpoints of one model, the oldest first (K5, K6)."""

    saved: dict[str, tuple[Expected, int]] = field(factory=dict)
    latest: str | None = None
    plain: Weights | None = None
    """What ``save_model`` wrote."""

    def save(self, tag: str, state: Expected, note: int, keep: int, latest: bool) -> None:
        """Commits, then rotates."""
        self.saved.pop(tag, None)
        self.saved[tag] = deepcopy(state), note
        if latest:
            self.latest = tag
        if keep > 0:
            old = list(self.saved)[:-keep]
            self.saved = {name: each for name, each in self.saved.items() if name not in old or name == self.latest}

    def find(self, tag: str | None) -> str | None:
        """The one that a load takes."""
        wanted = self.latest if tag is None else tag
        if wanted is None and self.saved:
            return list(self.saved)[-1]
        return wanted if wanted in self.saved else None


@define(eq=False)
class Oracle:
    """Predicts an observation for each operation. ``per_rank``: lanes that share an engine; 0 where there is none."""

    setup: Setup
    per_rank: int
    modules: Mapping[Name, Module] = field(init=False)
    shelves: Mapping[Name, Shelf] = field(init=False)
    states: dict[Name, Expected] = field(init=False)
    windows: dict[Name, Window] = field(init=False)
    average: Weights = field(init=False)
    not_averaged: bool | None = False
    """Whether there was an update since the last average; None where the law leaves it open."""
    served: Weights = field(factory=dict)
    updates: int = 0
    asleep: list[bool] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.modules = {name: made(self.setup, name).double() for name in NAMES}
        self.shelves = {name: Shelf() for name in NAMES}
        self.begin()

    def begin(self) -> None:
        """Everything but what is on disk."""
        self.states = {name: Expected(values_of(made(self.setup, name)), lr=self.setup.lr) for name in NAMES}
        self.windows = {name: Window() for name in NAMES}
        self.average = values_of(made(self.setup, "average"))
        self.not_averaged = False
        self.served, self.updates = {}, 0
        engines = self.setup.lanes // self.per_rank if self.per_rank else 0
        self.asleep = [False] * engines

    def left_open(self, operation: Operation) -> bool:
        """Whether the law says nothing about an operation now."""
        match operation:
            case GradNorm(model):
                window = self.windows[model]
                return not window.lanes or window.poisoned
            case MovingAverage():
                # T12 is about applied updates; whether a state that was loaded is one, it does not say.
                return self.not_averaged is None
        return False

    def after(self, operation: Operation) -> Observation:
        """What must be seen."""
        return {**self._results(operation), **self._state()}

    def _results(self, operation: Operation) -> Observation:
        match operation:
            case Train():
                return self._train(operation)
            case Flush(model):
                return self._update(model)
            case ZeroGrad(model):
                self.windows[model] = Window()
            case GradNorm(model):
                return {"grad_norm": norm_of(self._gradient(model, self._lanes_of_window()))}
            case MovingAverage(beta):
                if self.not_averaged:
                    now = self.states["actor"].weights
                    self.average = {name: beta * self.average[name] + (1 - beta) * now[name] for name in now}
                self.not_averaged = False
            case Reduce(values, op):
                total = {"sum": sum(values), "max": max(values), "min": min(values), "mean": mean(values)}[op]
                return {"number": total, "tensor": [total]}
            case Gather(values):
                return {"gathered": list(values)}
            case Broadcast(values, lane):
                return {"broadcast": values[lane]}
            case Save(model, tag, note, latest):
                shelf = self.shelves[model]
                shelf.save(tag, self.states[model], note, self.setup.keep, latest)
                return {"kept": sorted(shelf.saved)}
            case Load():
                return self._load(operation)
            case SaveModel(model):
                self.shelves[model].plain = dict(self.states[model].weights)
            case LoadModel(model):
                plain = self.shelves[model].plain
                if plain is None:
                    return {"raised": "CheckpointError"}
                self.states[model].weights = dict(plain)
            case Restart():
                self.begin()
            case Sleep() | Wake():
                self.asleep = [isinstance(operation, Sleep)] * len(self.asleep)
            case UpdateWeights():
                self.served = dict(self.states["actor"].weights)
                self.updates += 1
                self.asleep = [False] * len(self.asleep)
            case Generate():
                return self._generate(operation)
        return {}

    def _lanes_of_window(self) -> int:
        return self.setup.lanes * self.setup.accumulation

    def _train(self, operation: Train) -> Observation:
        setup, state, window = self.setup, self.states[operation.model], self.windows[operation.model]
        module = self.modules[operation.model]
        x, y = (values.double() for values in data_of(setup, operation))
        leaves = {name: value.clone().requires_grad_() for name, value in state.weights.items()}
        loss = mse_loss(functional_call(module, leaves, (x,)), y)  # the mean over the lanes, which are of one size
        trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(loss, [leaves[name] for name in trained])
        window.gradients.append({name: each * setup.lanes for name, each in zip(trained, gradients, strict=True)})
        window.lanes += setup.lanes
        window.poisoned = window.poisoned or operation.poisoned
        step = float(window.lanes // setup.lanes)
        if operation.flush or window.lanes == self._lanes_of_window():
            return {**self._update(operation.model), "micro_step": step}
        return {"applied": False, "skipped": False, "grad_norm": None, "micro_step": step}

    def _gradient(self, model: Name, lanes: int) -> Weights:
        """The mean over so many lanes."""
        gradients = self.windows[model].gradients
        return {name: sum((each[name] for each in gradients), torch.tensor(0.0)) / lanes for name in gradients[0]}

    def _update(self, model: Name) -> Observation:
        """The end of a window (T1 to T5, T7)."""
        window, state = self.windows[model], self.states[model]
        if not window.lanes:
            return {"applied": False, "skipped": False, "grad_norm": None}
        gradient = self._gradient(model, window.lanes)
        self.windows[model] = Window()
        if window.poisoned:
            return {"applied": False, "skipped": True, "grad_norm": "not finite"}
        norm = norm_of(gradient)
        if 0.0 < self.setup.max_norm < norm:
            gradient = {name: each * (self.setup.max_norm / (norm + 1e-6)) for name, each in gradient.items()}
        (adamw if self.setup.optimizer == "adamw" else descent)(self.setup, state, gradient)
        state.lr *= self.setup.decay
        if model == "actor":
            self.not_averaged = True
        return {"applied": True, "skipped": False, "grad_norm": norm}

    def _load(self, operation: Load) -> Observation:
        shelf = self.shelves[operation.model]
        tag = shelf.find(operation.tag)
        if tag is None:
            return {"raised": "CheckpointError"}
        state, note = deepcopy(shelf.saved[tag])
        if operation.module_only:
            self.states[operation.model].weights = state.weights
        else:
            self.states[operation.model], self.windows[operation.model] = state, Window()
            if operation.model == "actor":
                self.not_averaged = None
        return {"tag": tag, "note": str(note)}

    def _generate(self, operation: Generate) -> Observation:
        for engine in range(len(self.asleep)):
            if any(operation.prompts[engine * self.per_rank : (engine + 1) * self.per_rank]):
                self.asleep[engine] = False
        prompts = [prompt for lane in operation.prompts for prompt in lane]
        if () in prompts:
            return {"raised": "EngineError"}
        if self.setup.sleeps and operation.sleep:
            self.asleep = [True] * len(self.asleep)
        requests = [Request(prompt, derived_seed(operation.seed, place)) for place, prompt in enumerate(prompts)]
        said = scripted().generate(requests, Sampling(max_new_tokens=2, n=operation.n)) if requests else []
        logprob = fingerprint({name: flat(value) for name, value in self.served.items()})
        ids: list[Plain] = [[list(e.prompt_token_ids), list(e.output_token_ids), e.finish_reason] for e in said]
        return {"completions": ids, "logprobs": [[logprob] * len(each.output_token_ids) for each in said]}

    def _state(self) -> Observation:
        weights: dict[str, Weights] = {name: state.weights for name, state in self.states.items()}
        weights["average"] = self.average
        seen: dict[str, Plain] = {
            f"{m}.{name}": flat(value) for m, own in weights.items() for name, value in own.items()
        }
        seen |= {f"lr of the {name}": state.lr for name, state in self.states.items()}
        if self.per_rank:
            seen["asleep"] = [asleep for asleep in self.asleep for _ in range(self.per_rank)]
            seen["weight updates"] = self.updates
        return seen


def values_of(module: Module) -> Weights:
    """In float64; tied ones once."""
    return {name: parameter.detach().double() for name, parameter in module.named_parameters()}


def mean(values: Sequence[float]) -> float:
    """Their sum by their number."""
    return sum(values) / len(values)


def norm_of(gradient: Weights) -> float:
    """The 2-norm over all parameters."""
    return math.sqrt(sum(float(each.square().sum()) for each in gradient.values()))


def descent(setup: Setup, state: Expected, gradient: Weights) -> None:
    """p <- p - lr g."""
    state.weights = {
        name: value - state.lr * gradient[name] if name in gradient else value for name, value in state.weights.items()
    }


def adamw(setup: Setup, state: Expected, gradient: Weights) -> None:
    """Algorithm 2 of Loshchilov and Hutter, arXiv:1711.05101, without decay of biases (T9)."""
    beta1, beta2 = 0.9, 0.95
    state.moments_of += 1
    weights = dict(state.weights)
    for name, g in gradient.items():
        m = beta1 * state.first.get(name, torch.zeros_like(g)) + (1 - beta1) * g
        v = beta2 * state.second.get(name, torch.zeros_like(g)) + (1 - beta2) * g.square()
        state.first[name], state.second[name] = m, v
        m, v = m / (1 - beta1**state.moments_of), v / (1 - beta2**state.moments_of)
        kept = 1 - state.lr * setup.weight_decay if weights[name].ndim >= 2 else 1.0
        weights[name] = kept * weights[name] - state.lr * m / (v.sqrt() + setup.eps)
    state.weights = weights


def lanes_per_engine(target: Target, setup: Setup) -> int:
    """0 for a target without one."""
    return setup.lanes // target.world_size if "engine" in target.capabilities else 0


def lawful(setup: Setup, operations: Iterable[Operation]) -> Program:
    """Without those that the law leaves open where they stand."""
    oracle, kept = Oracle(setup, per_rank=0), []
    for operation in operations:
        if not oracle.left_open(operation):
            oracle.after(operation)
            kept.append(operation)
    return Program(setup, tuple(kept))
