"""The laws of engines (R2, R4, R5, R7, R8): one body each for every engine, compared with transformers on tiny models.

A body gets an engine and the Hugging Face model whose weights the engine has; it knows nothing but the ``Engine``
Protocol. What may be checked on an engine follows from its capabilities: see :func:`applies`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import Module

from lightrft.engines.protocol import Completion, Engine, Request, Sampling
from lightrft.errors import EngineError, UnsupportedOperation

if TYPE_CHECKING:
    from transformers import PreTrainedModel

E = TypeVar("E", bound=Exception)

VOCABULARY, LIMIT = 128, 512
PROMPTS = ((3, 5, 8), (9,), (7, 7, 1, 2, 60, 100, 4), (9,), (11, 12))
TOLERANCE = 1e-4
"""Of log-probabilities, in fp32 (R2)."""


class Letters:
    """A tokenizer of one character a token."""

    eos_token_id: int | list[int] | None = None

    def decode(self, token_ids: list[int], /) -> str:
        return "".join(map(chr, token_ids))

    def encode(self, text: str, /, *, add_special_tokens: bool) -> list[int]:
        return list(map(ord, text))


class MakeEngine(Protocol):
    """An engine in fp32, with the limit of the model in ``directory`` and its weights, loaded or by an update.

    ``transformers`` loads the model; with ``tokenizer`` the engine finds stop strings. It may be an engine that an
    earlier law was checked on and left in any state, if a whole update of its weights mends it. The caller closes it.
    """

    def __call__(self, directory: Path, tokenizer: Letters | None) -> Engine: ...


@frozen
class EngineLaw:
    """One thing that every engine has to do."""

    name: str
    """Its number in docs/laws.md and those of the field cases that it covers, then what it says."""
    body: Callable[[Engine, Module], None]
    computes: bool = True
    """About what the model computes: not for an engine that computes nothing."""
    updates: bool = False
    """About weights of the engine's own."""
    seeds: bool = False
    """About draws that a seed repeats."""


def applies(law: EngineLaw, engine: Engine, *, computes: bool = True) -> bool:
    """Whether ``law`` can be checked on ``engine``."""
    own_weights = engine.capabilities.weight_update and not engine.capabilities.shares_weights
    heeds_seeds = engine.capabilities.seeds
    return (computes or not law.computes) and (own_weights or not law.updates) and (heeds_seeds or not law.seeds)


def check_engine(
    law: EngineLaw, make: MakeEngine, directory: Path, *, tied: bool = True, computes: bool = True
) -> bool:
    """Raises if the engine breaks ``law``; False if it does not apply. The model is saved in ``directory`` first."""
    model = small_model(tied=tied)
    save(model, directory)
    engine = make(directory, Letters())
    if not applies(law, engine, computes=computes):
        return False
    law.body(engine, model)
    return True


# -------------------------------------------------------------------------------------------------------- the model


def small_model(*, tied: bool, seed: int = 0) -> Module:
    """A random Qwen2 with 2 heads of 32, which every engine takes. Its logits are far enough apart that a wrong mask,
    position or scale shows; the norms are no ones, so that a norm that was left out shows."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=LIMIT,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    parameter.mul_(6.0)
                else:
                    parameter.add_(torch.rand_like(parameter) * (0.5 if "norm" in name else 0.2))
    return cast("Module", model).eval()


def save(model: Module, directory: Path) -> None:
    """As ``from_pretrained`` reads it."""
    cast("PreTrainedModel", model).save_pretrained(str(directory))


def named(model: Module) -> Iterator[tuple[str, Tensor]]:
    """The weights as a trainer sends them: tied ones once."""
    return ((name, parameter.detach()) for name, parameter in model.named_parameters())


def logits_of(model: Module, ids: Sequence[int]) -> Tensor:
    """float32 [length, V], from one forward of the sequence alone, unpadded and without a cache."""
    with torch.no_grad():
        return cast("Tensor", model(input_ids=torch.tensor([ids]), use_cache=False).logits[0])


def drift(model: Module, completions: Sequence[Completion], temperature: float = 1.0) -> float:
    """How far the log-probabilities are from those of ``model`` at most."""
    worst = 0.0
    for completion in completions:
        assert completion.logprobs is not None, "log-probabilities were asked for, and there are none"
        start, output = len(completion.prompt_token_ids), torch.tensor(completion.output_token_ids)
        logits = logits_of(model, completion.prompt_token_ids + completion.output_token_ids)
        expected = (logits / temperature).log_softmax(-1)[start - 1 : -1].gather(1, output[:, None])[:, 0]
        worst = max(worst, float((torch.tensor(completion.logprobs) - expected).abs().max()))
    return worst


def greedy(model: Module, prompt: Sequence[int], length: int) -> tuple[int, ...]:
    """The likeliest token at each step, by transformers."""
    ids = list(prompt)
    for _ in range(length):
        ids.append(int(logits_of(model, ids)[-1].argmax()))
    return tuple(ids[len(prompt) :])


def requests(prompts: Sequence[Sequence[int]]) -> list[Request]:
    return [Request(prompt) for prompt in prompts]


def outputs(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [completion.output_token_ids for completion in completions]


def refusal(kind: type[E], call: Callable[[], object]) -> E:
    """The error of ``call``."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was expected, and nothing was raised")


