"""``vllm``: vLLM in this process, beside the trainer; see :func:`lightrft.engines.vllm_setup.vllm`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from attrs import define, field, frozen
from torch import Tensor

from lightrft.engines.buckets import buckets
from lightrft.engines.checks import check_requests
from lightrft.engines.expected_weights import Model, Shape, refuse_misfits
from lightrft.engines.hf_sampling import Tokenizer, row_seeds
from lightrft.engines.protocol import Capabilities, Completion, FinishReason, Request, Sampling
from lightrft.engines.stops import string_end
from lightrft.errors import EngineError, UnsupportedOperation
from lightrft.ops.seeds import derived_seed

# --------------------------------------------------------------------------------------------------- vLLM, as it is used


class Logprob(Protocol):
    @property
    def logprob(self) -> float: ...


class Output(Protocol):
    """One continuation."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[Mapping[int, Logprob]] | None: ...
    @property
    def finish_reason(self) -> str | None: ...


class RequestOutput(Protocol):
    @property
    def outputs(self) -> Sequence[Output]: ...


class LlmEngine(Protocol):
    def has_unfinished_requests(self) -> bool: ...
    def reset_encoder_cache(self) -> None: ...


class Llm(Protocol):
    """The public calls of ``vllm.LLM`` that are made here."""

    @property
    def llm_engine(self) -> LlmEngine: ...
    def generate(
        self, prompts: Sequence[Mapping[str, object]], sampling_params: Sequence[object], *, use_tqdm: bool
    ) -> Sequence[RequestOutput]: ...
    def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[object, ...] = ()) -> object: ...
    def reset_prefix_cache(self) -> bool: ...
    def sleep(self, level: int = 1) -> object: ...
    def wake_up(self, tags: list[str] | None = None) -> object: ...


class MakeParams(Protocol):
    """``vllm.SamplingParams``."""

    def __call__(self, **settings: object) -> object: ...


@define(eq=False)
class VllmState:
    """What changes while the engine lives."""

    llm: Llm | None
    """None once it is closed."""
    incomplete: bool
    """It lacks weights, or has those of two models: it refuses to generate until a whole update came."""
    asleep: bool = False
    takes_weights: bool = True
    """Awake, or its weights are."""
    died_of: str | None = None
    temperature: float = 1.0
    unseeded_calls: int = 0


# ------------------------------------------------------------------------------------------------------------ the engine


