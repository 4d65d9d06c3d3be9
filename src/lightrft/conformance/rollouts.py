"""The laws of rollouts (R) that are about ranks and about what engines are sent, on engines that follow a script."""

from __future__ import annotations

from typing import Protocol, cast

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from lightrft.conformance.checkpoints import with_adapters
from lightrft.conformance.law import Law, Make
from lightrft.conformance.parity import next_token_loss, qwen2
from lightrft.conformance.probes import Recorder, furthest, refused, weights
from lightrft.engines.protocol import Capabilities, Request, Sampling
from lightrft.engines.scripted import scripted
from lightrft.errors import EngineError
from lightrft.ops.seeds import derived_seed
from lightrft.strategy.protocol import Strategy

IDS = (2, 9)


def trained(make: Make, model: nn.Module, steps: int = 2, **fields: object) -> tuple[Strategy, nn.Module]:
    """A language model after so many updates."""
    strategy = make(train_batch_size=make().world_size, **fields)
    model, optimizer = strategy.prepare((model, strategy.create_optimizer(model, lr=1e-2)))
    ids = torch.randint(0, 64, IDS, generator=torch.Generator().manual_seed(strategy.get_rank()))
    for _ in range(steps):
        strategy.backward(next_token_loss(model, ids), model, optimizer)
        assert strategy.optimizer_step(optimizer, model).applied
    return strategy, model


def raw_weights(strategy: Strategy, model: nn.Module) -> dict[str, Tensor]:
    """Every parameter by its own name, adapters and all: what an engine is shown that shares the trainer's."""
    sharing = Recorder(capabilities=Capabilities(shares_weights=True))
    strategy.setup_inference_engine(None, engine_type=sharing)
    strategy.update_engine_weights(model)
    return sharing.weights


class Merges(Protocol):
    """A PEFT model."""

    def merge_and_unload(self) -> nn.Module: ...


def adapters_arrive_merged(make: Make) -> None:
    """By the names of the plain model, as PEFT's own ``merge_and_unload`` computes it; what is trained stays as it was."""
    strategy, model = trained(make, with_adapters(qwen2()))
    raw = raw_weights(strategy, model)
    assert any("lora_A" in name for name in raw)
    again = with_adapters(qwen2())
    missing, unexpected = again.load_state_dict(raw, strict=False)
    assert not unexpected, f"{unexpected} are no parameters of the model"
    assert not set(missing) & {name for name, _ in again.named_parameters()}, f"{missing} did not come"
    merged = cast(Merges, again).merge_and_unload()
    sent = weights(strategy, model)
    expected = {name: parameter.detach() for name, parameter in merged.named_parameters()}
    assert sent.keys() == expected.keys(), f"{sorted(sent.keys() ^ expected.keys())} are on one side only"
    difference = furthest(sent, expected)
    assert difference <= 1e-6, f"the merged weights differ by {difference}"
    after = raw_weights(strategy, model)
    assert all(torch.equal(raw[name], after[name]) for name in raw), "merging has changed what is trained"


def a_failed_update_fails_everywhere(make: Make) -> None:
    """No rank waits for one whose engine refuses, and a later update goes through."""
    strategy, model = trained(make, qwen2())
    last = strategy.get_rank() == strategy.world_size - 1
    engine = Recorder(refuses=last)
    strategy.setup_inference_engine(None, engine_type=engine)
    refused(EngineError, "no room for", lambda: strategy.update_engine_weights(model))
    engine.refuses = False
    strategy.update_engine_weights(model)
    assert engine.weights.keys() == {name for name, _ in qwen2().named_parameters()}


def prompts_of(rank: int, count: int) -> list[list[int]]:
    """Some of them equal, also between ranks; of lengths that differ."""
    return [[1 + place % 2, *range(rank % 2 + place % 3)] for place in range(count)]


def completions_of_ones_own_prompts(make: Make, counts: list[int], n: int, shared: bool, seed: int) -> None:
    """Each rank gets what an engine says that is asked all prompts of all ranks at once, its own part of it."""
    world_size = make().world_size
    counts = [counts[rank % len(counts)] for rank in range(world_size)]
    strategy = make(train_batch_size=world_size, engine_tp_size=world_size if shared else 1)
    engine = scripted()
    strategy.setup_inference_engine(None, engine_type=engine)
    rank, sampling = strategy.get_rank(), Sampling(max_new_tokens=3, n=n, seed=seed)
    mine = prompts_of(rank, counts[rank])
    got = strategy.gather_and_generate(sampling, all_prompt_token_ids=mine)
    everyones = [prompt for each in range(world_size) for prompt in prompts_of(each, counts[each])]
    asked = [Request(tuple(prompt), derived_seed(sampling.seed or 0, place)) for place, prompt in enumerate(everyones)]
    before = sum(counts[:rank])
    expected = scripted().generate(asked[before : before + len(mine)], sampling) if mine else []
    assert got == expected, f"counts {counts}: {got}, not {expected}"
    seen = [prompt for call in engine.calls for prompt in call.prompts]
    own = [tuple(prompt) for prompt in (everyones if shared else mine)]
    assert seen == own, f"the engine was asked {seen}, not {own}"


def a_bad_prompt_is_bad_everywhere(make: Make) -> None:
    """The rank that has it is told which; the others are told which rank."""
    strategy = make(train_batch_size=make().world_size)
    strategy.setup_inference_engine(None, engine_type=scripted())
    last = strategy.get_rank() == strategy.world_size - 1

    def ask(second: object) -> None:
        strategy.gather_and_generate(Sampling(), cast("list[list[int]]", [[1], second if last else [2]]))

    refused(EngineError, "prompt 1", lambda: ask([]))
    refused(EngineError, "prompt 1", lambda: ask(["x"]))
    assert len(strategy.gather_and_generate(Sampling(), all_prompt_token_ids=[[1], [2]])) == 2


def groups_that_do_not_fit(make: Make) -> None:
    """Refused on every rank, before anything is set up."""
    world_size = make().world_size
    refused(Exception, "engine_tp_size", lambda: make(train_batch_size=world_size, engine_tp_size=world_size + 1))


LAWS = (
    Law("R2 FC32 FC33: adapters reach the engine merged, and stay as they are", adapters_arrive_merged, needs_engine=True),
    Law("R2: a failed update fails on every rank, and the next one goes through", a_failed_update_fails_everywhere,
        needs_engine=True),
    Law("R1 FC36 FC37 FC38 FC42: completions of one's own prompts", completions_of_ones_own_prompts,
        {"counts": st.lists(st.integers(0, 3), min_size=1, max_size=4), "n": st.integers(1, 3), "shared": st.booleans(),
         "seed": st.integers(0, 9)}, needs_engine=True),
    Law("R5: a bad prompt is an error on every rank", a_bad_prompt_is_bad_everywhere, needs_engine=True),
    Law("C7: engines of ranks that are not there are refused", groups_that_do_not_fit),
)  # fmt: skip