def says(error: Exception, *parts: str) -> None:
    """Whether an error's text names what it should."""
    for part in parts:
        assert part in str(error), f"the error does not say {part!r}: {error}"


# ---------------------------------------------------------------------------------------------------------- weights


def long_prompts() -> list[Request]:
    """A common part of 300 tokens, which an engine with a prefix cache reads once, and different ends."""
    common = [(7 * place * place + 3 * place) % VOCABULARY for place in range(300)]
    return requests([[*common, 5, end] for end in (1, 2, 3)] + [[4, 9]])


def new_weights_alone(engine: Engine, model: Module) -> None:
    sampling = Sampling(max_new_tokens=6, temperature=0.0)
    tied = named_twice(model)
    for seed in (0, 1, 2):
        current = small_model(tied=tied, seed=seed)
        if seed:
            engine.update_weights(named(current))
            engine.flush_cache()
        for attempt in ("first", "repeated"):
            completions = engine.generate(long_prompts(), sampling)
            far = drift(current, completions)
            assert far <= TOLERANCE, f"weights {seed}, {attempt} call: log-probabilities are off by {far}"
            assert outputs(completions) == [greedy(current, one.prompt_token_ids, 6) for one in completions]


def named_twice(model: Module) -> bool:
    """Whether the embeddings are tied."""
    return len(list(model.named_parameters())) < len(list(model.named_parameters(remove_duplicate=False)))


def whole_or_refused(engine: Engine, old: Module) -> None:
    """After an update that failed: refuses to generate, or generates with the weights from before."""
    sampling = Sampling(max_new_tokens=6, temperature=0.0)
    try:
        completions = engine.generate(long_prompts(), sampling)
    except EngineError as error:
        says(error, "update_engine_weights")
    else:
        far = drift(old, completions)
        assert far <= TOLERANCE, f"half an update is served: log-probabilities are off by {far}"
    new = small_model(tied=named_twice(old), seed=1)
    engine.update_weights(named(new))
    engine.flush_cache()
    far = drift(new, engine.generate(long_prompts(), sampling))
    assert far <= TOLERANCE, f"after a whole update log-probabilities are off by {far}"


def unknown_name(engine: Engine, model: Module) -> None:
    new = list(named(small_model(tied=named_twice(model), seed=3)))
    bad = ("model.layers.0.self_attn.q_prog.weight", torch.zeros(3))
    says(refusal(EngineError, lambda: engine.update_weights([*new[:9], bad, *new[9:]])), repr(bad[0]))
    whole_or_refused(engine, model)


def wrong_shape(engine: Engine, model: Module) -> None:
    new = list(named(small_model(tied=named_twice(model), seed=3)))
    place = next(place for place, (name, _) in enumerate(new) if name.endswith("layers.1.mlp.up_proj.weight"))
    name, tensor = new[place]
    new[place] = name, tensor[:-1]
    says(refusal(EngineError, lambda: engine.update_weights(new)), repr(name), "(96, 64)", "(95, 64)")
    whole_or_refused(engine, model)


