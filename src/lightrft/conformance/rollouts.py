"""The laws of rollouts (R) that are about ranks and about what engines are sent, on engines that follow a script."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, cast

import torch
from attrs import define, field, frozen
from hypothesis import strategies as st
from torch import Tensor, nn

from lightrft.conformance.checkpoints import with_adapters
from lightrft.conformance.law import Law, Make
from lightrft.conformance.parity import next_token_loss, qwen2
from lightrft.conformance.probes import Recorder, furthest, line, refused, weights
from lightrft.engines.protocol import Capabilities, Completion, Request, Sampling
from lightrft.engines.scripted import ScriptedEngine, scripted
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


def refused_everywhere(strategy: Strategy, says: str, call: Callable[[], object]) -> None:
    """Each rank tells whether it was, so that all of them see where it went through."""
    problem: AssertionError | None = None
    try:
        refused(EngineError, says, call)
    except AssertionError as error:
        problem = error
    through = [rank for rank, fine in enumerate(strategy.all_gather(problem is None)) if not fine]
    assert not through, f"on ranks {through}: {problem or 'not refused as here'}"


def a_failed_update_fails_everywhere(make: Make) -> None:
    """No rank waits for one whose engine refuses, and a later update goes through."""
    strategy, model = trained(make, qwen2())
    last = strategy.get_rank() == strategy.world_size - 1
    engine = Recorder(refuses=last)
    strategy.setup_inference_engine(None, engine_type=engine)
    refused_everywhere(strategy, "no room for", lambda: strategy.update_engine_weights(model))
    engine.refuses = False
    strategy.update_engine_weights(model)
    assert engine.weights.keys() == {name for name, _ in qwen2().named_parameters()}


def prompts_of(rank: int, count: int) -> list[list[int]]:
    """Some of them equal, also between ranks; of lengths that differ."""
    return [[1, *range(rank % 2 + place // 2)] for place in range(count)]


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

    refused_everywhere(strategy, "prompt 1", lambda: ask([]))
    refused_everywhere(strategy, "prompt 1", lambda: ask(["x"]))
    assert len(strategy.gather_and_generate(Sampling(), all_prompt_token_ids=[[1], [2]])) == 2


def groups_that_do_not_fit(make: Make) -> None:
    """Refused on every rank, before anything is set up."""
    world_size = make().world_size
    refused(Exception, "engine_tp_size", lambda: make(train_batch_size=world_size, engine_tp_size=world_size + 1))


def done_since(engine: ScriptedEngine) -> list[str]:
    """What was asked of an engine since this was last called."""
    done: list[str] = list(engine.operations)
    engine.calls.clear()
    return done


def sleeps_once_and_wakes_when_needed(make: Make) -> None:
    strategy = make(train_batch_size=make().world_size)
    engine = scripted()  # asleep, it refuses
    strategy.setup_inference_engine(None, engine_type=engine)
    model = strategy.prepare(line().eval())
    prompts, sampling = [[1, 2], [3]], Sampling(max_new_tokens=3)
    expected = scripted().generate([Request(tuple(prompt)) for prompt in prompts], sampling)
    done_since(engine)
    for asked, operation in (
        (strategy.wakeup_inference_engine, "wake_up"),
        (lambda: strategy.engine_generate_local(sampling, prompts), "generate"),
        (lambda: strategy.gather_and_generate(sampling, all_prompt_token_ids=prompts), "generate"),
        (lambda: strategy.update_engine_weights(model), "update_weights"),
    ):
        strategy.maybe_sleep_inference_engine()
        strategy.maybe_sleep_inference_engine()
        assert asked() in (None, expected)
        strategy.wakeup_inference_engine()
        strategy.wakeup_inference_engine()
        done = done_since(engine)
        assert done.count("sleep") == done.count("wake_up") == 1, f"the engine was asked {done}"
        assert operation in done
    strategy.maybe_sleep_inference_engine()
    refused(EngineError, "prompt 0", lambda: strategy.gather_and_generate(sampling, all_prompt_token_ids=[[]]))
    strategy.maybe_sleep_inference_engine()
    assert strategy.engine_generate_local(sampling, prompts) == expected, "after a generate that failed"


def sleeps_after_a_rollout_where_asked(make: Make) -> None:
    for enabled in (False, True):
        strategy = make(train_batch_size=make().world_size, enable_engine_sleep=enabled)
        engine = scripted()
        strategy.setup_inference_engine(None, engine_type=engine)
        for asked in (False, True):
            done_since(engine)
            strategy.gather_and_generate(Sampling(), all_prompt_token_ids=[[1]], sleep_engine=asked)
            done = done_since(engine)
            assert ("sleep" in done) is (enabled and asked), f"enabled {enabled}, sleep_engine {asked}: {done}"
        awake = scripted(can_sleep=False)
        strategy.setup_inference_engine(None, engine_type=awake)
        for _ in range(2):
            strategy.maybe_sleep_inference_engine()
            strategy.gather_and_generate(Sampling(), all_prompt_token_ids=[[1]])
        assert set(awake.operations) == {"generate"}, "an engine that cannot sleep was put to sleep"


def an_update_forgets_the_old_weights(make: Make) -> None:
    strategy = make(train_batch_size=make().world_size)
    engine = scripted()
    strategy.setup_inference_engine(None, engine_type=engine)
    model = strategy.prepare(line(1.0, bias=0.0).eval())
    for _ in range(2):
        done_since(engine)
        strategy.update_engine_weights(model)
        assert engine.calls[0].names == ("weight", "bias"), f"the engine was sent {engine.calls[0].names}"
        assert done_since(engine) == ["update_weights", "flush_cache"], "a cache of the old weights survives"


def one_kind_of_input(make: Make) -> None:
    strategy = make(train_batch_size=make().world_size)
    strategy.setup_inference_engine(None, engine_type=scripted())
    ask, ids = strategy.engine_generate_local, [[1, 2]]
    refused(ValueError, "", lambda: ask(Sampling()))
    refused(ValueError, "", lambda: ask(Sampling(), ids, [{"prompt_token_ids": [1, 2]}]))
    assert ask(Sampling(seed=3), ids) == ask(Sampling(seed=3), None, [{"prompt_token_ids": [1, 2]}])


def without_an_engine_all_is_empty(make: Make) -> None:
    """For what has no engine: a trainer goes through the same lines as with one."""
    strategy = make(train_batch_size=make().world_size)
    if strategy.setup_inference_engine(None, engine_type=scripted()) is not None:
        return
    strategy.update_engine_weights(line())
    strategy.maybe_sleep_inference_engine()
    strategy.wakeup_inference_engine()
    assert strategy.engine_generate_local(Sampling(), [[1]]) == []
    assert strategy.gather_and_generate(Sampling(), all_prompt_token_ids=[[1], [2]]) == []


@frozen
class Processor:
    """What stands for an image in a prompt."""

    image_token_id: int = 99


@define(eq=False)
class Viewer:
    """An engine that keeps what it is asked."""

    asked: list[Request] = field(factory=list)
    name: str = "viewer"
    capabilities: Capabilities = Capabilities(multimodal=True)
    processor: Processor = Processor()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """One token for each."""
        self.asked = list(requests)
        return [Completion(one.prompt_token_ids, (1,), None, "length") for one in requests for _ in range(sampling.n)]

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Has none."""

    def flush_cache(self) -> None:
        """Has none."""

    def sleep(self, level: int = 1) -> None:
        """Has nothing to free."""

    def wake_up(self, *, weights_only: bool = False) -> None:
        """Is awake."""

    def close(self) -> None:
        """Holds nothing."""


