"""``hf``: Hugging Face ``generate`` in this process, on the trainer's own module: an update has nothing to copy.

Shape suffixes: R rows (one per completion), U distinct prompts among them, L longest prompt, N new tokens,
M = L + N, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, cast

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch.nn import Module

from lightrft.engines.checks import check_requests
from lightrft.engines.protocol import Capabilities, Completion, FinishReason, Request, Sampling
from lightrft.errors import EngineError, UnsupportedOperation
from lightrft.ops.models import cache_keyword

if TYPE_CHECKING:
    from transformers import Cache, GenerationConfig, PreTrainedModel


class Tokenizer(Protocol):
    """What the engine asks of a tokenizer: stop strings are looked for in decoded text, text prompts are encoded."""

    @property
    def eos_token_id(self) -> int | list[int] | None: ...
    def decode(self, token_ids: list[int], /) -> str: ...
    def encode(self, text: str, /, *, add_special_tokens: bool) -> list[int]: ...


class Generates(Protocol):
    """A module with Hugging Face's ``generate``."""

    def generate(self, **kwargs: object) -> Tensor: ...


@frozen(eq=False)
class HfEngine:
    """See :func:`hf`."""

    model: Module
    tokenizer: Tokenizer | None
    max_model_len: int | None
    batch_tokens: int
    share_prefill: bool
    eos_token_ids: tuple[int, ...]
    capabilities: Capabilities = field(default=Capabilities(shares_weights=True))
    name: str = "hf"

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Completions in the order of the requests; batches are formed by length and put back in order."""
        check_requests(
            requests,
            sampling,
            vocab_size=vocabulary_size(self.model),
            max_model_len=self.max_model_len,
            has_tokenizer=self.tokenizer is not None,
        )
        prompts = [request.prompt_token_ids for request in requests for _ in range(sampling.n)]
        done: dict[int, Completion] = {}
        with generating(self.model), repeating(sampling.seed, device_of(self.model)):
            for batch in batches(prompts, sampling.max_new_tokens, self.batch_tokens):
                rows = [prompts[index] for index in batch]
                done.update(zip(batch, complete(self, rows, sampling), strict=True))
        return [done[index] for index in range(len(prompts))]

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copies nothing: the weights are the module's own. Raises ``EngineError`` for any that are not."""
        own = {**dict(self.model.named_parameters(remove_duplicate=False)), **dict(self.model.named_buffers())}
        for name, tensor in named_tensors:
            if name not in own:
                raise EngineError(
                    f"engine 'hf' has no parameter {name!r}. Pass the names of the plain, unwrapped model."
                )
            if tensor.data_ptr() != own[name].data_ptr():
                raise EngineError(
                    f"engine 'hf' generates from the module that it was made with, and {name!r} is another module's. "
                    f"Set the engine up with this actor."
                )

    def flush_cache(self) -> None:
        """Nothing is kept between two calls of :meth:`generate`."""

    def sleep(self, level: int = 1) -> None:
        """Its weights are the trainer's: there is nothing to free."""
        raise UnsupportedOperation("engine 'hf' cannot sleep: it holds no memory of its own. Instead: leave it awake.")

    def wake_up(self) -> None:
        """It never sleeps."""

    def close(self) -> None:
        """The module is the trainer's; nothing else is held."""


def hf(
    model: Module,
    tokenizer: Tokenizer | None = None,
    max_model_len: int | None = None,
    *,
    batch_tokens: int = 32_768,
    share_prefill: bool = True,
) -> HfEngine:
    """An engine that generates with ``model``, a Hugging Face causal language model, as its weights are at the time.

    ``tokenizer`` is needed for stop strings and for prompts given as text. ``max_model_len`` bounds prompt and
    completion together, in tokens, by default at the model's ``max_position_embeddings``. A batch holds at most
    ``batch_tokens`` positions, padding and new tokens included (but always one completion). Each distinct prompt is
    read once and its keys and values are shared by its completions; ``share_prefill=False`` reads it anew for each,
    for architectures whose cache cannot be split by rows.

    An end-of-sequence token is one that the model's generation config or the tokenizer names. All else in the model's
    generation config is left out: what is sampled is what ``Sampling`` says. Raises ``EngineError`` when ``model``
    cannot generate.
    """
    if not callable(getattr(model, "generate", None)):
        raise EngineError(
            f"engine 'hf' needs a Hugging Face model with generate(), got {type(model).__name__}. "
            f"Load it with AutoModelForCausalLM, or choose another engine."
        )
    if batch_tokens < 1:
        raise EngineError(f"batch_tokens={batch_tokens} leaves no room for a completion. Pass a number above 0.")
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return HfEngine(
        model=model,
        tokenizer=tokenizer,
        max_model_len=limit if max_model_len is None else max_model_len,
        batch_tokens=batch_tokens,
        share_prefill=share_prefill,
        eos_token_ids=end_of_sequence(model, tokenizer),
    )