def stream_that_fails(engine: Engine, model: Module) -> None:
    def stream() -> Iterator[tuple[str, Tensor]]:
        for place, pair in enumerate(named(small_model(tied=named_twice(model), seed=3))):
            if place == 15:
                raise ArithmeticError("a shard is missing")
            yield pair

    says(refusal(ArithmeticError, lambda: engine.update_weights(stream())), "a shard is missing")
    whole_or_refused(engine, model)


def other_precision(engine: Engine, model: Module) -> None:
    new = small_model(tied=named_twice(model), seed=4)
    sent = {name: tensor.bfloat16() for name, tensor in named(new)}
    before = {name: tensor.clone() for name, tensor in sent.items()}
    engine.update_weights(iter(sent.items()))
    engine.flush_cache()
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.copy_(parameter.bfloat16())
    far = drift(new, engine.generate(long_prompts(), Sampling(max_new_tokens=4, temperature=0.0)))
    assert far <= TOLERANCE, f"log-probabilities are off by {far}"
    assert all(torch.equal(sent[name], tensor) for name, tensor in before.items()), "the sender's tensors changed"


# ---------------------------------------------------------------------------------------------------- sleep, refusals


def sleep_and_wake(engine: Engine, model: Module) -> None:
    sampling = Sampling(max_new_tokens=4, temperature=0.0)
    before = outputs(engine.generate(requests(PROMPTS), sampling))
    refusal(EngineError, lambda: engine.generate([Request(())], sampling))
    engine.wake_up()
    if engine.capabilities.sleep:
        for _ in range(2):
            engine.sleep()
            engine.sleep()
            engine.wake_up()
            engine.wake_up()
            assert outputs(engine.generate(requests(PROMPTS), sampling)) == before
    else:
        says(refusal(UnsupportedOperation, engine.sleep), engine.name, "sleep")
    assert outputs(engine.generate(requests(PROMPTS), sampling)) == before


def sleep_without_weights(engine: Engine, model: Module) -> None:
    if engine.capabilities.sleep:
        engine.sleep(2)
        engine.wake_up()
        engine.update_weights(named(model))
        engine.flush_cache()
        assert drift(model, engine.generate(long_prompts(), Sampling(max_new_tokens=4))) <= TOLERANCE


def bad_requests(engine: Engine, model: Module) -> None:
    plain, good = Sampling(max_new_tokens=2), (1, 2)
    cases: list[tuple[list[Sequence[int]], Sampling, tuple[str, ...]]] = [
        ([good, ()], plain, ("prompt 1", "empty")),
        ([good, good, (5, VOCABULARY)], plain, ("prompt 2", f"token id {VOCABULARY}", f"{VOCABULARY}")),
        ([(-1,), good], plain, ("prompt 0", "token id -1")),
        ([good, (1,) * (LIMIT - 1)], plain, ("prompt 1", f"{LIMIT - 1} tokens", "max_new_tokens=2", f"{LIMIT}")),
        ([good], Sampling(temperature=0.0, n=2), ("n=2", "temperature 0")),
        ([good], Sampling(stop=("a", "")), ("stop", "empty string")),
    ]
    expected = outputs(engine.generate([Request(good)], Sampling(max_new_tokens=4, temperature=0.0)))
    for prompts, sampling, parts in cases:
        error = refusal(EngineError, lambda: engine.generate(requests(prompts), sampling))  # noqa: B023  # called at once
        says(error, *parts)
    assert outputs(engine.generate([Request(good)], Sampling(max_new_tokens=4, temperature=0.0))) == expected
    assert engine.generate([], plain) == []
    assert len(engine.generate([Request((1,) * (LIMIT - 2))], plain)[0].output_token_ids) == 2


# --------------------------------------------------------------------------------------------------------- sampling


def completions_are_whole(engine: Engine, model: Module) -> None:
    some = requests([*PROMPTS, PROMPTS[0]])
    for logprobs in (True, False):
        completions = engine.generate(some, Sampling(max_new_tokens=5, n=2, seed=1, logprobs=logprobs))
        assert [one.prompt_token_ids for one in completions] == [one.prompt_token_ids for one in some for _ in range(2)]
        for one in completions:
            assert type(one) is Completion
            assert all(type(token) is int for token in one.output_token_ids)
            assert len(one.output_token_ids) == 5
            assert one.finish_reason == "length"
            assert (one.logprobs is not None) == logprobs
            assert one.logprobs is None or (len(one.logprobs) == 5 and all(type(x) is float for x in one.logprobs))


