"""The engine ``hf`` on a small random Qwen2: log-probabilities, order, stops, seeds, and the module as it was before."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed

from lightrft.engines.hf import HfEngine, batches, hf, hf_copy
from lightrft.engines.hf_sampling import (
    Sampler,
    Watcher,
    end_of,
    generation_config,
    hugging_face_config,
    row_seeds,
    uniforms,
    warpers,
)
from lightrft.engines.protocol import Completion, Engine, Request, Sampling
from lightrft.engines.registry import is_sharded, make_engine
from lightrft.errors import EngineError, UnsupportedOperation
from lightrft.ops.composition import run_state
from lightrft.ops.models import named_weights
from lightrft.ops.world import World
from lightrft.strategy.config import StrategyConfig

pytest.importorskip("transformers")

VOCABULARY = 128
LIMIT = 64
PROMPTS = [(3, 5, 8), (9,), (7, 7, 1, 2, 60, 100, 4), (9,), (11, 12), (3, 5, 8)]


@cache
def tiny() -> Any:  # transformers leaves most of a model untyped
    """Random, but with logits far enough apart that a wrong mask or position shows, and dropout that would show too."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=LIMIT,
        attention_dropout=0.5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
    return model


def fresh() -> Any:
    return copy.deepcopy(tiny())


class Letters:
    """A tokenizer of one character a token."""

    eos_token_id: int | list[int] | None = None

    def decode(self, token_ids: list[int], /) -> str:
        return "".join(map(chr, token_ids))

    def encode(self, text: str, /, *, add_special_tokens: bool) -> list[int]:
        return list(map(ord, text))


def requests(prompts: Sequence[Sequence[int]]) -> list[Request]:
    return [Request(prompt) for prompt in prompts]


def teacher_forced(model: Any, completion: Completion, temperature: float) -> torch.Tensor:
    """Log-probabilities of the output, from one forward of the whole sequence, alone and unpadded."""
    start = len(completion.prompt_token_ids)
    ids = torch.tensor([completion.prompt_token_ids + completion.output_token_ids])
    model.eval()
    with torch.no_grad():
        logprobs = (model(input_ids=ids).logits[0] / temperature).log_softmax(-1)
    drawn: torch.Tensor = logprobs[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0]
    return drawn


def greedy_alone(model: Any, prompt: Sequence[int], new_tokens: int) -> tuple[int, ...]:
    """Greedy decoding without a cache, a batch or ``generate``."""
    ids = list(prompt)
    model.eval()
    with torch.no_grad():
        for _ in range(new_tokens):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return tuple(ids[len(prompt) :])


def outputs(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [completion.output_token_ids for completion in completions]


prompt_lists = st.lists(
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12).map(tuple), min_size=1, max_size=4
).flatmap(lambda some: st.lists(st.sampled_from(some), min_size=1, max_size=5))


@settings(max_examples=10)
@given(
    prompts=prompt_lists,
    n=st.integers(1, 3),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    share=st.booleans(),
    batch_tokens=st.sampled_from([30, 10_000]),
    top_p=st.sampled_from([1.0, 0.6]),
    top_k=st.sampled_from([0, 5]),
)
def test_R1_R8_completions_in_order_with_the_models_own_logprobs(
    prompts: list[tuple[int, ...]],
    n: int,
    temperature: float,
    share: bool,
    batch_tokens: int,
    top_p: float,
    top_k: int,
) -> None:
    engine = hf(tiny(), share_prefill=share, batch_tokens=batch_tokens)
    sampling = Sampling(max_new_tokens=4, n=n, temperature=temperature, top_p=top_p, top_k=top_k)
    completions = engine.generate(requests(prompts), sampling)
    assert [one.prompt_token_ids for one in completions] == [prompt for prompt in prompts for _ in range(n)]
    for completion in completions:
        assert len(completion.output_token_ids) == 4
        assert completion.finish_reason == "length"
        assert completion.logprobs is not None
        expected = teacher_forced(tiny(), completion, temperature)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)


