"""``sglang``: SGLang's engine in a process of its own (:mod:`lightrft.engines.sglang_process`), updated in place.

What it needs of SGLang: ``begin_weight_update`` / ``end_weight_update`` are in 0.5.21 and later; an older one is updated
without them. Run here on the CPU, 0.5.23, one process: every law of engines but the two below. On CUDA: not run.

Seeds are SGLang's ``sampling_seed``, which it heeds in its deterministic mode alone, and that mode needs CUDA. So on the
CPU a seed changes nothing: ``capabilities.seeds`` is False there, and the engine says so once, as the log tells.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from attrs import define, frozen
from torch import Tensor
from torch.nn import Module

from lightrft.engines import sglang_process as host
from lightrft.engines.buckets import buckets
from lightrft.engines.checks import check_requests
from lightrft.engines.expected_weights import (
    Model,
    Shape,
    expected_weights,
    first_names,
    model_of,
    refuse_misfits,
    write_config,
)
from lightrft.engines.hf_sampling import Tokenizer, end_of, row_seeds
from lightrft.engines.protocol import Capabilities, Completion, FinishReason, Request, Sampling
from lightrft.engines.stops import string_end
from lightrft.errors import EngineError, UnsupportedOperation

if TYPE_CHECKING:
    from tempfile import TemporaryDirectory

logger = logging.getLogger(__name__)

BUCKET_BYTES = 256 << 20
SPARE_TOKENS = 8
"""By how much SGLang's limit has to be above ours: it keeps one to six positions back, and cuts the rest short silently."""
TINY_TOP_P = 1e-9
"""Leaves the likeliest token alone."""
GREEDY_BELOW = 1e-6
"""Temperatures below this are greedy to SGLang."""


@define(eq=False)
class Serving:
    """What changes while the engine lives."""

    awaited: frozenset[str] = frozenset()
    """Parameters without which it must not generate, by their first names."""
    asleep: bool = False
    takes_weights: bool = True
    """Awake, or its weights are."""
    said_no_seeds: bool = False