def greedy_equals_hugging_face(engine: Engine, model: Module) -> None:
    completions = engine.generate(requests(PROMPTS), Sampling(max_new_tokens=8, temperature=0.0))
    assert outputs(completions) == [greedy(model, prompt, 8) for prompt in PROMPTS]
    assert drift(model, completions) <= TOLERANCE


def one_choice_is_greedy(engine: Engine, model: Module) -> None:
    expected = [greedy(model, prompt, 5) for prompt in PROMPTS]
    for sampling in (
        Sampling(max_new_tokens=5, top_k=1, temperature=2.0),
        Sampling(max_new_tokens=5, top_p=1e-6, temperature=2.0),
    ):
        assert outputs(engine.generate(requests(PROMPTS), sampling)) == expected, f"{sampling} is not greedy"


def logprobs_before_the_filters(engine: Engine, model: Module) -> None:
    for temperature, top_p, top_k in ((1.0, 1.0, 0), (0.5, 1.0, 0), (2.0, 0.7, 0), (1.5, 1.0, 4), (0.7, 0.9, 9)):
        sampling = Sampling(max_new_tokens=4, n=2, temperature=temperature, top_p=top_p, top_k=top_k, seed=4)
        completions = engine.generate(requests(PROMPTS), sampling)
        far = drift(model, completions, temperature)
        assert far <= TOLERANCE, f"temperature {temperature}, top_p {top_p}, top_k {top_k}: off by {far}"
        for one in completions:
            logits = logits_of(model, one.prompt_token_ids + one.output_token_ids)[len(one.prompt_token_ids) - 1 : -1]
            drawn = logits.gather(1, torch.tensor(one.output_token_ids)[:, None])
            likelier = (logits > drawn + TOLERANCE).sum(-1)
            mass = (logits / temperature).softmax(-1).where(logits > drawn + TOLERANCE, torch.zeros(())).sum(-1)
            assert top_k == 0 or int(likelier.max()) < top_k, "a token outside the top_k was drawn"
            assert float(mass.max()) <= top_p, "a token outside the top_p was drawn"


def draws_follow_the_distribution(engine: Engine, model: Module) -> None:
    prompt, draws, temperature = (3, 5, 8), 400, 3.0
    completions = engine.generate(
        [Request(prompt)], Sampling(max_new_tokens=1, n=draws, temperature=temperature, seed=0)
    )
    wanted = (logits_of(model, prompt)[-1] / temperature).softmax(-1)

    def distance(tokens: Tensor) -> float:
        return float((torch.bincount(tokens, minlength=VOCABULARY) / draws - wanted).abs().sum())

    generator = torch.Generator().manual_seed(0)
    usual = max(distance(wanted.multinomial(draws, replacement=True, generator=generator)) for _ in range(50))
    found = distance(torch.tensor(outputs(completions)).flatten())
    assert found <= 1.3 * usual, f"the draws are {found} from the distribution, fair ones at most {usual}"


def a_seed_repeats(engine: Engine, model: Module) -> None:
    sampling = Sampling(max_new_tokens=6, n=3, seed=11, temperature=2.0)
    first = outputs(engine.generate(requests(PROMPTS), sampling))
    assert outputs(engine.generate(requests(PROMPTS), sampling)) == first
    other = Sampling(max_new_tokens=6, n=3, seed=12, temperature=2.0)
    assert outputs(engine.generate(requests(PROMPTS), other)) != first
    assert len(set(first)) == len(first), "samples of one prompt, or of equal prompts, are the same"


def without_a_seed_it_varies(engine: Engine, model: Module) -> None:
    sampling = Sampling(max_new_tokens=6, temperature=2.0)
    one, other = (outputs(engine.generate(requests(PROMPTS), sampling)) for _ in range(2))
    assert one != other
    assert one[1] != one[3], "equal prompts got the same sample"