@settings(max_examples=10)
@given(prompts=prompt_lists, share=st.booleans(), batch_tokens=st.sampled_from([20, 10_000]))
def test_R7_greedy_in_ragged_batches_equals_greedy_alone(
    prompts: list[tuple[int, ...]], share: bool, batch_tokens: int
) -> None:
    engine = hf(tiny(), share_prefill=share, batch_tokens=batch_tokens)
    completions = engine.generate(requests(prompts), Sampling(max_new_tokens=5, temperature=0.0))
    assert outputs(completions) == [greedy_alone(tiny(), prompt, 5) for prompt in prompts]
    for completion in completions:  # greedy log-probabilities are those at temperature 1
        expected = teacher_forced(tiny(), completion, 1.0)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)


def test_R7_greedy_equals_hugging_face_one_by_one() -> None:
    model = tiny()
    completions = hf(model).generate(requests(PROMPTS), Sampling(max_new_tokens=6, temperature=0.0))
    model.eval()
    alone = [model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False) for prompt in PROMPTS]
    assert outputs(completions) == [
        tuple(ids[0, len(prompt) :].tolist()) for prompt, ids in zip(PROMPTS, alone, strict=True)
    ]


def test_R7_shared_prefill_changes_no_token() -> None:
    sampling = Sampling(max_new_tokens=6, n=4, seed=5)
    shared = hf(tiny()).generate(requests(PROMPTS), sampling)
    naive = hf(tiny(), share_prefill=False).generate(requests(PROMPTS), sampling)
    assert outputs(shared) == outputs(naive)
    for one, other in zip(shared, naive, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_R7_shared_prefill_reads_each_distinct_prompt_once() -> None:
    model = fresh()
    shapes: list[tuple[int, ...]] = []
    model.model.embed_tokens.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape)))
    hf(model).generate(requests([(1, 2, 3), (4, 5), (1, 2, 3)]), Sampling(max_new_tokens=2, n=4))
    assert shapes == [(2, 2), (12, 1), (12, 1)]


def test_R7_a_seed_repeats_and_leaves_the_trainers_random_numbers_alone() -> None:
    engine = hf(tiny())
    sampling = Sampling(max_new_tokens=6, n=3, seed=11, temperature=2.0)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first = engine.generate(requests(PROMPTS), sampling)
    torch.testing.assert_close(torch.rand(3), expected, atol=0, rtol=0)
    assert engine.generate(requests(PROMPTS), sampling) == first
    other = Sampling(max_new_tokens=6, n=3, seed=12, temperature=2.0)
    assert outputs(engine.generate(requests(PROMPTS), other)) != outputs(first)


def test_R7_without_a_seed_it_draws_from_the_ordinary_random_numbers() -> None:
    engine, sampling = hf(tiny()), Sampling(max_new_tokens=6, temperature=2.0)
    torch.manual_seed(1)
    first, second = (engine.generate(requests(PROMPTS), sampling) for _ in range(2))
    torch.manual_seed(1)
    assert engine.generate(requests(PROMPTS), sampling) == first != second


seeded_requests = st.lists(
    st.builds(
        Request, st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=9).map(tuple), st.integers(0, 2**63 - 1)
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=15)
@given(
    some=seeded_requests,
    n=st.integers(1, 3),
    split=st.integers(0, 6),
    batch_tokens=st.sampled_from([1, 30, 60, 10_000]),
    share=st.booleans(),
    top_p=st.sampled_from([1.0, 0.9]),
    data=st.data(),
)
def test_R7_R8_a_seeded_request_draws_the_same_in_any_call_batch_and_order(
    some: list[Request], n: int, split: int, batch_tokens: int, share: bool, top_p: float, data: st.DataObject
) -> None:
    sampling = Sampling(max_new_tokens=5, n=n, temperature=2.0, top_p=top_p, seed=1)
    expected = outputs(hf(tiny()).generate(some, sampling))
    engine = hf(tiny(), batch_tokens=batch_tokens, share_prefill=share)
    in_two = engine.generate(some[:split], sampling) + engine.generate(
        some[split:], Sampling(max_new_tokens=5, n=n, temperature=2.0, top_p=top_p, seed=2)
    )
    assert outputs(in_two) == expected
    order = data.draw(st.permutations(range(len(some))))
    permuted = outputs(engine.generate([some[index] for index in order], sampling))
    for place, index in enumerate(order):
        assert permuted[place * n : (place + 1) * n] == expected[index * n : (index + 1) * n]