@frozen(eq=False)
class VllmEngine:
    """Satisfies ``Engine``. Made by :func:`lightrft.engines.vllm_setup.vllm`."""

    state: VllmState
    make_params: MakeParams
    model: Model
    """What requests are checked against; its ends of a sequence are what ends a completion."""
    max_model_len: int | None
    tokenizer: Tokenizer | None
    knows_tokenizer: bool
    """vLLM has the tokenizer too, and stops at a stop string by itself."""
    expected: Mapping[str, Shape]
    """The shape of every weight by each of its names in the plain Hugging Face model."""
    first_names: Mapping[str, str]
    """The first name of a weight by each of them: a tied weight is sent once."""
    dtype: torch.dtype
    device: torch.device
    bucket_bytes: int
    seed: int
    """Of calls without a seed: equal on the ranks of one engine, different on those of another."""
    release: Callable[[Llm], None]
    """Ends vLLM and frees what was set up around it."""
    capabilities: Capabilities = field(factory=Capabilities)
    processor: object = None
    """A Hugging Face processor, for images and videos."""
    name: str = "vllm"

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Completions in the order of the requests, each drawn from a seed of its own.

        Raises ``EngineError`` for what cannot be served, before weights came, and when vLLM fails: it then counts as
        dead and can only be closed.
        """
        llm = self._awake("generate")
        if self.state.incomplete:
            raise EngineError(
                "engine 'vllm' does not have all weights of one model yet: it was just set up, or an update failed. "
                "Call strategy.update_engine_weights(actor) first."
            )
        check_requests(
            requests,
            sampling,
            vocab_size=self.model.vocab_size,
            max_model_len=self.max_model_len,
            has_tokenizer=self.tokenizer is not None,
        )
        if not self.capabilities.multimodal and any(request.images or request.videos for request in requests):
            raise UnsupportedOperation(
                "engine 'vllm' runs a model of text alone here: it cannot generate from images or videos. "
                "Instead: pass token ids only, or set it up with a vision-language model."
            )
        if not requests:
            return []
        self._divide_logits(sampling.temperature or 1.0)
        rows = [request for request in requests for _ in range(sampling.n)]
        params = [self._params(sampling, seed) for seed in self._seeds(requests, sampling)]
        try:
            # One row for each sample: vLLM's own n would give neighbouring samples neighbouring seeds.
            with self._trainers_random_numbers():
                outputs = llm.generate([prompt_of(row) for row in rows], params, use_tqdm=False)
        except BaseException as error:
            if isinstance(error, Exception) and is_empty(llm):
                raise EngineError(
                    f"engine 'vllm' refused a request, and nothing was generated: {error}. Correct the prompt, or its "
                    f"images and videos, and call again."
                ) from error
            # Requests that were interrupted would come out of the next call: no other may follow.
            self.state.died_of = f"while it generated: {type(error).__name__}: {error}"
            if isinstance(error, Exception):
                raise self._dead() from error
            raise
        return [self._completion(row, one.outputs[0], sampling) for row, one in zip(rows, outputs, strict=True)]

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Takes all weights of the model, in buckets of at most ``bucket_bytes`` (or one tensor), each cast once.

        Raises ``EngineError`` for a name or a shape that the model does not have and for weights that did not come.
        After an update that failed once its first bucket was loaded the engine refuses to generate until a whole one.
        """
        if not self.state.takes_weights:
            self._awake("update its weights")
        sent: set[str] = set()
        started = False
        try:
            for bucket in buckets(self._fitting(named_tensors), self.bucket_bytes, self.dtype):
                if not started:
                    started = self.state.incomplete = True
                    self._call("lightrft_start_update")
                self._call("lightrft_load_weights", bucket)
                sent.update(name for name, _ in bucket)
        finally:
            # After a failure too: the next update then begins from the start.
            if started and self.state.died_of is None:
                self._call("lightrft_finish_update")
        missing = set(self.first_names.values()) - sent
        if missing:
            raise EngineError(
                f"engine 'vllm' was not given {len(missing)} of its weights, such as {min(missing)!r}. "
                f"Pass all parameters of the actor in every update, by their names in the plain model."
            )
        self.state.incomplete = False

    def flush_cache(self) -> None:
        """Forgets keys and values of prompts, and what was computed of images."""
        llm = self._alive()
        if llm.reset_prefix_cache() is False:
            raise EngineError("engine 'vllm' could not drop its prefix cache: requests are still running.")
        if self.capabilities.multimodal:
            llm.llm_engine.reset_encoder_cache()

    def sleep(self, level: int = 1) -> None:
        """Level 1 moves the weights to the host's memory and drops the caches; level 2 drops the weights too."""
        llm = self._alive()
        if not self.capabilities.sleep:
            raise UnsupportedOperation(
                "engine 'vllm' cannot sleep here: vLLM has a sleep mode on CUDA only, and only when it is set up with "
                "enable_engine_sleep. Instead: leave it awake."
            )
        if not self.state.asleep:
            self.state.incomplete |= level >= 2
            llm.sleep(level=level)
            self.state.asleep, self.state.takes_weights = True, False

    def wake_up(self, *, weights_only: bool = False) -> None:
        """Undoes it: weights first, then room for the caches. Awake, nothing happens."""
        llm = self._alive()
        if self.state.asleep and not self.state.takes_weights:
            llm.wake_up(tags=["weights"])
            self.state.takes_weights = True
        if self.state.asleep and not weights_only:
            llm.wake_up(tags=["kv_cache"])
            self.state.asleep = False

    def close(self) -> None:
        """Frees everything; a second call is harmless, and so is one after its death."""
        llm, self.state.llm = self.state.llm, None
        if llm is not None:
            self.release(llm)

    # ------------------------------------------------------------------------------------------------------ its parts

    def _alive(self) -> Llm:
        if self.state.died_of is not None:
            raise self._dead()
        if self.state.llm is None:
            raise EngineError("engine 'vllm' is closed. Set up another one: strategy.setup_inference_engine(...).")
        return self.state.llm

    def _awake(self, operation: str) -> Llm:
        llm = self._alive()
        if self.state.asleep:
            raise EngineError(f"engine 'vllm' sleeps and cannot {operation}. Call wake_up() first.")
        return llm

    def _trainers_random_numbers(self) -> AbstractContextManager[None]:
        """vLLM draws from them even where each row has a seed."""
        return torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else [])

    def _dead(self) -> EngineError:
        return EngineError(
            f"engine 'vllm' died {self.state.died_of}. Set up another one, which closes this one: "
            f"strategy.setup_inference_engine(args, actor=model). If memory ran out, lower engine_mem_util or the number "
            f"of completions in a call."
        )

    def _call(self, method: str, *args: object) -> None:
        llm = self._alive()
        try:
            llm.collective_rpc(method, args=args)
        except BaseException as error:
            self.state.died_of = f"in {method}: {type(error).__name__}: {error}"
            if isinstance(error, Exception):
                raise self._dead() from error
            raise

    def _divide_logits(self, temperature: float) -> None:
        if temperature != self.state.temperature:
            self._call("lightrft_divide_logits", temperature)
            self.state.temperature = temperature

    def _seeds(self, requests: Sequence[Request], sampling: Sampling) -> Sequence[int | None]:
        if sampling.temperature == 0.0:
            return [None] * (len(requests) * sampling.n)
        call = sampling.seed
        if call is None:
            call = derived_seed(self.seed, self.state.unseeded_calls)
            self.state.unseeded_calls += 1
        return row_seeds(requests, Sampling(n=sampling.n, seed=call))

    def _params(self, sampling: Sampling, seed: int | None) -> object:
        return self.make_params(**settings_of(sampling, seed, self.model.eos_token_ids, self.knows_tokenizer))

    def _completion(self, request: Request, output: Output, sampling: Sampling) -> Completion:
        tokens, reason = tuple(output.token_ids), reason_of(output.finish_reason)
        if sampling.stop and self.tokenizer is not None:
            end = string_end(self.tokenizer, tokens, sampling.stop)
            if end is not None:
                tokens, reason = tokens[:end], "stop"
        logprobs = None
        if sampling.logprobs:
            places = zip(tokens, output.logprobs or (), strict=False)
            logprobs = tuple(float(place[token].logprob) for token, place in places)
        return Completion(request.prompt_token_ids, tokens, logprobs, reason)

    def _fitting(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Each weight once, by its first name; ``EngineError`` for one that the model does not have."""
        seen: set[str] = set()
        for name, tensor in named_tensors:
            refuse_misfits(self.name, self.expected, [(name, tensor)])
            first = self.first_names[name]
            if first not in seen:
                seen.add(first)
                yield first, tensor


# --------------------------------------------------------------------------------------------------------- translations


def settings_of(sampling: Sampling, seed: int | None, ends: Sequence[int], knows_tokenizer: bool) -> dict[str, object]:
    """``Sampling`` in the words of ``vllm.SamplingParams``, for one sample.

    The temperature is not among them: it is in the logits already. Defaults that were shipped with the model are not
    either, and what ends a sequence is said here alone.
    """
    settings: dict[str, object] = {
        "max_tokens": sampling.max_new_tokens,
        "temperature": 0.0 if sampling.temperature == 0.0 else 1.0,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": seed,
        "stop_token_ids": [*dict.fromkeys((*ends, *sampling.stop_token_ids))],
        "ignore_eos": True,
        "logprobs": 0 if sampling.logprobs else None,
        "detokenize": False,
    }
    if sampling.stop and knows_tokenizer:
        settings |= {
            "stop": list(sampling.stop),
            "detokenize": True,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
        }
    return settings


def is_empty(llm: Llm) -> bool:
    """Whether a call that failed left nothing in vLLM: it then failed before anything ran."""
    try:
        return not llm.llm_engine.has_unfinished_requests()
    except Exception:
        return False


def prompt_of(request: Request) -> dict[str, object]:
    """A prompt of token ids; placeholders of images and videos are expanded by vLLM."""
    media = {"image": list(request.images), "video": list(request.videos)}
    prompt: dict[str, object] = {"prompt_token_ids": list(request.prompt_token_ids)}
    if request.images or request.videos:
        prompt["multi_modal_data"] = {kind: items for kind, items in media.items() if items}
    return prompt


def reason_of(finish_reason: str | None) -> FinishReason:
    """vLLM has more words for what went wrong."""
    return "stop" if finish_reason == "stop" else "length" if finish_reason == "length" else "abort"
