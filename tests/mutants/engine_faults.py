"""Faults of engines: what is generated, and what becomes of weights. Around ``hf`` on a tiny model, and ``scripted``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from lightrft.conformance.engine_run import make_hf, make_hf_copy, make_scripted
from lightrft.conformance.engines import LIMIT, VOCABULARY, Letters, named, small_model
from lightrft.engines.protocol import Completion, Engine, Request, Sampling
from lightrft.errors import EngineError
from mutants.mutant import EngineMutant, Planted, altered


def sleepy(directory: Path, tokenizer: Letters | None) -> Engine:
    """``make_hf_copy``, with a sleep in which it does nothing."""
    engine = make_hf_copy(directory, tokenizer)
    return altered(engine, capabilities=evolve(engine.capabilities, sleep=True), sleep=lambda level=1: None)


# ---------------------------------------------------------------------------------------------------------- generation


def told(engine: Engine, change: Callable[[Sampling], Sampling]) -> Engine:
    """The engine is told another sampling than the caller's."""
    return altered(engine, generate=lambda requests, sampling: engine.generate(requests, change(sampling)))


def given(engine: Engine, change: Callable[[list[Completion], Sampling], Any]) -> Engine:
    """What it generates is changed."""

    def generate(requests: Sequence[Request], sampling: Sampling) -> Any:
        return change(engine.generate(requests, sampling), sampling)

    return altered(engine, generate=generate)


def each(engine: Engine, change: Callable[[Completion, Sampling], Completion]) -> Engine:
    """Each completion is changed."""
    return given(engine, lambda completions, sampling: [change(one, sampling) for one in completions])


def n_ignored(engine: Engine) -> Engine:
    return told(engine, lambda sampling: evolve(sampling, n=1))


def n_applied_twice(engine: Engine) -> Engine:
    return given(engine, lambda completions, sampling: [one for one in completions for _ in range(sampling.n)])


def samples_not_adjacent(engine: Engine) -> Engine:
    def change(completions: list[Completion], sampling: Sampling) -> list[Completion]:
        return [one for sample in range(sampling.n) for one in completions[sample :: sampling.n]]

    return given(engine, change)


def sorted_by_length(engine: Engine) -> Engine:
    return given(engine, lambda completions, _: sorted(completions, key=lambda one: len(one.prompt_token_ids)))