@frozen(eq=False)
class SglangEngine:
    """See :func:`sglang`."""

    host: host.Host
    model: Model
    weights: Mapping[str, Shape]
    first_names: Mapping[str, str]
    tokenizer: Tokenizer | None
    max_model_len: int
    bucket_bytes: int
    capabilities: Capabilities
    serving: Serving
    directory: TemporaryDirectory[str] | None = None
    """What :meth:`close` removes."""
    name: str = "sglang"

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Completions in the order of the requests. Raises ``EngineError`` asleep, and until all weights have come.

        A stop string is looked for in the finished completion, which is then cut: SGLang has no tokenizer here. What
        comes after it was generated in vain.
        """
        if self.serving.asleep:
            raise EngineError("generate while the engine 'sglang' sleeps. Call wake_up() first.")
        self._refuse_without_weights()
        check_requests(
            requests,
            sampling,
            vocab_size=self.model.vocab_size,
            max_model_len=self.max_model_len,
            has_tokenizer=self.tokenizer is not None,
        )
        if 0.0 < sampling.temperature < GREEDY_BELOW:
            raise EngineError(
                f"temperature={sampling.temperature} is greedy to SGLang, with other log-probabilities: use 0, or a "
                f"temperature from {GREEDY_BELOW}"
            )
        if any(request.images or request.videos for request in requests):
            raise UnsupportedOperation(
                "engine 'sglang' cannot generate from images or videos here. Instead: pass token ids only, or use 'vllm'."
            )
        if not requests:
            return []
        stops = tuple(dict.fromkeys((*self._ends(), *sampling.stop_token_ids)))
        prompts = [request.prompt_token_ids for request in requests for _ in range(sampling.n)]
        params = [{**in_words_of_sglang(sampling, stops), **seed} for seed in self._seeds(requests, sampling)]
        answer = host.ask(self.host, host.Generate(prompts, params, sampling.logprobs))
        outputs = cast("list[host.Output]", answer)
        return [
            completion(prompt, output, sampling, frozenset(stops), self.tokenizer)
            for prompt, output in zip(prompts, outputs, strict=True)
        ]

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Sends them in buckets of at most ``bucket_bytes`` (one tensor may be larger), and wakes the engine first.

        The first update has to hold all parameters, and so has the next one after an update that failed: until then
        :meth:`generate` raises ``EngineError``. So does this for a name or a shape that is not the model's; nothing of
        such a bucket is sent.
        """
        self.wake_up(weights_only=True)
        awaited, self.serving.awaited = self.serving.awaited, frozenset(self.first_names.values())
        self._begin()
        try:
            for bucket in buckets(named_tensors, self.bucket_bytes):
                refuse_misfits(self.name, self.weights, bucket)
                host.ask(self.host, host.Update(host.pack(bucket)))
                awaited -= {self.first_names[name] for name, _ in bucket}
        except BaseException:
            with suppress(EngineError):  # the first error is the news
                self._end()
            raise
        self._end()
        if not self.serving.asleep:
            self.flush_cache()
        if awaited:
            raise EngineError(
                f"engine 'sglang' was not given {len(awaited)} of its parameters, such as {min(awaited)!r}. "
                f"Pass all parameters of the actor in the first update, and after one that failed."
            )
        self.serving.awaited = awaited

    def flush_cache(self) -> None:
        """Waits until nothing is running. Raises ``EngineError`` if that takes too long."""
        host.ask(self.host, host.Flush())

    def sleep(self, level: int = 1) -> None:
        """Level 1 keeps the weights in host memory; after level 2 an update of all of them is needed."""
        if not self.capabilities.sleep:
            raise UnsupportedOperation(
                "engine 'sglang' cannot sleep on the CPU, where SGLang would free nothing. Instead: leave it awake."
            )
        if not self.serving.asleep:
            host.ask(self.host, host.Release())
            self.serving.asleep, self.serving.takes_weights = True, False
        if level > 1:
            self.serving.awaited = frozenset(self.first_names.values())

    def wake_up(self, *, weights_only: bool = False) -> None:
        """Weights, then room for the caches. Awake it stays so. One that failed to wake is asleep still."""
        if self.serving.asleep and not self.serving.takes_weights:
            host.ask(self.host, host.Resume("weights"))
            self.serving.takes_weights = True
        if self.serving.asleep and not weights_only:
            host.ask(self.host, host.Resume("kv_cache"))
            self.serving.asleep = False

    def close(self) -> None:
        """Ends the engine's process and removes what was written for it."""
        host.stop(self.host)
        if self.directory is not None:
            self.directory.cleanup()

    def _begin(self) -> None:
        if self.host.ready.has_sessions:
            host.ask(self.host, host.Begin())

    def _end(self) -> None:
        if self.host.ready.has_sessions:
            host.ask(self.host, host.End())

    def _ends(self) -> tuple[int, ...]:
        """The tokens that end a sequence, of the model and of the tokenizer."""
        own = None if self.tokenizer is None else self.tokenizer.eos_token_id
        return (*self.model.eos_token_ids, *([own] if isinstance(own, int) else own or ()))

    def _refuse_without_weights(self) -> None:
        if self.serving.awaited:
            raise EngineError(
                f"engine 'sglang' lacks weights: {len(self.serving.awaited)} parameters were not given yet, or an "
                f"update of them failed. Call strategy.update_engine_weights(actor) first."
            )

    def _seeds(self, requests: Sequence[Request], sampling: Sampling) -> list[dict[str, object]]:
        """What to say of the seed for each completion. In its deterministic mode SGLang needs one: all else would be alike."""
        rows = len(requests) * sampling.n
        if sampling.temperature == 0.0:
            return [{}] * rows
        if self.capabilities.seeds:
            return [{"sampling_seed": seed} for seed in row_seeds(requests, sampling)]
        seeded = sampling.seed is not None or any(request.seed is not None for request in requests)
        if seeded and not self.serving.said_no_seeds:
            logger.warning(
                "engine 'sglang' cannot draw from a seed on the CPU: its completions will not repeat. Use engine 'hf' or "
                "'vllm' where they have to"
            )
            self.serving.said_no_seeds = True
        return [{}] * rows