def a_request_has_its_own_draws(engine: Engine, model: Module) -> None:
    sampling = Sampling(max_new_tokens=5, n=2, temperature=2.0, seed=1)
    seeded = [Request(prompt, 100 + place) for place, prompt in enumerate(PROMPTS)]
    whole = outputs(engine.generate(seeded, sampling))
    backwards = outputs(engine.generate(seeded[::-1], Sampling(max_new_tokens=5, n=2, temperature=2.0, seed=2)))
    assert [backwards[2 * place : 2 * place + 2] for place in (4, 3, 2, 1, 0)] == [
        whole[2 * place : 2 * place + 2] for place in range(5)
    ]
    assert outputs(engine.generate([Request((1, 1)), seeded[2]], sampling))[2:] == whole[4:6]
    assert outputs(engine.generate([seeded[2]], Sampling(max_new_tokens=5, n=2, temperature=2.0))) == whole[4:6]


def stop_tokens(engine: Engine, model: Module) -> None:
    free = [greedy(model, prompt, 8) for prompt in PROMPTS]
    stop = free[0][3]
    completions = engine.generate(
        requests(PROMPTS), Sampling(max_new_tokens=8, temperature=0.0, stop_token_ids=(stop,))
    )
    for long, short in zip(free, completions, strict=True):
        end = long.index(stop) + 1 if stop in long else 8
        assert short.output_token_ids == long[:end]
        assert short.finish_reason == ("stop" if stop in long else "length")
    assert drift(model, completions) <= TOLERANCE


def stop_strings(engine: Engine, model: Module) -> None:
    free = [greedy(model, prompt, 10) for prompt in PROMPTS]
    stop = "".join(map(chr, free[2][3:5]))
    completions = engine.generate(requests(PROMPTS), Sampling(max_new_tokens=10, temperature=0.0, stop=stop))
    for long, short in zip(free, completions, strict=True):
        where = "".join(map(chr, long)).find(stop)
        assert short.output_token_ids == long[: 10 if where < 0 else where + 2]
        assert short.finish_reason == ("length" if where < 0 else "stop")
    assert completions[2].finish_reason == "stop"
    assert drift(model, completions) <= TOLERANCE


ENGINE_LAWS: tuple[EngineLaw, ...] = (
    EngineLaw(
        "R2 FC11: new weights alone are served, also after a long common prefix", new_weights_alone, updates=True
    ),
    EngineLaw("R2 FC32: an unknown name is refused, and no half update served", unknown_name, updates=True),
    EngineLaw("R2: a wrong shape is refused, and no half update served", wrong_shape, updates=True),
    EngineLaw("R2: a stream that fails leaves no half update", stream_that_fails, updates=True),
    EngineLaw("R3: weights of another precision are cast once", other_precision, updates=True),
    EngineLaw("R4 FC35: sleep and wake are idempotent, also after a failed generate", sleep_and_wake, computes=False),
    EngineLaw("R4 FC12: asleep at level 2, woken and updated it serves", sleep_without_weights, updates=True),
    EngineLaw("R5: what cannot be served is refused by index", bad_requests, computes=False),
    EngineLaw("R1 R8 FC36 FC37: completions are whole, n of a prompt adjacent", completions_are_whole, computes=False),
    EngineLaw("R7: greedy tokens are Hugging Face's", greedy_equals_hugging_face),
    EngineLaw("R7: top_k of one and a tiny top_p are greedy", one_choice_is_greedy),
    EngineLaw("R7: log-probabilities are those at the temperature, before the filters", logprobs_before_the_filters),
    EngineLaw("R7: draws follow the distribution at the temperature", draws_follow_the_distribution),
    EngineLaw("R7: a seed repeats", a_seed_repeats, seeds=True),
    EngineLaw("R7 FC42: without a seed no two calls are the same", without_a_seed_it_varies),
    EngineLaw("R7: a seeded request draws the same in any batch", a_request_has_its_own_draws, seeds=True),
    EngineLaw("R7: a stop token ends a completion and stays in it", stop_tokens),
    EngineLaw("R7: a stop string ends a completion at the token that completes it", stop_strings),
)
"""All laws of engines."""