@settings(max_examples=8)
@given(prompts=prompt_lists, batch_tokens=st.sampled_from([1, 30, 60]))
def test_R7_the_calls_seed_draws_the_same_in_any_batch(prompts: list[tuple[int, ...]], batch_tokens: int) -> None:
    sampling = Sampling(max_new_tokens=5, n=2, temperature=2.0, seed=3)
    split = hf(tiny(), batch_tokens=batch_tokens).generate(requests(prompts), sampling)
    assert outputs(split) == outputs(hf(tiny()).generate(requests(prompts), sampling))


def test_R7_a_longer_completion_begins_like_a_shorter_one_and_rows_that_end_early_change_no_other() -> None:
    engine = hf(tiny())
    seeded = [Request(prompt, seed) for seed, prompt in enumerate(PROMPTS)]
    long = outputs(engine.generate(seeded, Sampling(max_new_tokens=8, temperature=2.0)))
    short = outputs(engine.generate(seeded, Sampling(max_new_tokens=3, temperature=2.0)))
    assert short == [output[:3] for output in long]
    alone = [engine.generate([one], Sampling(max_new_tokens=3, temperature=2.0)) for one in seeded]
    assert short == [outputs(one)[0] for one in alone]
    stop = long[0][1]
    for free, stopped in zip(
        long,
        outputs(engine.generate(seeded, Sampling(max_new_tokens=8, temperature=2.0, stop_token_ids=[stop]))),
        strict=True,
    ):
        assert stopped == free[: free.index(stop) + 1 if stop in free else 8]


def test_R7_the_requests_seed_goes_before_the_calls_and_every_row_has_its_own() -> None:
    def seeds(some: Sequence[Request], seed: int | None) -> list[int]:
        return row_seeds(some, Sampling(n=2, seed=seed))

    plain, own = Request((1,)), Request((1,), 7)
    assert seeds([own, plain], 1)[:2] == seeds([plain, own], 2)[2:] == seeds([own], None)
    assert seeds([own, plain], 1)[2:] == seeds([plain, plain], 1)[2:] != seeds([plain, plain], 2)[2:]
    assert len({*seeds([own, plain, plain], 1), *seeds([Request((1,), 8)], 1), *seeds([plain], 7)}) == 10


def test_R7_only_an_unseeded_draw_advances_the_trainers_random_numbers() -> None:
    engine = hf(tiny())

    def advances(some: Sequence[Request], sampling: Sampling) -> bool:
        torch.manual_seed(1)
        before = torch.get_rng_state()
        engine.generate(some, sampling)
        return not torch.equal(torch.get_rng_state(), before)

    plain, own = Request((1, 2)), Request((1, 2), 7)
    assert advances([own, plain], Sampling(max_new_tokens=2))
    assert not advances([own, own], Sampling(max_new_tokens=2))
    assert not advances([own, plain], Sampling(max_new_tokens=2, seed=0))
    assert not advances([plain], Sampling(max_new_tokens=2, temperature=0.0))


