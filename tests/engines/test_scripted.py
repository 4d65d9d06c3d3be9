"""The engine ``scripted``: deterministic, honest about limits, and it keeps a record."""

from __future__ import annotations

import pytest
import torch

from lightrft.engines.protocol import Completion, Engine, Request, Sampling
from lightrft.engines.scripted import Call, ScriptedEngine, scripted
from lightrft.errors import EngineError, UnsupportedOperation

A, B = (1, 2, 3), (4, 5)


def generate(engine: Engine, *prompts: tuple[int, ...], **fields: object) -> list[Completion]:
    return engine.generate([Request(prompt) for prompt in prompts], Sampling(**fields))  # type: ignore[arg-type]  # a test's shorthand


def test_R8_two_engines_of_one_script_say_the_same() -> None:
    first, second = generate(scripted(), A, B, n=2), generate(scripted(), A, B, n=2)
    assert first == second
    for completion in first:
        assert len(completion.output_token_ids) == 16
        assert completion.logprobs is not None
        assert len(completion.logprobs) == 16
        assert all(-1.0 <= logprob < 0.0 for logprob in completion.logprobs)
        assert completion.finish_reason == "length"


def test_FC36_FC37_order_and_adjacency() -> None:
    engine = scripted(lambda prompt, sample: [prompt[0], sample])
    got = generate(engine, A, A, B, n=2, max_new_tokens=2)
    assert [one.prompt_token_ids for one in got] == [A, A, A, A, B, B]
    assert [one.output_token_ids for one in got] == [(1, 0), (1, 1), (1, 0), (1, 1), (4, 0), (4, 1)]


def test_R7_the_seed_and_the_sample_show_in_the_default_reply() -> None:
    base = generate(scripted(), A, n=2, seed=1)
    assert base[0].output_token_ids != base[1].output_token_ids
    assert generate(scripted(), A, n=2, seed=1) == base != generate(scripted(), A, n=2, seed=2)
    assert all(0 <= token < 10 for token in generate(scripted(vocab_size=10), (9, 8), seed=7)[0].output_token_ids)


def test_R7_a_requests_seed_goes_before_the_calls_and_the_batch_does_not_show() -> None:
    own, plain, sampling = Request(A, 5), Request(A), Sampling(seed=1, n=2)
    alone = scripted().generate([own], Sampling(n=2))
    assert scripted().generate([plain, own], sampling)[2:] == alone == scripted().generate([own, plain], sampling)[:2]
    assert alone != scripted().generate([plain], sampling) == scripted().generate([own, plain], sampling)[2:]


def test_R7_limits_and_stops() -> None:
    engine = scripted(lambda prompt, sample: [7, 8, 9])
    (cut,) = generate(engine, A, max_new_tokens=2)
    assert (cut.output_token_ids, cut.finish_reason) == ((7, 8), "length")
    (exact,) = generate(engine, A, max_new_tokens=3)
    assert (exact.output_token_ids, exact.finish_reason) == ((7, 8, 9), "length")
    (ended,) = generate(engine, A, max_new_tokens=4)
    assert (ended.output_token_ids, ended.finish_reason) == ((7, 8, 9), "stop")
    (late,) = generate(engine, A, max_new_tokens=2, stop_token_ids=[9])
    assert (late.output_token_ids, late.finish_reason) == ((7, 8), "length")
    (stopped,) = generate(engine, A, stop_token_ids=[8], logprobs=False)
    assert (stopped.output_token_ids, stopped.logprobs, stopped.finish_reason) == ((7, 8), None, "stop")


def test_R5_bad_requests_are_refused_by_index_before_the_script_is_asked() -> None:
    engine = scripted(lambda prompt, sample: pytest.fail("asked"), vocab_size=10, max_model_len=8)
    with pytest.raises(EngineError, match=r"(?s)prompt 1: is empty.*prompt 2: token id 10 .*prompt 3: 7 tokens"):
        generate(engine, A, (), (10,), (1,) * 7, max_new_tokens=2)
    with pytest.raises(EngineError, match="n=2 at temperature 0"):
        generate(engine, A, temperature=0.0, n=2, max_new_tokens=1)
    with pytest.raises(EngineError, match="tokenizer"):
        generate(engine, A, stop="x", max_new_tokens=1)


def test_R4_asleep_it_refuses_to_work() -> None:
    engine = scripted()
    engine.sleep()
    with pytest.raises(EngineError, match=r"generate while .* sleeps"):
        generate(engine, A)
    with pytest.raises(EngineError, match=r"update_weights while .* sleeps"):
        engine.update_weights([])
    engine.wake_up()
    assert len(generate(engine, A)) == 1
    with pytest.raises(UnsupportedOperation, match="can_sleep=False"):
        scripted(can_sleep=False).sleep()


def test_scripted_records_what_it_is_asked() -> None:
    engine: ScriptedEngine = scripted()
    generate(engine, A, B)
    engine.update_weights([("w", torch.zeros(1)), ("b", torch.zeros(1))])
    engine.flush_cache()
    engine.sleep()
    engine.wake_up()
    engine.close()
    assert engine.calls[:2] == [Call("generate", prompts=(A, B)), Call("update_weights", names=("w", "b"))]
    assert engine.operations[2:] == ["flush_cache", "sleep", "wake_up", "close"]
    assert scripted().calls == []


def test_scripted_faults_come_from_the_script() -> None:
    def fail(prompt: tuple[int, ...], sample: int) -> list[int]:
        raise OSError("injected")

    with pytest.raises(OSError, match="injected"):
        generate(scripted(fail), A)
    with pytest.raises(EngineError, match="token id 500"):
        generate(scripted(lambda prompt, sample: [500]), A)


def test_sampling_takes_one_stop_string_as_one() -> None:
    assert Sampling(stop="end").stop == ("end",)
    assert Sampling(stop=["a", "b"]).stop == ("a", "b")
