"""``hf``: Hugging Face ``generate`` in this process, on the trainer's own module: an update has nothing to copy.

Shape suffixes: R rows (one per completion), U distinct prompts among them, L longest prompt, N new tokens,
M = L + N, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, cast

import torch
from attrs import evolve, field, frozen
from torch import Tensor
from torch.nn import Module

from lightrft.engines.checks import check_requests
from lightrft.engines.hf_media import Expanded, expanded, repeated
from lightrft.engines.hf_sampling import (
    Recorder,
    Sampler,
    Tokenizer,
    Watcher,
    end_of,
    generation_config,
    hugging_face_config,
    row_seeds,
    uniforms,
    warpers,
)
from lightrft.engines.hf_weights import (
    Incomplete,
    check_own,
    copy_weights,
    empty_copy,
    named_tensors_of,
    parameter_names,
)
from lightrft.engines.protocol import Capabilities, Completion, Request, Sampling
from lightrft.errors import EngineError, UnsupportedOperation
from lightrft.ops.models import cache_keyword

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel


class Generates(Protocol):
    """A module with Hugging Face's ``generate``."""

    def generate(self, **kwargs: object) -> Tensor: ...


@frozen(eq=False)
class HfEngine:
    """See :func:`hf` and :func:`hf_copy`."""

    model: Module
    tokenizer: Tokenizer | None
    max_model_len: int | None
    batch_tokens: int
    share_prefill: bool
    eos_token_ids: tuple[int, ...]
    incomplete: Incomplete | None = None
    """What a copy of the model lacks; None: the model is the trainer's own."""
    capabilities: Capabilities = field(default=Capabilities(shares_weights=True))
    processor: object = None
    """A Hugging Face processor, for images and videos."""
    name: str = "hf"

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Completions in the order of the requests; batches are formed by length and put back in order.

        Each is drawn from a seed of its own: batches, their order and the other requests change none.
        """
        if self.incomplete is not None and self.incomplete.awaited:
            raise EngineError(
                "engine 'hf' has a copy of the model here, and not yet all of its weights. "
                "Call strategy.update_engine_weights(actor) first."
            )
        read = [self._read(request) for request in requests]
        check_requests(
            [each.request for each in read],
            sampling,
            vocab_size=vocabulary_size(self.model),
            max_model_len=self.max_model_len,
            has_tokenizer=self.tokenizer is not None,
        )
        rows = [each for each in read for _ in range(sampling.n)]
        prompts = [each.request.prompt_token_ids for each in rows]
        done: dict[int, Completion] = {}
        seeds = row_seeds(requests, sampling) if sampling.temperature > 0.0 else [0] * len(rows)
        with generating(self.model):
            for batch in self._batches(rows, sampling):
                some = complete(
                    self,
                    [prompts[row] for row in batch],
                    [seeds[row] for row in batch],
                    sampling,
                    rows[batch[0]].inputs,
                )
                done.update(zip(batch, some, strict=True))
        asked = [request.prompt_token_ids for request in requests for _ in range(sampling.n)]
        return [evolve(done[index], prompt_token_ids=prompt) for index, prompt in enumerate(asked)]

    def _read(self, request: Request) -> Expanded:
        if not request.images and not request.videos:
            return Expanded(request)
        if self.processor is None:
            raise UnsupportedOperation(
                "engine 'hf' reads images and videos with the model's processor, and was made without one. Instead: pass "
                "args.processor = AutoProcessor.from_pretrained(...)."
            )
        return expanded(self.processor, request)

    def _batches(self, rows: Sequence[Expanded], sampling: Sampling) -> Iterator[list[int]]:
        """Indices of rows: those of text together, those of a prompt with pictures by themselves."""
        text = [index for index, row in enumerate(rows) if not row.inputs]
        prompts = [rows[index].request.prompt_token_ids for index in text]
        for batch in batches(prompts, sampling.max_new_tokens, self.batch_tokens):
            yield [text[place] for place in batch]
        for start in range(0, len(rows), sampling.n):
            if rows[start].inputs:
                yield list(range(start, start + sampling.n))

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copies nothing where the weights are the module's own, and raises ``EngineError`` for any that are not.

        A copy takes all parameters at first, by name, and any of them afterwards; ``EngineError`` for a name or a shape
        that it does not have, and for a parameter that was not among the first.
        """
        if self.incomplete is None:
            check_own(self.model, named_tensors)
        else:
            copy_weights(self.model, self.incomplete, named_tensors)

    def differing_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Names of its weights that are not these, in its own dtype."""
        own = named_tensors_of(self.model)
        return [name for name, tensor in named_tensors if not torch.equal(own[name], tensor.to(own[name]))]

    def flush_cache(self) -> None:
        """Nothing is kept between two calls of :meth:`generate`."""

    def sleep(self, level: int = 1) -> None:
        """Its weights are the trainer's, or needed on the device at the next rollout."""
        raise UnsupportedOperation("engine 'hf' cannot sleep: it keeps its weights in place. Instead: leave it awake.")

    def wake_up(self, *, weights_only: bool = False) -> None:
        """It never sleeps."""

    def close(self) -> None:
        """Frees a copy's weights; the trainer's module is left alone."""
        if self.incomplete is not None:
            self.model.to_empty(device="meta")
            self.incomplete.awaited = parameter_names(self.model)