def test_R7_transformers_has_nothing_to_warn_of() -> None:
    config = generation_config(Sampling(temperature=0.5, top_p=0.9, top_k=5), ())
    config.validate(strict=True)
    assert config.do_sample is False


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), (0.02, 0.08, 0.3, 0.2, 0.0, 0.4)),
        (Sampling(top_k=2), (0.0, 0.0, 0.3 / 0.7, 0.0, 0.0, 0.4 / 0.7)),
        (Sampling(top_p=0.85), (0.0, 0.0, 0.3 / 0.9, 0.2 / 0.9, 0.0, 0.4 / 0.9)),
        (Sampling(temperature=0.5), (0.0004 / 0.2968, 0.0064 / 0.2968, 0.09 / 0.2968, 0.04 / 0.2968, 0, 0.16 / 0.2968)),
        (Sampling(temperature=0.5, top_k=3, top_p=0.8), (0.0, 0.0, 0.36, 0.0, 0.0, 0.64)),
    ],
)
def test_R7_what_is_drawn_has_the_stated_distribution(sampling: Sampling, expected: tuple[float, ...]) -> None:
    rows = 20_000
    scores = torch.tensor([0.02, 0.08, 0.3, 0.2, 0.0, 0.4]).log().expand(rows, -1)
    ids = torch.zeros(rows, 4, dtype=torch.long)
    for warp in warpers(sampling):
        scores = warp(ids, scores)
    sampler = Sampler(uniforms(range(rows), 3), prompt_length=2)
    counts = torch.bincount(sampler(ids, scores).argmax(-1), minlength=6).double()
    wanted = torch.tensor(expected, dtype=torch.float64) * rows
    possible = wanted > 0
    assert counts[~possible].sum() == 0
    chi_square = float(((counts - wanted)[possible] ** 2 / wanted[possible]).sum())
    assert chi_square < 20.5  # of at most 4 degrees of freedom: exceeded with probability 0.0004


def test_R7_no_random_number_falls_on_a_token_that_cannot_be_drawn() -> None:
    inf = torch.inf
    scores = torch.tensor([[-inf, 0.0, -inf, 0.5, 0.1, -inf]]).expand(2, -1)
    sampler = Sampler(torch.tensor([[0.5, 0.0], [0.5, 1 - 2**-53]], dtype=torch.float64), prompt_length=1)
    drawn = sampler(torch.zeros(2, 2, dtype=torch.long), scores)  # the second step
    assert drawn.argmax(-1).tolist() == [1, 4]
    assert drawn.isfinite().sum(-1).tolist() == [1, 1]
    sampler.check()


def test_R7_each_step_of_each_row_has_a_random_number_of_its_own() -> None:
    numbers = uniforms([3, 4], 100)
    assert numbers.dtype == torch.float64
    assert len(set(numbers.flatten().tolist())) == 200
    assert torch.equal(uniforms([4], 7), numbers[1:, :7])


def test_R7_logits_that_are_not_finite_are_refused() -> None:
    model = fresh()
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(EngineError, match="not finite"):
        hf(model).generate(requests(PROMPTS), Sampling(max_new_tokens=2))


def test_FC36_FC37_equal_prompts_and_n_each_get_their_own_samples() -> None:
    a, b = (3, 5, 8), (9, 2)
    engine = hf(tiny())
    greedy = engine.generate(requests([a, a, b]), Sampling(max_new_tokens=3, temperature=0.0))
    assert [one.prompt_token_ids for one in greedy] == [a, a, b]
    sampled = engine.generate(requests([b, a]), Sampling(max_new_tokens=8, n=3, temperature=3.0, seed=0))
    assert [one.prompt_token_ids for one in sampled] == [b, b, b, a, a, a]
    assert len(set(outputs(sampled))) == 6


def test_R7_top_k_of_one_is_greedy_and_a_tiny_top_p_too() -> None:
    engine = hf(tiny())
    greedy = outputs(engine.generate(requests(PROMPTS), Sampling(max_new_tokens=5, temperature=0.0)))
    assert outputs(engine.generate(requests(PROMPTS), Sampling(max_new_tokens=5, top_k=1))) == greedy
    assert outputs(engine.generate(requests(PROMPTS), Sampling(max_new_tokens=5, top_p=1e-6))) == greedy