# ------------------------------------------------------------------------------------------------------- the model


def end_of_sequence(model: Module, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The tokens that end a completion, in the model's own order."""
    named: list[int | list[int] | None] = [
        getattr(getattr(model, "generation_config", None), "eos_token_id", None),
        None if tokenizer is None else tokenizer.eos_token_id,
    ]
    flat = (token for ids in named if ids is not None for token in ([ids] if isinstance(ids, int) else ids))
    return tuple(dict.fromkeys(flat))


def vocabulary_size(model: Module) -> int:
    """How many token ids the model can read."""
    embeddings = cast("Module", model.get_input_embeddings())  # type: ignore[operator]  # every Hugging Face model has it
    return cast("Tensor", embeddings.weight).shape[0]


def device_of(model: Module) -> torch.device:
    """Where the model's inputs go."""
    return next(model.parameters()).device


@contextmanager
def generating(model: Module) -> Iterator[None]:
    """The model in eval mode and without defaults for sampling; both are afterwards what they were, module by module.

    A generation config that was shipped with the model (a top-p, a repetition penalty) would fill in whatever ours does
    not set, and the tokens would come from another policy than the one that the trainer computes.
    """
    modes = [(module, module.training) for module in model.modules()]
    shipped = [
        (module, vars(module)["generation_config"]) for module, _ in modes if "generation_config" in vars(module)
    ]
    try:
        model.eval()
        for module, _ in shipped:
            vars(module)["generation_config"] = hugging_face_config()
        # Not inference_mode: a buffer that the model makes while it generates would then be unusable in training.
        with torch.no_grad():
            yield
    finally:
        for module, config in shipped:
            vars(module)["generation_config"] = config
        for module, training in modes:
            module.training = training


@contextmanager
def repeating(seed: int | None, device: torch.device) -> Iterator[None]:
    """With a seed: random numbers from that seed, and the trainer's own sequence of them untouched."""
    if seed is None:
        yield
        return
    on_cpu = device.type == "cpu"
    with torch.random.fork_rng([] if on_cpu else [device], device_type="cuda" if on_cpu else device.type):
        # Not torch.manual_seed: it seeds every device, those that were not forked too.
        (torch.default_generator if on_cpu else torch.get_device_module(device)).manual_seed(seed)
        yield


# -------------------------------------------------------------------------------------------------------- a batch


def batches(prompts: Sequence[tuple[int, ...]], new_tokens: int, batch_tokens: int) -> Iterator[list[int]]:
    """Indices of ``prompts``, shortest first, in batches of at most ``batch_tokens`` positions; equal ones adjacent."""
    batch: list[int] = []
    for index in sorted(range(len(prompts)), key=lambda index: (len(prompts[index]), prompts[index])):
        if batch and (len(batch) + 1) * (len(prompts[index]) + new_tokens) > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def left_padded(rows: Sequence[tuple[int, ...]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and mask, both int64 [R, L]; the padding is token 0, which nothing attends to."""
    width = max(map(len, rows))
    ids = [[0] * (width - len(row)) + list(row) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def complete(engine: HfEngine, rows: Sequence[tuple[int, ...]], sampling: Sampling) -> list[Completion]:
    """One completion for each row."""
    from transformers import LogitsProcessorList, StoppingCriteriaList

    ids_RL, mask_RL = left_padded(rows, device_of(engine.model))
    recorder = Recorder(sampling.temperature or 1.0)
    watcher = Watcher(engine.tokenizer, sampling.stop, ids_RL.shape[1])
    arguments: dict[str, object] = {"input_ids": ids_RL, "attention_mask": mask_RL}
    if engine.share_prefill and ids_RL.shape[1] > 1 and len(set(rows)) < len(rows):
        arguments[cache_keyword(engine.model)] = shared_prefix(engine.model, rows)
    stops = (*engine.eos_token_ids, *sampling.stop_token_ids)
    sequences_RM = cast("Generates", engine.model).generate(
        **arguments,
        generation_config=generation_config(sampling, stops),
        logits_processor=LogitsProcessorList([recorder] if sampling.logprobs else []),
        stopping_criteria=StoppingCriteriaList([watcher] if sampling.stop else []),
    )
    output_RN = sequences_RM[:, ids_RL.shape[1] :]
    logprobs = recorder.finish(output_RN).tolist() if sampling.logprobs else [None] * len(rows)
    completions = []
    for row, (prompt, output, drawn) in enumerate(zip(rows, output_RN.tolist(), logprobs, strict=True)):
        length, reason = end_of(output, frozenset(stops), watcher.ended.get(row))
        kept = None if drawn is None else tuple(drawn[:length])
        completions.append(Completion(prompt, tuple(output[:length]), kept, reason))
    return completions


def end_of(output: Sequence[int], stops: frozenset[int], string_end: int | None) -> tuple[int, FinishReason]:
    """The number of tokens of a completion, its stop token included, and why it ended."""
    token_end = next((place + 1 for place, token in enumerate(output) if token in stops), None)
    ends = [end for end in (token_end, string_end) if end is not None]
    return (min(ends), "stop") if ends else (len(output), "length")


def generation_config(sampling: Sampling, stops: Sequence[int]) -> GenerationConfig:
    """Hugging Face's words for ``sampling``."""
    drawing = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    return hugging_face_config(
        max_new_tokens=sampling.max_new_tokens,
        use_cache=True,
        do_sample=sampling.temperature > 0.0,
        eos_token_id=list(stops) or None,
        pad_token_id=stops[0] if stops else 0,
        **(drawing if sampling.temperature > 0.0 else {}),
    )


def hugging_face_config(**settings: object) -> GenerationConfig:
    """Their record of settings; what is not set is None."""
    from transformers import GenerationConfig

    return GenerationConfig(**settings)  # type: ignore[no-untyped-call]  # transformers leaves __init__ untyped


# ------------------------------------------------------------------------------------------------- shared prefixes


def shared_prefix(model: Module, rows: Sequence[tuple[int, ...]]) -> Cache:
    """Keys and values of all prompt tokens but the last, [R, L - 1], from one forward of the distinct prompts.

    The last token is left to ``generate``, which needs its logits.
    """
    from transformers import DynamicCache

    distinct = {prompt: place for place, prompt in enumerate(dict.fromkeys(rows))}
    ids_UL, mask_UL = left_padded(list(distinct), device_of(model))
    config = cast("PreTrainedModel", model).config
    cache = DynamicCache(config=config.get_text_config(decoder=True))
    few_logits = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    model(
        input_ids=ids_UL[:, :-1],
        attention_mask=mask_UL[:, :-1],
        position_ids=(mask_UL.cumsum(-1) - 1).clamp(min=0)[:, :-1],
        use_cache=True,
        **{cache_keyword(model): cache},
        **few_logits,
    )
    cache.batch_select_indices(torch.tensor([distinct[row] for row in rows], device=ids_UL.device))
    return cache


# ------------------------------------------------------------------------------------------- hooks into `generate`


@define(eq=False)
class Recorder:
    """A logits processor that changes nothing and keeps the log-probability of each token that was drawn.

    It stands before temperature, top-k and top-p, so it sees the model's own logits. Which token was drawn shows in the
    next call, so that only one step's logits are held: keeping all, as ``output_logits`` does, takes R * N * V floats.
    """

    temperature: float
    drawn: list[Tensor] = field(factory=list)
    logprobs: Tensor | None = None
    """Of the latest step, float32 [R, V]."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._take(input_ids[:, -1])
        self.logprobs = torch.log_softmax(scores.float() / self.temperature, dim=-1)
        return scores

    def finish(self, output_RN: Tensor) -> Tensor:
        """All of them, float32 [R, N]."""
        if len(self.drawn) < output_RN.shape[1]:
            self._take(output_RN[:, -1])
        return torch.stack(self.drawn[: output_RN.shape[1]], dim=1)

    def _take(self, token_R: Tensor) -> None:
        if self.logprobs is not None:
            self.drawn.append(self.logprobs.gather(1, token_R[:, None]).squeeze(1))


@define(eq=False)
class Watcher:
    """A stopping criterion: the first token at which a row's text holds a stop string.

    Only the end of a row is decoded anew at each step: a stop string spans at most as many tokens as it has bytes.
    """

    tokenizer: Tokenizer | None
    stop: tuple[str, ...]
    prompt_length: int
    ended: dict[int, int] = field(factory=dict)
    """For each row that a string ended: the number of its tokens."""

    def __call__(self, input_ids: Tensor, scores: Tensor | None, **kwargs: object) -> Tensor:
        if self.tokenizer is None:
            raise EngineError(f"stop={self.stop!r} needs a tokenizer. Make the engine with one, or use stop_token_ids.")
        length = input_ids.shape[1] - self.prompt_length
        window = min(length, max(len(string.encode()) for string in self.stop) + 8)
        for row, tail in enumerate(input_ids[:, -window:].tolist()):
            if row not in self.ended:
                text = self.tokenizer.decode(tail)
                if any(string in text for string in self.stop):
                    self.ended[row] = length
        return torch.tensor([row in self.ended for row in range(len(input_ids))], device=input_ids.device)