def equal_prompts_collapsed(engine: Engine) -> Engine:
    def generate(requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        return engine.generate(list({one.prompt_token_ids: one for one in requests}.values()), sampling)

    return altered(engine, generate=generate)


def one_sample_n_times(engine: Engine) -> Engine:
    def change(completions: list[Completion], sampling: Sampling) -> list[Completion]:
        return [one for one in completions[:: sampling.n] for _ in range(sampling.n)]

    return given(engine, change)


def prompt_in_the_output(engine: Engine) -> Engine:
    return each(engine, lambda one, _: evolve(one, output_token_ids=one.prompt_token_ids + one.output_token_ids))


def one_token_too_many(engine: Engine) -> Engine:
    return told(engine, lambda sampling: evolve(sampling, max_new_tokens=sampling.max_new_tokens + 1))


def logprobs_always(engine: Engine) -> Engine:
    return told(engine, lambda sampling: evolve(sampling, logprobs=True))


def logprobs_never(engine: Engine) -> Engine:
    return each(engine, lambda one, _: evolve(one, logprobs=None))


def logprobs_changed(engine: Engine, change: Callable[[tuple[float, ...], Sampling], tuple[float, ...]]) -> Engine:
    def of(one: Completion, sampling: Sampling) -> Completion:
        return one if one.logprobs is None else evolve(one, logprobs=change(one.logprobs, sampling))

    return each(engine, of)


def logprobs_shifted(engine: Engine) -> Engine:
    return logprobs_changed(engine, lambda all_, _: (*all_[1:], *all_[:1]))


def logprobs_base_2(engine: Engine) -> Engine:
    return logprobs_changed(engine, lambda all_, _: tuple(value / math.log(2) for value in all_))


def logprobs_after_the_filters(engine: Engine) -> Engine:
    """As if the filters had left half of the mass."""

    def change(all_: tuple[float, ...], sampling: Sampling) -> tuple[float, ...]:
        filtered = sampling.top_p < 1 or sampling.top_k > 0
        return tuple(min(value + math.log(2), 0.0) for value in all_) if filtered else all_

    return logprobs_changed(engine, change)


def always_stopped(engine: Engine) -> Engine:
    return each(engine, lambda one, _: evolve(one, finish_reason="stop"))


def top_k_ignored(engine: Engine) -> Engine:
    return told(engine, lambda sampling: evolve(sampling, top_k=0))


def top_p_ignored(engine: Engine) -> Engine:
    return told(engine, lambda sampling: evolve(sampling, top_p=1.0))


def temperature_ignored(engine: Engine) -> Engine:
    return told(engine, lambda sampling: evolve(sampling, temperature=min(sampling.temperature, 1.0)))


def greedy_is_drawn(engine: Engine) -> Engine:
    return told(engine, lambda sampling: evolve(sampling, temperature=sampling.temperature or 1.0))


def seed_ignored(engine: Engine) -> Engine:
    def generate(requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        return engine.generate([evolve(one, seed=None) for one in requests], evolve(sampling, seed=None))

    return altered(engine, generate=generate)


def seed_of_a_request_ignored(engine: Engine) -> Engine:
    def generate(requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        return engine.generate([evolve(one, seed=None) for one in requests], sampling)

    return altered(engine, generate=generate)


def one_seed_for_all_calls(engine: Engine) -> Engine:
    return told(engine, lambda sampling: evolve(sampling, seed=0 if sampling.seed is None else sampling.seed))


def stop_tokens_ignored(engine: Engine) -> Engine:
    return told(engine, lambda sampling: evolve(sampling, stop_token_ids=()))


def stop_token_cut_off(engine: Engine) -> Engine:
    def change(one: Completion, sampling: Sampling) -> Completion:
        ends = bool(one.output_token_ids) and one.output_token_ids[-1] in sampling.stop_token_ids
        return evolve(one, output_token_ids=one.output_token_ids[:-1]) if ends else one

    return each(engine, change)


def stop_strings_ignored(engine: Engine) -> Engine:
    return told(engine, lambda sampling: evolve(sampling, stop=()))


def stop_string_cut_off(engine: Engine) -> Engine:
    def change(one: Completion, sampling: Sampling) -> Completion:
        ends = one.finish_reason == "stop" and sampling.stop != ()
        return evolve(one, output_token_ids=one.output_token_ids[:-2]) if ends else one

    return each(engine, change)


def bad_requests_left_out(engine: Engine) -> Engine:
    def generate(requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        good = [one for one in requests if one.prompt_token_ids and max(one.prompt_token_ids) < VOCABULARY]
        return engine.generate(good, sampling)

    return altered(engine, generate=generate)


def error_without_the_index(engine: Engine) -> Engine:
    def generate(requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        try:
            return engine.generate(requests, sampling)
        except EngineError as error:
            raise EngineError(str(error).replace("prompt 1", "a prompt")) from error

    return altered(engine, generate=generate)


def long_prompts_cut(engine: Engine) -> Engine:
    def generate(requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        room = LIMIT - sampling.max_new_tokens
        return engine.generate(
            [evolve(one, prompt_token_ids=one.prompt_token_ids[-room:]) for one in requests], sampling
        )

    return altered(engine, generate=generate)


# -------------------------------------------------------------------------------------------------------- weights, sleep


def updated_with(engine: Engine, change: Callable[[list[tuple[str, Tensor]]], Any]) -> Engine:
    """It takes what ``change`` makes of the weights."""

    def update_weights(named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        engine.update_weights(change(list(named_tensors)))

    return altered(engine, update_weights=update_weights)


def cache_outlives_an_update(engine: Engine) -> Engine:
    cache: dict[Any, list[Completion]] = {}

    def generate(requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        key = (tuple(one.prompt_token_ids for one in requests), sampling)
        if sampling.temperature > 0:
            return engine.generate(requests, sampling)
        return cache.setdefault(key, engine.generate(requests, sampling))

    return altered(engine, generate=generate)


def updates_ignored(engine: Engine) -> Engine:
    return altered(engine, update_weights=list)


def last_bucket_lost(engine: Engine) -> Engine:
    return updated_with(engine, held_before("model.norm.weight"))


def tied_head_dropped(engine: Engine) -> Engine:
    """The embeddings come under one name, and neither they nor the head are updated."""
    return updated_with(engine, held_before("model.embed_tokens.weight"))


def head_lost(engine: Engine) -> Engine:
    return updated_with(engine, held_before("lm_head.weight"))


def held_before(lost: str) -> Callable[[list[tuple[str, Tensor]]], list[tuple[str, Tensor]]]:
    """The weight ``lost`` stays as it was at first, without a word."""
    first: list[Tensor] = []

    def change(pairs: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        first.extend(tensor.clone() for name, tensor in pairs if name == lost)
        return [(name, first[0] if name == lost else tensor) for name, tensor in pairs]

    return change


def rounded_to_bf16(engine: Engine) -> Engine:
    return updated_with(engine, lambda pairs: [(name, tensor.bfloat16().to(tensor.dtype)) for name, tensor in pairs])


def unknown_names_left_out(engine: Engine) -> Engine:
    return updated_with(engine, lambda pairs: [(name, tensor) for name, tensor in pairs if "q_prog" not in name])


def wrong_shapes_padded(engine: Engine) -> Engine:
    def padded(pairs: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        return [
            (name, torch.cat([tensor, tensor[:1]]) if tensor.ndim == 2 and len(tensor) == 95 else tensor)
            for name, tensor in pairs
        ]

    return updated_with(engine, padded)


def half_an_update_served(engine: Engine) -> Engine:
    """What came before a stream failed is taken, the rest is as it was."""
    last: dict[str, Tensor] = {}

    def update_weights(named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        come: dict[str, Tensor] = {}
        try:
            for name, tensor in named_tensors:
                come[name] = tensor.clone()
        finally:
            last.update(come)
            engine.update_weights(last.items())

    def generate(requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        return engine.generate(requests, sampling)

    return altered(engine, update_weights=update_weights, generate=generate)


def senders_tensors_freed(engine: Engine) -> Engine:
    def update_weights(named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        pairs = list(named_tensors)
        engine.update_weights(pairs)
        for _, tensor in pairs:
            tensor.zero_()

    return altered(engine, update_weights=update_weights)


def second_sleep_raises(engine: Engine) -> Engine:
    asleep: list[bool] = []

    def sleep(level: int = 1) -> None:
        if asleep:
            raise Planted("already asleep")
        asleep.append(True)
        engine.sleep(level)

    def wake_up(*, weights_only: bool = False) -> None:
        asleep.clear()
        engine.wake_up(weights_only=weights_only)

    return altered(engine, sleep=sleep, wake_up=wake_up)


def does_not_wake(engine: Engine) -> Engine:
    return altered(engine, wake_up=lambda *, weights_only=False: engine.wake_up(weights_only=True))


def dropped_weights_stay_dropped(engine: Engine) -> Engine:
    dropped: list[bool] = []

    def sleep(level: int = 1) -> None:
        if level == 2:
            engine.update_weights([(name, tensor * 0) for name, tensor in named(small_model(tied=True))])
            dropped.append(True)

    def update_weights(named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        pairs = list(named_tensors)
        if not dropped:
            engine.update_weights(pairs)

    return altered(engine, sleep=sleep, update_weights=update_weights)


def sleeps_in_silence(engine: Engine) -> Engine:
    """It says nothing where it cannot sleep."""
    return altered(engine, sleep=lambda level=1: None)


R1 = "R1 R8"
COPY = "R2 FC11"
ENGINE_MUTANTS = (
    EngineMutant(
        "FC12-dropped-weights-stay-dropped",
        "after a sleep of level 2 an update is lost",
        "R4 FC12",
        dropped_weights_stay_dropped,
        sleepy,
    ),
    EngineMutant("FC11-cache-outlives-an-update", "completions of old weights are served again", COPY,
                 cache_outlives_an_update, make_hf_copy),
    EngineMutant("updates-ignored", "new weights are not taken", COPY, updates_ignored, make_hf_copy),
    EngineMutant("FC34-last-bucket-lost", "the last weight of an update is lost", COPY, last_bucket_lost, make_hf_copy),
    EngineMutant("tied-head-dropped", "tied embeddings keep their old weight", COPY, tied_head_dropped, make_hf_copy),
    EngineMutant("head-lost", "an untied head keeps its old weight", COPY, head_lost, make_hf_copy, tied=False),
    EngineMutant("rounded-to-bf16", "weights are rounded to bfloat16", COPY, rounded_to_bf16, make_hf_copy),
    EngineMutant("FC32-unknown-names-left-out", "a name that the model has not is passed over", "R2 FC32",
                 unknown_names_left_out, make_hf_copy),
    EngineMutant("wrong-shapes-padded", "a weight of another shape is made to fit", "R2: a wrong", wrong_shapes_padded,
                 make_hf_copy),
    EngineMutant("half-an-update-served", "what came before a stream failed is served", "R2: a stream",
                 half_an_update_served, make_hf_copy),
    EngineMutant("senders-tensors-freed", "the sender's tensors are overwritten", "R3", senders_tensors_freed, make_hf_copy),
    EngineMutant("FC35-second-sleep-raises", "a second sleep is an error", "R4 FC35", second_sleep_raises, make_scripted,
                 computes=False),
    EngineMutant("does-not-wake", "waking leaves it asleep", "R4 FC35", does_not_wake, make_scripted, computes=False),
    EngineMutant("sleeps-in-silence", "an engine that cannot sleep does not say so", "R4 FC35", sleeps_in_silence, make_hf),
    EngineMutant("bad-requests-left-out", "an empty prompt is left out in silence", "R5", bad_requests_left_out, make_scripted,
                 computes=False),
    EngineMutant("error-without-the-index", "an error does not say which prompt", "R5", error_without_the_index, make_scripted,
                 computes=False),
    EngineMutant("long-prompts-cut", "a prompt that is too long is cut in silence", "R5", long_prompts_cut, make_scripted,
                 computes=False),
    EngineMutant("FC37-n-ignored", "one completion for each prompt, whatever n", R1, n_ignored, make_scripted, computes=False),
    EngineMutant("FC37-n-applied-twice", "n * n completions for each prompt", R1, n_applied_twice, make_scripted,
                 computes=False),
    EngineMutant("samples-not-adjacent", "the n of a prompt are not adjacent", R1, samples_not_adjacent, make_scripted,
                 computes=False),
    EngineMutant("sorted-by-length", "completions come in the order of prompt lengths", R1, sorted_by_length, make_scripted,
                 computes=False),
    EngineMutant("FC36-equal-prompts-collapsed", "equal prompts get one completion", R1, equal_prompts_collapsed, make_scripted,
                 computes=False),
    EngineMutant("prompt-in-the-output", "the output begins with the prompt", R1, prompt_in_the_output, make_scripted,
                 computes=False),
    EngineMutant("one-token-too-many", "max_new_tokens is off by one", R1, one_token_too_many, make_scripted, computes=False),
    EngineMutant("logprobs-always", "log-probabilities come unasked", R1, logprobs_always, make_scripted, computes=False),
    EngineMutant("logprobs-never", "log-probabilities never come", R1, logprobs_never, make_scripted, computes=False),
    EngineMutant("always-stopped", "finish_reason is always stop", R1, always_stopped, make_scripted, computes=False),
    EngineMutant("logprobs-shifted", "log-probabilities are those of the next token", "R7: greedy", logprobs_shifted,
                 make_hf),
    EngineMutant("logprobs-base-2", "log-probabilities are to base 2", "R7: greedy", logprobs_base_2, make_hf),
    EngineMutant("greedy-is-drawn", "temperature 0 draws", "R7: greedy", greedy_is_drawn, make_hf),
    EngineMutant("logprobs-after-the-filters", "log-probabilities are those after top_p and top_k", "R7: log",
                 logprobs_after_the_filters, make_hf),
    EngineMutant("top-k-ignored", "top_k does nothing", "R7: top_k", top_k_ignored, make_hf),
    EngineMutant("top-p-ignored", "top_p does nothing", "R7: top_k", top_p_ignored, make_hf),
    EngineMutant("temperature-ignored", "temperatures above 1 are taken for 1", "R7: draws", temperature_ignored, make_hf),
    EngineMutant("seed-ignored", "a seed does not repeat", "R7: a seed", seed_ignored, make_hf),
    EngineMutant("one-sample-n-times", "the n of a prompt are one and the same", "R7: a seed", one_sample_n_times, make_hf),
    EngineMutant("seed-of-a-request-ignored", "a request's draws depend on its batch", "R7: a seeded",
                 seed_of_a_request_ignored, make_hf),
    EngineMutant("FC42-one-seed-for-all-calls", "without a seed every call draws the same", "R7 FC42",
                 one_seed_for_all_calls, make_hf),
    EngineMutant("stop-tokens-ignored", "a stop token does not end a completion", "R7: a stop token", stop_tokens_ignored,
                 make_hf),
    EngineMutant("stop-token-cut-off", "the stop token is not in the output", "R7: a stop token", stop_token_cut_off,
                 make_hf),
    EngineMutant("stop-strings-ignored", "a stop string does not end a completion", "R7: a stop string",
                 stop_strings_ignored, make_hf),
    EngineMutant("stop-string-cut-off", "the stop string is not in the output", "R7: a stop string", stop_string_cut_off,
                 make_hf),
)  # fmt: skip