def test_R7_sampling_follows_the_distribution_at_the_temperature() -> None:
    prompt, draws = (3, 5, 8), 4000
    completions = hf(tiny()).generate([Request(prompt)], Sampling(max_new_tokens=1, n=draws, temperature=3.0, seed=0))
    with torch.no_grad():
        expected = (tiny().eval()(input_ids=torch.tensor([prompt])).logits[0, -1] / 3.0).softmax(-1)
    counts = torch.bincount(torch.tensor(outputs(completions)).flatten(), minlength=VOCABULARY)
    assert float((counts / draws - expected).abs().sum()) < 0.2


def test_R7_stop_tokens_end_a_completion_and_stay_in_it() -> None:
    engine = hf(tiny())
    free = engine.generate(requests(PROMPTS), Sampling(max_new_tokens=8, temperature=0.0))
    stop = free[0].output_token_ids[3]
    stopped = engine.generate(requests(PROMPTS), Sampling(max_new_tokens=8, temperature=0.0, stop_token_ids=[stop]))
    for long, short in zip(free, stopped, strict=True):
        assert long.logprobs is not None
        end = long.output_token_ids.index(stop) + 1 if stop in long.output_token_ids else 8
        assert short.output_token_ids == long.output_token_ids[:end]
        assert short.logprobs == pytest.approx(long.logprobs[:end], abs=1e-5)
        assert short.finish_reason == ("stop" if stop in long.output_token_ids else "length")
    assert {one.finish_reason for one in stopped} == {"stop", "length"}


def test_R7_end_of_sequence_tokens_of_model_and_tokenizer_stop_too() -> None:
    model, tokenizer = fresh(), Letters()
    sampling = Sampling(max_new_tokens=8, temperature=3.0, seed=0)
    free = hf(model).generate([Request(PROMPTS[0])], sampling)[0].output_token_ids
    assert len(set(free)) == 8
    model.generation_config.eos_token_id = [free[5], 0]
    tokenizer.eos_token_id = free[2]
    assert hf(model, tokenizer).eos_token_ids == (free[5], 0, free[2])
    for engine, end in ((hf(model), 6), (hf(model, tokenizer), 3)):
        (ended,) = engine.generate([Request(PROMPTS[0])], sampling)
        assert (ended.output_token_ids, ended.finish_reason) == (free[:end], "stop")


def test_R7_a_stop_string_ends_at_the_token_that_completes_it() -> None:
    engine = hf(tiny(), Letters())
    sampling = Sampling(max_new_tokens=10, temperature=0.0)
    free = engine.generate(requests(PROMPTS), sampling)
    stop = "".join(map(chr, free[2].output_token_ids[3:5]))
    stopped = engine.generate(requests(PROMPTS), Sampling(max_new_tokens=10, temperature=0.0, stop=stop))
    for long, short in zip(free, stopped, strict=True):
        where = "".join(map(chr, long.output_token_ids)).find(stop)
        end = 10 if where < 0 else where + 2
        assert short.output_token_ids == long.output_token_ids[:end]
        assert short.logprobs is not None
        assert len(short.logprobs) == end
        assert short.finish_reason == ("length" if where < 0 else "stop")
    assert stopped[2].finish_reason == "stop"


def test_R7_a_stop_string_in_the_prompt_does_not_count_and_the_window_is_wide_enough() -> None:
    watcher = Watcher(Letters(), ("abc",), prompt_length=3)
    prompt = list(map(ord, "abc"))
    for text, ended in (("x", False), ("xa", False), ("xab", False), ("xabc", True), ("xabcd", True)):
        assert watcher(torch.tensor([prompt + list(map(ord, text))]), None).tolist() == [ended]
    assert watcher.ended == {0: 4}
    long = Watcher(Letters(), ("y" * 30,), prompt_length=0)
    assert long(torch.tensor([list(map(ord, "x" * 50 + "y" * 30))]), None).tolist() == [True]


def test_R7_the_earlier_of_two_stops_counts() -> None:
    assert end_of([5, 6, 7, 6], frozenset({6}), 3) == (2, "stop")
    assert end_of([5, 6, 7, 6], frozenset({6}), 1) == (1, "stop")
    assert end_of([5, 6, 7], frozenset(), None) == (3, "length")


