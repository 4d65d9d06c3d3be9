"""From prompts to completions on one rank: what may be asked, and when the engine is awake (R1, R4, R5)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from operator import index as whole
from typing import Protocol

from attrs import evolve, fields, frozen
from torch import Tensor
from torch.nn import Module

from lightrft.engines.protocol import Completion, Engine, Request, Sampling
from lightrft.errors import ConfigError, EngineError, UnsupportedOperation, listed
from lightrft.ops.collectives import Collecting
from lightrft.ops.lengths import gather_lengths, lengths_of, report_lengths, should_plot
from lightrft.ops.models import WholeWeights
from lightrft.ops.seeds import derived_seed
from lightrft.strategy.record import EngineState, RunState

logger = logging.getLogger(__name__)

# ------------------------------------------------------------------------------------------------- what is asked for

SAMPLING_FIELDS = tuple(field.name for field in fields(Sampling))

ALIASES: Mapping[str, str] = {"max_tokens": "max_new_tokens"}
"""Other engines' names for our fields."""

NEUTRAL: Mapping[str, object] = {
    "min_p": 0.0,
    "min_tokens": 0,
    "min_new_tokens": 0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "ignore_eos": False,
    "bad_words": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "prompt_logprobs": None,
}
"""Settings of other engines that change what is sampled: understood only at the value that changes nothing."""

TEXT_ONLY = frozenset(
    {"skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output", "detokenize"}
)
"""Settings of other engines that concern text, where we deal in tokens."""


def as_sampling(sampling_params: object) -> Sampling:
    """A ``Sampling`` out of one, out of a mapping, or out of any object with such attributes, as vLLM's SamplingParams.

    ``max_tokens`` is ``max_new_tokens``; ``top_k`` -1 is 0; ``stop`` may be one string; ``logprobs`` may be a number
    (any: yes) or None (no). Raises ``ConfigError`` that lists every value that cannot be, every name that is not known
    (in a mapping), and every setting of another engine that would be ignored.
    """
    if isinstance(sampling_params, Sampling):
        return sampling_params
    given = _given(sampling_params)
    problems: list[str] = []
    values: dict[str, object] = {}
    for key, value in given.items():
        name = ALIASES.get(key, key)
        if name in values:
            problems.append(f"{key}={value!r} is given twice, as {name} too: leave one out")
        elif name in SAMPLING_FIELDS:
            values[name] = value
        elif name in NEUTRAL and value not in (NEUTRAL[name], None, [], {}):
            problems.append(f"{key}={value!r} is not carried out by our engines: leave it at {NEUTRAL[name]!r}")
        elif name not in NEUTRAL and name not in TEXT_ONLY:
            problems.append(f"{key}={value!r} is no sampling parameter. There are: {', '.join(SAMPLING_FIELDS)}")
    for name, value in values.items():
        try:
            values[name] = READ[name](value)
            Sampling(**{name: values[name]})  # type: ignore[arg-type]  # one field at a time, to name every bad one
        except (TypeError, ValueError):
            problems.append(f"{name}={value!r} is not possible: {MEANING[name]} is needed")
    if problems:
        raise ConfigError(f"sampling parameters cannot be used:{listed(problems)}")
    return Sampling(**values)  # type: ignore[arg-type]  # READ gave each its type


def _given(sampling_params: object) -> dict[str, object]:
    if isinstance(sampling_params, Mapping):
        return {str(key): value for key, value in sampling_params.items()}
    names = (*SAMPLING_FIELDS, *ALIASES, *NEUTRAL)
    found = {name: getattr(sampling_params, name) for name in names if hasattr(sampling_params, name)}
    if not any(ALIASES.get(name, name) in SAMPLING_FIELDS for name in found):
        raise ConfigError(
            f"sampling parameters are needed, got {sampling_params!r}. Pass a Sampling, a mapping, or an object with "
            f"attributes such as max_new_tokens and temperature."
        )
    return found


def _number(value: object) -> float:
    if isinstance(value, (bool, str)):
        raise TypeError
    return float(value)  # type: ignore[arg-type]  # anything else that is no number raises


def _integer(value: object) -> int:
    if isinstance(value, bool):
        raise TypeError
    return whole(value)  # type: ignore[arg-type]  # raises where nothing is an integer


def _top_k(value: object) -> int:
    return 0 if value is None or value == -1 else _integer(value)


def _strings(value: object) -> tuple[str, ...]:
    strings = () if value is None else (value,) if isinstance(value, str) else tuple(value)  # type: ignore[arg-type]
    if not all(isinstance(string, str) for string in strings):
        raise TypeError
    return strings


