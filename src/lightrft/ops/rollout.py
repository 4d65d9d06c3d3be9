"""From prompts to completions: what goes to which engine, and when it is awake (R1, R4, R5)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from operator import index as whole
from struct import error as PackingError
from struct import pack
from typing import Protocol, cast

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.nn import Module

from lightrft.engines.protocol import Completion, Engine, Request, Sampling
from lightrft.errors import EngineError, UnsupportedOperation
from lightrft.ops.collectives import Collecting
from lightrft.ops.lengths import gather_lengths, lengths_of, report_lengths, should_plot
from lightrft.ops.models import WholeWeights, unwrap_model
from lightrft.ops.multimodal import Media, media_by_prompt, placeholders_of, with_media
from lightrft.ops.peers import failing_together
from lightrft.ops.sampling import as_sampling
from lightrft.ops.seeds import derived_seed
from lightrft.ops.weight_sync import DRIFT, DRIFT_IN_BF16, plain_weights, verify
from lightrft.strategy.protocol import AllGather
from lightrft.strategy.record import EngineState, RunState

logger = logging.getLogger(__name__)

# ----------------------------------------------------------------------------------------------------------- prompts


def as_requests(all_prompt_token_ids: Sequence[Sequence[int]]) -> list[Request]:
    """One request for each row of token ids; rows may be lists, arrays or tensors. Errors name the row."""
    return [_request(index, row) for index, row in enumerate(all_prompt_token_ids)]


def _request(index: int, row: object) -> Request:
    tolist = getattr(row, "tolist", None)
    ids: object = row if tolist is None else tolist()
    if isinstance(ids, Iterable) and not isinstance(ids, (str, bytes)):
        with suppress(TypeError):
            return Request(tuple(map(whole, ids)))
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
    """Gives the engine these weights and makes it forget what it computed with older ones (R2).

    One that sleeps wakes its weights before and its caches after, so that what is gathered for the update need not fit
    beside them.
    """
    engine = the_engine(state)
    if state.asleep:
        engine.wake_up(weights_only=True)
    try:
        engine.update_weights(named_tensors)
    finally:
        wake_engine(state)
    engine.flush_cache()
    state.weight_version += 1


def complete(state: EngineState, requests: Sequence[Request], sampling: Sampling, first_place: int) -> list[Completion]:
    """``n`` adjacent completions for each request, in their order; none for none, and then nothing wakes.

    ``first_place``: how many prompts come before these on other ranks; with a seed, a prompt's place decides its draws.
    """
    engine = the_engine(state)
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


def generate_local(
    state: EngineState,
    sampling_params: object,
    prompt_token_ids: Sequence[Sequence[int]] | None = None,
    multi_modal_inputs: Sequence[Mapping[str, object]] | None = None,
) -> list[Completion]:
    """``n`` adjacent completions for each prompt, in the order of the prompts; no prompts, no completions.

    Exactly one of the two kinds of input, else ``ValueError`` (R5). ``multi_modal_inputs`` are mappings as vLLM has them:
    ``prompt_token_ids`` or ``prompt``, and ``multi_modal_data`` with ``image`` and ``video``.
    """
    if (prompt_token_ids is None) == (multi_modal_inputs is None):
        seen = "neither" if prompt_token_ids is None else "both"
        raise ValueError(f"exactly one of prompt_token_ids and multi_modal_inputs is needed, got {seen}.")
    engine = the_engine(state)
    if prompt_token_ids is not None:
        requests = as_requests(prompt_token_ids)
    else:
        requests = requests_of_inputs(engine, multi_modal_inputs or ())
    return complete(state, requests, as_sampling(sampling_params), first_place=0)


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
    """An engine that reads text alone."""
    return UnsupportedOperation(
        f"engine {engine.name!r} cannot generate from images or videos here. Instead: pass token ids only, or set up an "
        f"engine that can with a vision-language model and its processor."
    )


def requests_with_media(
    engine: Engine, requests: Sequence[Request], images: Sequence[Media], videos: Sequence[Media]
) -> list[Request]:
    """Requests with their media. Where none has any, the prompts stay as they are, placeholders in them too (FC47)."""
    if not any(images) and not any(videos):
        return list(requests)
    processor: object = getattr(engine, "processor", None)
    if not engine.capabilities.multimodal:
        raise no_media(engine)
    if processor is None:
        raise EngineError(
            f"engine {engine.name!r} has no processor, which says what stands for an image in a prompt. "
            f"Set it up with args.processor = AutoProcessor.from_pretrained(...)."
        )
    return with_media(requests, images, videos, placeholders_of(processor))


def requests_of_inputs(engine: Engine, inputs: Sequence[Mapping[str, object]]) -> list[Request]:
    """Requests out of mappings as vLLM has them."""
    images: list[Media] = []
    videos: list[Media] = []
    prompts: list[Sequence[int]] = []
    for index, given in enumerate(inputs):
        unknown = sorted(set(given) - {"prompt", "prompt_token_ids", "multi_modal_data"})
        data = given.get("multi_modal_data") or {}
        if unknown or not isinstance(data, Mapping) or ("prompt" in given) == ("prompt_token_ids" in given):
            raise ValueError(
                f"multi_modal_inputs[{index}] has {sorted(given)}: exactly one of prompt and prompt_token_ids is needed, "
                f"and multi_modal_data may hold image and video."
            )
        if beside := sorted(set(map(str, data)) - {"image", "video"}):
            raise ValueError(f"multi_modal_inputs[{index}] holds {beside}. There are image and video.")
        images += media_by_prompt("images", [data.get("image")], None, 1)
        videos += media_by_prompt("videos", [data.get("video")], None, 1)
        text = given.get("prompt")
        ids = encode_prompts(engine, [str(text)])[0] if text is not None else given["prompt_token_ids"]
        prompts.append(cast("Sequence[int]", ids))
    return requests_with_media(engine, as_requests(prompts), images, videos)


def asked_for(
    engine: Engine,
    all_prompt_token_ids: Sequence[Sequence[int]] | None,
    all_prompts: Sequence[str] | None,
    all_images: Sequence[object] | None,
    images_num: Sequence[int] | None,
    all_videos: Sequence[object] | None,
    videos_num: Sequence[int] | None,
) -> list[Request]:
    """One request for each prompt. Where ids and text are given the ids are taken: the text was turned into them."""
    if all_prompt_token_ids is None:
        if all_prompts is None:
            raise ValueError("gather_and_generate needs prompts, got none. Pass all_prompt_token_ids, or all_prompts.")
        all_prompt_token_ids = encode_prompts(engine, all_prompts)
    requests = as_requests(all_prompt_token_ids)
    images = media_by_prompt("images", all_images, images_num, len(requests))
    videos = media_by_prompt("videos", all_videos, videos_num, len(requests))
    return requests_with_media(engine, requests, images, videos)


# ----------------------------------------------------------------------------------------------- the operations


@frozen(eq=False)
class Sending:
    """What ``update_engine_weights`` works with."""

    run: RunState
    whole_weights: WholeWeights
    collecting: Collecting


def update_engine_weights(sending: Sending, actor: Module) -> None:
    """The actor's weights, to the engine of every rank; with ``verify_weight_sync`` looked at afterwards.

    An error on one rank is an error on all. A rank whose engine fails goes on reading: gathering takes all ranks.
    """
    run, engine = sending.run, the_engine(sending.run.engine)
    plain = unwrap_model(actor)

    def weights() -> Iterator[tuple[str, Tensor]]:
        own = sending.whole_weights(actor)
        return own if engine.capabilities.shares_weights else plain_weights(plain, own)

    with on_all_ranks(sending.collecting.all_gather, "update_engine_weights"):
        named_tensors = weights()
        try:
            sync_weights(run.engine, named_tensors)
        finally:
            if run.world.world_size > 1:
                for _ in named_tensors:
                    pass
    if run.config.verify_weight_sync:
        with on_all_ranks(sending.collecting.all_gather, "the verification of the engine's weights"):
            verify(engine, plain, run.device, weights(), DRIFT_IN_BF16 if run.config.bf16 else DRIFT)


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
    """The completions of this rank's own prompts, in their order, ``n`` adjacent (R1).

    Each engine completes the prompts of the ranks that share it: ``engine_tp_size`` neighbours. With a seed, a prompt's
    completions depend on its place among the prompts of all ranks: they are the same at any world size. An error on one
    rank is an error on all.
    """
    state, gather = generating.run, generating.collecting.all_gather
    with on_all_ranks(gather, "gather_and_generate"):
        sampling = as_sampling(sampling_params)
        requests = asked_for(
            the_engine(state.engine), all_prompt_token_ids, all_prompts, all_images, images_num, all_videos, videos_num
        )
        refuse_media_of_groups(state, requests)
        group = group_of(state.world.rank, state.config.engine_tp_size)
        packed = packed_ids(requests) if len(group) > 1 else None
    counts = gather(len(requests))
    shared = requests if packed is None else requests_of_group(requests, packed, state.world.rank, group, gather)
    with on_all_ranks(gather, "gather_and_generate"):
        completed = complete(state.engine, shared, sampling, first_place=sum(counts[: group.start]))
    skipped = sum(counts[group.start : state.world.rank]) * sampling.n
    completions = completed[skipped : skipped + len(requests) * sampling.n]
    state.engine.rollouts += 1
    if should_plot(state.engine.rollouts, state.config.plot_every):
        lengths = gather_lengths(lengths_of(completions), gather)
        if state.world.rank == 0:
            report_lengths(lengths, state.config.log_dir, state.engine.rollouts)
    if sleep_engine and state.config.enable_engine_sleep:
        maybe_sleep_inference_engine(state)
    return completions


def group_of(rank: int, size: int) -> range:
    """The ranks that share an engine with this one."""
    start = rank - rank % size
    return range(start, start + size)


def refuse_media_of_groups(state: RunState, requests: Sequence[Request]) -> None:
    """Images and videos do not travel between ranks."""
    if state.config.engine_tp_size > 1 and any(request.images or request.videos for request in requests):
        raise UnsupportedOperation(
            f"images and videos cannot be shared by the {state.config.engine_tp_size} ranks of an engine. "
            f"Instead: use engine_tp_size=1."
        )


def requests_of_group(
    requests: Sequence[Request], packed: Mapping[str, Tensor], rank: int, group: range, gather: AllGather
) -> list[Request]:
    """Those of all ranks of the group, in rank order. ``packed``: this rank's own, by :func:`packed_ids`."""
    parts = gather(dict(packed))
    gathered: list[Request] = []
    for each in group:
        gathered += requests if each == rank else unpacked_ids(parts["lengths"][each], parts["ids"][each])
    return gathered