def hf(
    model: Module,
    tokenizer: Tokenizer | None = None,
    max_model_len: int | None = None,
    *,
    batch_tokens: int = 32_768,
    share_prefill: bool = True,
    processor: object = None,
) -> HfEngine:
    """An engine that generates with ``model``, a Hugging Face causal language model, as its weights are at the time.

    ``tokenizer`` is needed for stop strings and for prompts given as text. ``max_model_len`` bounds prompt and
    completion together, in tokens, by default at the model's ``max_position_embeddings``. A batch holds at most
    ``batch_tokens`` positions, padding and new tokens included (but always one completion). Each distinct prompt is
    read once and its keys and values are shared by its completions; ``share_prefill=False`` reads it anew for each,
    for architectures whose cache cannot be split by rows. ``processor``: that of a vision-language model, which then
    takes images and videos.

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
        capabilities=Capabilities(shares_weights=True, multimodal=processor is not None),
        processor=processor,
    )


def hf_copy(
    model: Module,
    tokenizer: Tokenizer | None = None,
    max_model_len: int | None = None,
    *,
    batch_tokens: int = 32_768,
    share_prefill: bool = True,
    device: torch.device | None = None,
    processor: object = None,
) -> HfEngine:
    """As :func:`hf`, on a module of its own: for a ``model`` of whose parameters this process holds but a part.

    The copy is of the kind that ``model.config`` says, has the dtype of the model's first parameter, lies on ``device``
    (by default the model's) and has the model's buffers as they are now. Its parameters are left as the memory was: it
    refuses to generate until ``update_weights`` gave it all of them.
    """
    engine = hf(
        model, tokenizer, max_model_len, batch_tokens=batch_tokens, share_prefill=share_prefill, processor=processor
    )
    own = empty_copy(model, device_of(model) if device is None else device)
    return evolve(
        engine,
        model=own,
        incomplete=Incomplete(parameter_names(own)),
        capabilities=evolve(engine.capabilities, shares_weights=False),
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


def complete(
    engine: HfEngine,
    rows: Sequence[tuple[int, ...]],
    seeds: Sequence[int],
    sampling: Sampling,
    media: Mapping[str, Tensor],
) -> list[Completion]:
    """One completion for each row, drawn from its seed. ``media``: what the pictures are of each row, all of one prompt."""
    from transformers import LogitsProcessorList, StoppingCriteriaList

    ids_RL, mask_RL = left_padded(rows, device_of(engine.model))
    recorder = Recorder(sampling.temperature or 1.0)
    sampler = Sampler(uniforms(seeds, sampling.max_new_tokens).to(ids_RL.device), ids_RL.shape[1])
    drawing = [*warpers(sampling), sampler] if sampling.temperature > 0.0 else []
    watcher = Watcher(engine.tokenizer, sampling.stop, ids_RL.shape[1])
    arguments: dict[str, object] = {"input_ids": ids_RL, "attention_mask": mask_RL}
    arguments |= repeated(media, len(rows), ids_RL.device)
    if not media and engine.share_prefill and ids_RL.shape[1] > 1 and len(set(rows)) < len(rows):
        arguments[cache_keyword(engine.model)] = shared_prefix(engine.model, rows)
    stops = (*engine.eos_token_ids, *sampling.stop_token_ids)
    sequences_RM = cast("Generates", engine.model).generate(
        **arguments,
        generation_config=generation_config(sampling, stops),
        logits_processor=LogitsProcessorList([*([recorder] if sampling.logprobs else []), *drawing]),
        stopping_criteria=StoppingCriteriaList([watcher] if sampling.stop else []),
    )
    sampler.check()
    output_RN = sequences_RM[:, ids_RL.shape[1] :]
    logprobs = recorder.finish(output_RN).tolist() if sampling.logprobs else [None] * len(rows)
    completions = []
    for row, (prompt, output, drawn) in enumerate(zip(rows, output_RN.tolist(), logprobs, strict=True)):
        length, reason = end_of(output, frozenset(stops), watcher.ended.get(row))
        kept = None if drawn is None else tuple(drawn[:length])
        completions.append(Completion(prompt, tuple(output[:length]), kept, reason))
    return completions


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