def _integers(value: object) -> tuple[int, ...]:
    return () if value is None else tuple(map(_integer, value))  # type: ignore[call-overload]


READ: Mapping[str, Callable[[object], object]] = {
    "max_new_tokens": _integer,
    "temperature": _number,
    "top_p": lambda value: 1.0 if value is None else _number(value),
    "top_k": _top_k,
    "n": _integer,
    "stop": _strings,
    "stop_token_ids": _integers,
    "seed": lambda value: None if value is None else _integer(value),
    "logprobs": lambda value: value if isinstance(value, bool) else value is not None,
}

MEANING: Mapping[str, str] = {
    "max_new_tokens": "a whole number from 1",
    "temperature": "a number from 0 (greedy)",
    "top_p": "a number above 0 and at most 1",
    "top_k": "a whole number from 1, or 0 or -1 for no limit",
    "n": "a whole number from 1",
    "stop": "a string or a list of strings",
    "stop_token_ids": "a list of token ids",
    "seed": "a whole number or None",
    "logprobs": "true, false, a number or None",
}


def as_requests(all_prompt_token_ids: Sequence[Sequence[int]]) -> list[Request]:
    """One request for each row of token ids; rows may be lists, arrays or tensors. Errors name the row."""
    return [_request(index, row) for index, row in enumerate(all_prompt_token_ids)]


def _request(index: int, row: object) -> Request:
    tolist = getattr(row, "tolist", None)
    ids: object = row if tolist is None else tolist()
    if isinstance(ids, Iterable) and not isinstance(ids, (str, bytes)):
        with suppress(TypeError):
            return Request(tuple(whole(token) for token in ids))
    raise EngineError(f"prompt {index} is no list of token ids: {_short(row)}. Encode it with the model's tokenizer.")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


# --------------------------------------------------------------------------------------------- one engine, awake or not


def the_engine(state: EngineState) -> Engine:
    """The engine, if there is one."""
    if state.engine is None:
        raise EngineError("no inference engine was set up. Call strategy.setup_inference_engine(args, ...) first.")
    return state.engine


def sleep_engine(state: EngineState) -> None:
    """Puts the engine to sleep; asleep or absent, nothing happens. One that cannot says so once and goes on (R4)."""
    if state.engine is None or state.asleep:
        return
    if not state.engine.capabilities.sleep:
        if not state.said_no_sleep:
            logger.warning("engine %r cannot sleep here: it keeps its memory between rollouts", state.engine.name)
        state.said_no_sleep = True
        return
    state.engine.sleep()
    state.asleep = True


def wake_engine(state: EngineState) -> None:
    """Wakes the engine; awake or absent, nothing happens. One that failed to wake counts as asleep: try again."""
    if state.engine is not None and state.asleep:
        state.engine.wake_up()
        state.asleep = False