def packed_ids(requests: Sequence[Request]) -> dict[str, Tensor]:
    """All token ids one behind another, int32, which holds every vocabulary in half the bytes; int64 [requests] lengths."""
    ids = bytearray()
    for index, request in enumerate(requests):
        try:
            ids += pack(f"{len(request.prompt_token_ids)}i", *request.prompt_token_ids)
        except PackingError as error:
            raise EngineError(
                f"prompt {index} has a token id that is in no vocabulary: {error}. Encode it with the model's tokenizer."
            ) from error
    return {
        "lengths": torch.tensor([len(request.prompt_token_ids) for request in requests], dtype=torch.int64),
        "ids": torch.frombuffer(ids, dtype=torch.int32) if ids else torch.empty(0, dtype=torch.int32),
    }


def unpacked_ids(lengths: Tensor, ids: Tensor) -> list[Request]:
    """Undoes it. Where ids repeat, equal ones are one object: to make a million takes longer than all the rest."""
    flat = ids.numpy()
    ends = lengths.cumsum(0).tolist()
    rows = np.split(flat, ends)[:-1]  # what is left after the last end is empty
    if flat.min(initial=0) < 0 or flat.max(initial=0) >= flat.size:
        return [Request(tuple(row.tolist())) for row in rows]
    numbers = np.arange(flat.max(initial=0) + 1).astype(object)
    return [Request(tuple(numbers.take(row).tolist())) for row in rows]


def on_all_ranks(gather: AllGather, operation: str) -> AbstractContextManager[None]:
    """What fails on one rank inside is an error on all of them, on any backend that can gather tensors."""

    def tell(text: str) -> list[str]:
        return [bytes(each.tolist()).decode() for each in gather(as_bytes(text))]

    return failing_together(tell, operation, EngineError)


def as_bytes(text: str) -> Tensor:
    """UTF-8, as a tensor that can be gathered."""
    return torch.tensor(list(text.encode()), dtype=torch.uint8)