def test_R8_no_logprobs_unless_asked_for() -> None:
    plain = hf(tiny()).generate(requests(PROMPTS), Sampling(max_new_tokens=3, seed=1, logprobs=False))
    asked = hf(tiny()).generate(requests(PROMPTS), Sampling(max_new_tokens=3, seed=1))
    assert {one.logprobs for one in plain} == {None}
    assert outputs(plain) == outputs(asked)


def test_R5_no_prompts_give_no_completions() -> None:
    assert hf(tiny()).generate([], Sampling()) == []


@pytest.mark.parametrize("fails", [False, True])
def test_R7_the_module_is_afterwards_what_it_was(fails: bool) -> None:
    model = fresh()
    model.train()
    model.model.layers[1].eval()
    model.generation_config = hugging_face_config(top_p=0.1, temperature=0.1, repetition_penalty=9.0)
    config, before = model.generation_config, model.generation_config.to_dict()
    modes = [module.training for module in model.modules()]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if fails:
        model.lm_head.register_forward_pre_hook(lambda module, args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            hf(model).generate(requests(PROMPTS), Sampling())
    else:
        hf(model).generate(requests(PROMPTS), Sampling(n=2))
    assert [module.training for module in model.modules()] == modes
    assert model.generation_config is config
    assert config.to_dict() == before
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name])


def test_R7_a_generation_config_shipped_with_the_model_does_not_leak_into_ours() -> None:
    model = fresh()
    plain = hf(model).generate(requests(PROMPTS), Sampling(max_new_tokens=6, n=3, seed=3))
    greedy = hf(model).generate(requests(PROMPTS), Sampling(max_new_tokens=6, temperature=0.0))
    banned = plain[0].output_token_ids[0]
    model.generation_config = hugging_face_config(
        do_sample=True,
        top_p=0.1,
        top_k=3,
        temperature=0.2,
        repetition_penalty=5.0,
        suppress_tokens=[banned],
        min_new_tokens=6,
        max_length=5,
        num_return_sequences=2,
    )
    engine = hf(model)
    assert engine.generate(requests(PROMPTS), Sampling(max_new_tokens=6, n=3, seed=3)) == plain
    assert engine.generate(requests(PROMPTS), Sampling(max_new_tokens=6, temperature=0.0)) == greedy


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_R7_works_with_gradient_checkpointing_and_without_a_configured_cache() -> None:
    model = fresh()
    expected = hf(model).generate(requests(PROMPTS), Sampling(max_new_tokens=4, n=2, seed=3))
    model.gradient_checkpointing_enable()
    model.config.use_cache = False
    model.train()
    assert hf(model).generate(requests(PROMPTS), Sampling(max_new_tokens=4, n=2, seed=3)) == expected
    assert model.is_gradient_checkpointing
    assert model.config.use_cache is False