def images_go_with_their_prompts(make: Make) -> None:
    """Nested or flat; placeholders stay as many as there are images, and go where there is none."""
    strategy = make(train_batch_size=make().world_size)
    engine = Viewer()
    strategy.setup_inference_engine(None, engine_type=engine)
    cases: tuple[tuple[list[list[int]], list[object], list[int] | None, list[tuple[tuple[int, ...], object]]], ...] = (
        ([[1, 99, 2], [3, 99, 4]], [["a"], None], None, [((1, 99, 2), ("a",)), ((3, 4), ())]),
        ([[3, 99, 4], [1, 99, 2]], [[], ["a"]], None, [((3, 4), ()), ((1, 99, 2), ("a",))]),
        ([[99, 1], [99, 99, 2]], ["a", "b", "c"], [1, 2], [((99, 1), ("a",)), ((99, 99, 2), ("b", "c"))]),
        ([[1, 99], [99, 2]], [None, None], None, [((1, 99), ()), ((99, 2), ())]),
    )
    for prompts, images, counts, expected in cases:
        strategy.gather_and_generate(Sampling(), all_prompt_token_ids=prompts, all_images=images, images_num=counts)
        found = [(one.prompt_token_ids, one.images) for one in engine.asked]
        assert found == expected, f"images {images} of {prompts} became {found}"

    def ask(images: list[object], counts: list[int] | None = None) -> None:
        strategy.gather_and_generate(
            Sampling(), all_prompt_token_ids=[[1, 99], [2, 99, 99]], all_images=images, images_num=counts
        )

    refused(ValueError, "1 entries for 2 prompts", lambda: ask([["a"]]))
    refused(ValueError, "adds up to 3", lambda: ask(["a", "b"], [1, 2]))
    refused(ValueError, "1", lambda: ask([["a"], ["b"]]))


LAWS = (
    Law("R2 FC32 FC33: adapters reach the engine merged, and stay as they are", adapters_arrive_merged, needs="engine"),
    Law("R2: a failed update fails on every rank, and the next one goes through", a_failed_update_fails_everywhere,
        needs="engine"),
    Law("R1 FC36 FC37 FC38 FC42: completions of one's own prompts", completions_of_ones_own_prompts,
        {"counts": st.lists(st.integers(0, 3), min_size=1, max_size=4), "n": st.integers(1, 3), "shared": st.booleans(),
         "seed": st.integers(0, 9)}, needs="engine"),
    Law("R5: a bad prompt is an error on every rank", a_bad_prompt_is_bad_everywhere, needs="engine"),
    Law("C7: engines of ranks that are not there are refused", groups_that_do_not_fit),
    Law("R4 FC12 FC35: sleeps once, wakes once, and by itself where it is needed", sleeps_once_and_wakes_when_needed,
        needs="engine"),
    Law("R4: sleeps after a rollout where that is asked for", sleeps_after_a_rollout_where_asked, needs="engine"),
    Law("R2 FC11: an update forgets what older weights computed", an_update_forgets_the_old_weights, needs="engine"),
    Law("R5: exactly one kind of input", one_kind_of_input, needs="engine"),
    Law("R6 FC13 FC39 FC47: images go with their prompts", images_go_with_their_prompts, needs="engine"),
    Law("F1: without an engine all is empty", without_an_engine_all_is_empty),
)  # fmt: skip