def sync_weights(state: EngineState, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Gives the engine these weights and makes it forget what it computed with older ones (R2)."""
    engine = the_engine(state)
    wake_engine(state)
    engine.update_weights(named_tensors)
    engine.flush_cache()


def generate_local(
    state: EngineState,
    sampling_params: object,
    prompt_token_ids: Sequence[Sequence[int]] | None = None,
    multi_modal_inputs: Sequence[Mapping[str, object]] | None = None,
    *,
    first_place: int = 0,
) -> list[Completion]:
    """``n`` adjacent completions for each prompt, in the order of the prompts; no prompts, no completions.

    Exactly one of the two kinds of input, else ``ValueError`` (R5). Wakes the engine. ``first_place``: how many prompts
    come before these on other ranks; with a seed, a prompt's place decides its draws.
    """
    if (prompt_token_ids is None) == (multi_modal_inputs is None):
        seen = "neither" if prompt_token_ids is None else "both"
        raise ValueError(f"exactly one of prompt_token_ids and multi_modal_inputs is needed, got {seen}.")
    engine = the_engine(state)
    if prompt_token_ids is None:
        raise no_media(engine)
    sampling = as_sampling(sampling_params)
    requests = as_requests(prompt_token_ids)
    if not requests:
        return []
    if sampling.seed is not None:
        requests = [
            evolve(request, seed=derived_seed(sampling.seed, first_place + index))
            for index, request in enumerate(requests)
        ]
    wake_engine(state)
    completions = engine.generate(requests, sampling)
    if len(completions) != len(requests) * sampling.n:
        raise EngineError(
            f"engine {engine.name!r} gave {len(completions)} completions for {len(requests)} prompts with "
            f"n={sampling.n}. This is a fault of the engine: run the conformance suite on it."
        )
    return completions


def close_engine(state: EngineState) -> None:
    """Ends the engine for good; a second call is harmless."""
    if state.engine is not None:
        state.engine.close()
    state.engine, state.asleep = None, False


# ------------------------------------------------------------------------------------------------------- text, media


class Encodes(Protocol):
    """What text prompts need of a tokenizer."""

    def encode(self, text: str, /, *, add_special_tokens: bool) -> list[int]: ...


def encode_prompts(engine: Engine, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of prompts that are already in the model's own form: no special token is added."""
    tokenizer: Encodes | None = getattr(engine, "tokenizer", None)
    if tokenizer is None:
        raise EngineError(
            f"all_prompts is text, and engine {engine.name!r} has no tokenizer. "
            f"Set it up with one, or pass all_prompt_token_ids."
        )
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def no_media(engine: Engine) -> UnsupportedOperation:
    """Images and videos cannot travel through an engine yet."""
    return UnsupportedOperation(
        f"engine {engine.name!r} cannot generate from images or videos. Instead: pass token ids only."
    )


def holds_media(media: Sequence[object] | None) -> bool:
    """Whether there is any image or video; ``[None, []]`` holds none."""
    return media is not None and any(
        item is not None and not (isinstance(item, (list, tuple)) and not holds_media(item)) for item in media
    )


def prompts_alone(
    state: EngineState,
    all_prompt_token_ids: Sequence[Sequence[int]] | None,
    all_prompts: Sequence[str] | None,
    media: Iterable[Sequence[object] | None],
) -> Sequence[Sequence[int]]:
    """The token ids of all prompts. Where both are given the ids are taken: they are what the text was turned into."""
    if any(map(holds_media, media)):
        raise no_media(the_engine(state))
    if all_prompt_token_ids is not None:
        return all_prompt_token_ids
    if all_prompts is None:
        raise ValueError("gather_and_generate needs prompts, got none. Pass all_prompt_token_ids, or all_prompts.")
    return encode_prompts(the_engine(state), all_prompts)


# ------------------------------------------------------------------------------------ the operations of one process


@frozen(eq=False)
class Sending:
    """What ``update_engine_weights`` works with."""

    run: RunState
    whole_weights: WholeWeights


def update_engine_weights(sending: Sending, actor: Module) -> None:
    """The actor's weights, to the engine."""
    sync_weights(sending.run.engine, sending.whole_weights(actor))


def maybe_sleep_inference_engine(state: RunState) -> None:
    """Sleep, if there is an engine that can."""
    sleep_engine(state.engine)


def wakeup_inference_engine(state: RunState) -> None:
    """Undoes it."""
    wake_engine(state.engine)


def engine_generate_local(
    state: RunState,
    sampling_params: object,
    prompt_token_ids: Sequence[Sequence[int]] | None = None,
    multi_modal_inputs: Sequence[Mapping[str, object]] | None = None,
) -> list[Completion]:
    """Completions of this rank's prompts."""
    return generate_local(state.engine, sampling_params, prompt_token_ids, multi_modal_inputs)


@frozen(eq=False)
class Generating:
    """What ``gather_and_generate`` works with."""

    run: RunState
    collecting: Collecting


def gather_and_generate(
    generating: Generating,
    sampling_params: object,
    all_prompt_token_ids: Sequence[Sequence[int]] | None = None,
    all_prompts: Sequence[str] | None = None,
    all_images: Sequence[object] | None = None,
    sleep_engine: bool = True,
    images_num: Sequence[int] | None = None,
    all_videos: Sequence[object] | None = None,
    videos_num: Sequence[int] | None = None,
) -> list[Completion]:
    """Each rank's engine completes that rank's own prompts.

    With a seed, a prompt's completions depend on its place among the prompts of all ranks: they are the same at any
    world size.
    """
    state, gather = generating.run, generating.collecting.all_gather
    prompts = prompts_alone(state.engine, all_prompt_token_ids, all_prompts, (all_images, all_videos))
    before = sum(gather(len(prompts))[: state.world.rank])
    completions = generate_local(state.engine, sampling_params, prompts, first_place=before)
    state.engine.rollouts += 1
    if should_plot(state.engine.rollouts, state.config.plot_every):
        lengths = gather_lengths(lengths_of(completions), gather)
        if state.world.rank == 0:
            report_lengths(lengths, state.config.log_dir, state.engine.rollouts)
    if sleep_engine and state.config.enable_engine_sleep:
        maybe_sleep_inference_engine(state)
    return completions