def test_R2_the_trainer_can_train_after_a_rollout_and_the_engine_sees_it() -> None:
    model = fresh()
    engine = hf(model)
    model.train()
    before = engine.generate(requests(PROMPTS), Sampling(max_new_tokens=4, temperature=0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loss = model(input_ids=torch.tensor([PROMPTS[0]]), labels=torch.tensor([PROMPTS[0]])).loss
    loss.backward()
    optimizer.step()
    engine.update_weights((name, parameter.detach()) for name, parameter in model.named_parameters())
    engine.flush_cache()
    after = engine.generate(requests(PROMPTS), Sampling(max_new_tokens=4, temperature=0.0))
    assert before != after
    for completion in after:
        expected = teacher_forced(model, completion, 1.0)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)


def test_R2_FC32_names_and_tensors_that_are_not_the_modules_are_refused() -> None:
    engine = hf(tiny())
    engine.update_weights(tiny().state_dict().items())  # the tied head by its second name too
    with pytest.raises(EngineError, match=r"_orig_mod\.lm_head\.weight"):
        engine.update_weights([("_orig_mod.lm_head.weight", tiny().lm_head.weight)])
    with pytest.raises(EngineError, match="another module's"):
        engine.update_weights(fresh().state_dict().items())


@pytest.mark.parametrize(
    ("prompts", "sampling", "says"),
    [
        ([(1,), ()], Sampling(), r"prompt 1: is empty"),
        ([(1,), (2, VOCABULARY)], Sampling(), r"prompt 1: token id 128 .* vocabulary of 128"),
        ([(1,), (2,), (-1,)], Sampling(), r"prompt 2: token id -1"),
        ([(1,) * 61], Sampling(max_new_tokens=4), r"prompt 0: 61 tokens and max_new_tokens=4 .* 64"),
        ([(1,) * 70], Sampling(max_new_tokens=1), r"prompt 0: 70 tokens"),
        ([(1,)], Sampling(temperature=0.0, n=2), r"n=2 at temperature 0"),
        ([(1,)], Sampling(stop=["a", ""]), r"empty string"),
        ([(1,)], Sampling(stop="a"), r"stop=\('a',\) needs a tokenizer"),
    ],
)
def test_R5_bad_requests_are_refused_by_index_before_anything_runs(
    prompts: list[tuple[int, ...]], sampling: Sampling, says: str
) -> None:
    model = fresh()
    model.register_forward_pre_hook(lambda module, args: pytest.fail("the model ran"))
    with pytest.raises(EngineError, match=says):
        hf(model).generate(requests(prompts), sampling)


def test_R5_a_prompt_that_just_fits_is_served_and_a_given_limit_goes_before_the_models() -> None:
    assert len(hf(tiny()).generate([Request((1,) * 60)], Sampling(max_new_tokens=4))) == 1
    with pytest.raises(EngineError, match="limit of 8"):
        hf(tiny(), max_model_len=8).generate([Request((1,) * 5)], Sampling(max_new_tokens=4))


@given(prompts=prompt_lists, new_tokens=st.integers(1, 8), limit=st.integers(1, 60))
def test_R1_batches_hold_every_row_once_and_are_bounded(
    prompts: list[tuple[int, ...]], new_tokens: int, limit: int
) -> None:
    made = list(batches(prompts, new_tokens, limit))
    assert sorted(index for batch in made for index in batch) == list(range(len(prompts)))
    lengths = [[len(prompts[index]) for index in batch] for batch in made]
    assert [length for batch in lengths for length in batch] == sorted(map(len, prompts))
    assert all(len(batch) == 1 or len(batch) * (max(batch) + new_tokens) <= limit for batch in lengths)


def test_S2_what_hf_cannot_do_or_be_made_from_is_said() -> None:
    engine: Engine = hf(tiny())
    assert isinstance(engine, HfEngine)
    with pytest.raises(UnsupportedOperation, match="hf"):
        engine.sleep()
    engine.wake_up()
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="Linear"):
        hf(torch.nn.Linear(2, 2))
    with pytest.raises(EngineError, match="batch_tokens=0"):
        hf(tiny(), batch_tokens=0)


# --------------------------------------------------------------------------------------------- a copy of the model


