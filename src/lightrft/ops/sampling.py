"""What a caller may ask of an engine's sampling, in whatever words, as one ``Sampling`` (R7)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import index as whole

from attrs import fields

from lightrft.engines.protocol import Sampling
from lightrft.errors import ConfigError, listed

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