def sglang(
    model: Module | str | Path,
    tokenizer: Tokenizer | None = None,
    max_model_len: int | None = None,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 42,
    bucket_bytes: int = BUCKET_BYTES,
    can_sleep: bool | None = None,
    memory_share: float = 0.5,
    options: Mapping[str, object] | None = None,
) -> SglangEngine:
    """Starts SGLang and waits until it is up (10 to 20 seconds on the CPU).

    ``model``: a Hugging Face model whose kind it is to serve, or a directory that such a model was saved to. A model
    gives its config alone, and the engine refuses to generate until :meth:`SglangEngine.update_weights` gave it all
    weights; a directory gives the weights too. ``max_model_len``: tokens of prompt and completion together, at most the
    model's ``max_position_embeddings``, its default. ``dtype``: by default the model's, or what the directory says.
    ``seed`` starts the random numbers of draws that have no seed. ``can_sleep``: by default on CUDA alone; on the CPU
    sleeping frees nothing. ``memory_share`` of the device's memory is for weights and cache. ``options`` go to
    ``sglang.Engine`` after ours, and over them.

    Raises ``EngineError`` when SGLang does not start, or when ``model`` is no Hugging Face model.
    """
    place = torch.device("cuda" if torch.cuda.is_available() else "cpu") if device is None else device
    directory: TemporaryDirectory[str] | None = None
    if isinstance(model, Module):
        directory = tempfile.TemporaryDirectory(prefix="lightrft-sglang-")
        write_config(model, Path(directory.name))
        dtype = next(model.parameters()).dtype if dtype is None else dtype
    path = Path(directory.name if directory is not None else cast("str | Path", model))
    try:
        about = model_of(path)
        limit = max_model_len or about.max_position_embeddings
        if limit is None:
            raise EngineError(f"the config in {path} names no limit of tokens. Pass max_model_len.")
        sleeps = place.type == "cuda" if can_sleep is None else can_sleep
        arguments = {
            "model_path": str(path),
            "load_format": "auto" if directory is None else "dummy",
            "dtype": "auto" if dtype is None else str(dtype).removeprefix("torch."),
            "context_length": limit + SPARE_TOKENS,
            "random_seed": seed % 2**31,
            "mem_fraction_static": memory_share,
            "skip_tokenizer_init": True,
            "grammar_backend": "none",
            "log_level": "error",
            **(on_cuda(place, sleeps) if place.type == "cuda" else on_cpu(limit + SPARE_TOKENS)),
            **(options or {}),
        }
        weights, firsts = expected_weights(path), first_names(path)
        return SglangEngine(
            host=host.start(arguments),
            model=about,
            weights=weights,
            first_names=firsts,
            tokenizer=tokenizer,
            max_model_len=limit,
            bucket_bytes=bucket_bytes,
            capabilities=Capabilities(sleep=sleeps, seeds=place.type == "cuda"),
            serving=Serving(frozenset(firsts.values()) if directory is not None else frozenset()),
            directory=directory,
        )
    except BaseException:
        if directory is not None:
            directory.cleanup()
        raise


# ------------------------------------------------------------------------------------------------- SGLang's words


def on_cpu(limit: int) -> dict[str, object]:
    """What runs without SGLang's kernels: attention and sampling in torch."""
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "max_total_tokens": max(4096, 4 * limit),
    }


def on_cuda(device: torch.device, sleeps: bool) -> dict[str, object]:
    """Deterministic mode, without which no seed is heeded; memory that can be given back."""
    return {
        "device": "cuda",
        "base_gpu_id": device.index or 0,
        "enable_deterministic_inference": True,
        "enable_memory_saver": sleeps,
        "enable_weights_cpu_backup": sleeps,
    }


def in_words_of_sglang(sampling: Sampling, stops: Sequence[int]) -> dict[str, object]:
    """``sampling_params`` of one completion, seed apart.

    ``top_k`` of 1 is greedy decoding to SGLang, with log-probabilities at temperature 1; a tiny ``top_p`` leaves the same
    one token, and its log-probability at the temperature.
    """
    one_choice = sampling.top_k == 1
    return {
        "temperature": sampling.temperature,
        "max_new_tokens": sampling.max_new_tokens,
        "top_p": TINY_TOP_P if one_choice else sampling.top_p,
        "top_k": -1 if one_choice or sampling.top_k == 0 else sampling.top_k,
        "stop_token_ids": list(stops),
        "no_stop_trim": True,
        "n": 1,
    }


def completion(
    prompt: tuple[int, ...],
    output: host.Output,
    sampling: Sampling,
    stops: frozenset[int],
    tokenizer: Tokenizer | None,
) -> Completion:
    """Cut after the first token that ends it. Raises ``EngineError`` where SGLang gave up on it."""
    if output.finish == "abort":
        raise EngineError(f"engine 'sglang' gave up on a prompt of {len(prompt)} tokens: {output.text}")
    string = None if tokenizer is None else string_end(tokenizer, output.token_ids, sampling.stop)
    end, seen = end_of(output.token_ids, stops, string)
    reason: FinishReason = "stop" if output.finish == "stop" else seen
    logprobs = None if output.logprobs is None else output.logprobs[:end]
    return Completion(prompt, output.token_ids[:end], logprobs, reason)