def assert_same(some: Sequence[Completion], others: Sequence[Completion]) -> None:
    """The last digits depend on where in memory the weights lie."""
    assert outputs(some) == outputs(others)
    for one, other in zip(some, others, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_R2_a_copy_generates_like_its_model_and_shares_nothing_with_it() -> None:
    model = fresh()
    model.generation_config.eos_token_id = 5
    config = model.config.to_dict()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    engine = hf_copy(model, max_model_len=32, batch_tokens=100, share_prefill=False)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.config.to_dict() == config
    assert (engine.eos_token_ids, engine.max_model_len, engine.batch_tokens) == ((5,), 32, 100)
    assert not engine.capabilities.shares_weights
    engine.update_weights(named_weights(model))
    sampling = Sampling(max_new_tokens=6, n=2, seed=3)
    expected = hf(model, max_model_len=32, batch_tokens=100, share_prefill=False).generate(requests(PROMPTS), sampling)
    assert_same(engine.generate(requests(PROMPTS), sampling), expected)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    assert_same(engine.generate(requests(PROMPTS), sampling), expected)
    assert not any(parameter.requires_grad for parameter in engine.model.parameters())
    assert engine.model.get_parameter("lm_head.weight") is engine.model.get_parameter("model.embed_tokens.weight")


def test_R2_a_copy_takes_what_it_is_given_in_its_own_dtype_and_some_later_on() -> None:
    model = fresh()
    engine = hf_copy(model, device=torch.device("cpu"))
    engine.update_weights((name, tensor.double()) for name, tensor in named_weights(model))
    assert {parameter.dtype for parameter in engine.model.parameters()} == {torch.float32}
    engine.update_weights([("lm_head.weight", torch.zeros_like(model.lm_head.weight))])  # tied, by its second name
    assert not engine.model.get_parameter("model.embed_tokens.weight").any()
    assert len(engine.generate([Request((1,))], Sampling())) == 1


def test_R2_a_copy_has_its_models_dtype() -> None:
    engine = hf_copy(fresh().bfloat16())
    assert {parameter.dtype for parameter in engine.model.parameters()} == {torch.bfloat16}


def test_R2_FC32_a_copy_refuses_what_does_not_fit_and_to_generate_before_it_is_whole() -> None:
    model = fresh()
    engine = hf_copy(model)

    def refused(*named: tuple[str, torch.Tensor], says: str) -> None:
        with pytest.raises(EngineError, match=says):
            engine.update_weights(named)
        with pytest.raises(EngineError, match=r"strategy\.update_engine_weights\(actor\) first"):
            engine.generate([Request((1,))], Sampling())

    weights = list(named_weights(model))
    refused(says="not given 26 of its parameters, such as 'model.embed_tokens.weight'")
    refused(*weights[:-1], says=r"not given 1 of its parameters, such as 'model\.norm\.weight'")
    refused(("_orig_mod.lm_head.weight", weights[0][1]), says=r"no parameter '_orig_mod\.lm_head\.weight'")
    refused(*weights, ("model.norm.weight", torch.zeros(0)), says=r"of shape \(0,\) where its own is \(64,\)")
    engine.update_weights(weights)
    engine.generate([Request((1,))], Sampling())
    refused(weights[0], ("model.norm.weight", torch.zeros(0)), says="shape")  # a mixture of two models
    engine.update_weights(weights)
    engine.close()
    assert {parameter.device.type for parameter in engine.model.parameters()} == {"meta"}
    engine.close()
    refused(says="not given")


def make(actor: Any, bf16: bool) -> Engine:
    """What a strategy makes for ``actor``."""
    state = run_state(StrategyConfig(bf16=bf16), World(), torch.device("cpu"))
    return make_engine(state, None, "hf", actor)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_R2_a_sharded_actor_gets_an_engine_with_a_copy() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor

    model, sampling = fresh(), Sampling(max_new_tokens=4, n=2, seed=3)
    expected = hf(model).generate(requests(PROMPTS), sampling)
    mesh, precision = init_device_mesh("cpu", (1,)), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    model(torch.tensor([[1, 2]]))
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert is_sharded(model)
    engine = make(model, bf16=False)
    assert not engine.capabilities.shares_weights
    engine.update_weights(named_weights(model))
    assert_same(engine.generate(requests(PROMPTS), sampling), expected)


def test_R2_only_a_sharded_actor_is_copied_and_the_copy_computes_in_the_runs_precision() -> None:
    model = fresh()
    head = model.lm_head.weight
    assert not is_sharded(model)
    whole = make(model, bf16=True)
    assert isinstance(whole, HfEngine)
    assert whole.model is model
    head.ds_id = 0
    assert is_sharded(model)
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        in_bf16 = model.eval()(tokens).logits
    for bf16 in (True, False):
        engine = make(model, bf16=bf16)
        assert isinstance(engine, HfEngine)
        engine.update_weights(named_weights(model))
        assert torch.equal(engine.model(tokens).logits, in_bf16) == bf16
