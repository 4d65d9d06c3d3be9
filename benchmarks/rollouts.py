"""Rollouts: weights to an engine, prompts between ranks, and what the strategy adds to a call of the engine.

In an environment with vLLM (``make bench-engines``) it is measured too, with random weights of SmolLM2-135M's shapes.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.figures import Figure, alternate, milliseconds, paired_ratio, spread
from lightrft import StrategyConfig
from lightrft.backends import fsdp, local
from lightrft.conformance.pool import rank_pool
from lightrft.engines.hf import hf_copy
from lightrft.engines.protocol import Request, Sampling
from lightrft.ops.models import named_weights
from lightrft.ops.rollout import packed_ids, requests_of_group

PROMPTS, LENGTH = 4096, 512


def language_model(hidden: int, layers: int, heads: int, vocabulary: int, inner: int) -> nn.Module:
    """Llama with tied embeddings, random weights, in eval mode."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=max(heads // 3, 1), max_position_embeddings=256,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    made = cast("Callable[..., nn.Module]", AutoModelForCausalLM.from_config)(config)
    return made.float().eval()


def smollm2() -> nn.Module:
    """The shapes of SmolLM2-135M."""
    return language_model(576, 30, 9, 49_152, 1_536)


def figure(
    name: str, times: Sequence[Sequence[float]], target: float | None, *, at_least: bool = True, note: str = ""
) -> Figure:
    """The rival's time over ours where ``at_least`` is asked: how many times faster."""
    ours, rival = times
    ratio = paired_ratio(rival, ours)
    return Figure(
        name=name,
        ours=milliseconds(ours),
        rival=milliseconds(rival),
        ratio=1 / ratio,
        target="" if target is None else f"<= {1 / target:.3g}",
        met=None if target is None else ratio >= target,
        note=f"{note}{'; ' if note else ''}middle half {spread(ours, rival)}",
    )


# ------------------------------------------------------------------------------------------------------------- weights


def to_a_copy(rounds: int) -> Figure:
    """Into ``hf`` on a module of its own, against a copy of the same bytes between two lists of tensors."""
    model = smollm2()
    engine = hf_copy(model)
    source = [parameter.detach() for parameter in model.parameters()]
    target = [torch.empty_like(tensor) for tensor in source]

    def plain() -> None:
        for mine, theirs in zip(target, source, strict=True):
            mine.copy_(theirs)

    times = alternate([lambda: engine.update_weights(named_weights(model)), plain], rounds)
    return figure("weights of 134.5 M parameters into hf's copy (rival: a plain copy of the bytes)", times, 0.5)


# ------------------------------------------------------------------------------------------------------------- prompts


def times_of_gathering(rounds: int) -> list[list[float]]:
    """On a rank: packed, and as pickled lists."""
    strategy = fsdp.build(StrategyConfig(bf16=False, train_batch_size=2, engine_tp_size=2))
    strategy.setup_distributed()
    rank = strategy.get_rank()
    draw = random.Random(rank)
    rows = [[draw.randrange(49_152) for _ in range(LENGTH)] for _ in range(PROMPTS // 2)]
    requests = [Request(tuple(row)) for row in rows]

    def pickled() -> None:
        gathered: list[list[list[int]]] = [[], []]
        dist.all_gather_object(gathered, rows)
        [Request(tuple(row)) for part in gathered for row in part]

    def together(gather: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            gather()
            strategy.barrier()

        return run

    packed = together(lambda: requests_of_group(requests, packed_ids(requests), rank, range(2), strategy.all_gather))
    times = alternate([packed, together(pickled)], rounds)
    strategy.close()
    return times


def gathering(rounds: int) -> Figure:
    """All prompts to both ranks of an engine."""
    with rank_pool(2, timeout=300.0) as pool:
        times = pool.run(times_of_gathering, rounds)[0]
    return figure(
        f"{PROMPTS} prompts of {LENGTH} tokens to both of two ranks (rival: all_gather_object of lists)", times, 5.0
    )


# -------------------------------------------------------------------------------------------------------------- engines


def through_the_strategy(engine_type: str, model: nn.Module, rounds: int, **options: object) -> Figure:
    """A rollout by ``gather_and_generate``, against the engine's own ``generate``."""
    strategy = local.build(StrategyConfig(bf16=False))
    strategy.setup_distributed()
    args = SimpleNamespace(max_model_len=128, engine_options=options)
    engine = strategy.setup_inference_engine(args, engine_type=engine_type, actor=model)
    assert engine is not None
    strategy.update_engine_weights(model)
    prompts = [[3 + (7 * row + place) % 90 for place in range(16)] for row in range(16)]
    requests, sampling = [Request(tuple(prompt)) for prompt in prompts], Sampling(max_new_tokens=32, seed=0)
    times = alternate(
        [lambda: strategy.gather_and_generate(sampling, prompts), lambda: engine.generate(requests, sampling)], rounds
    )
    strategy.close()
    return figure(f"a rollout through the strategy, 16 x 32 tokens (rival: {engine_type}'s own generate)", times, 0.98)


def by_buckets(rounds: int) -> Figure:
    """Into vLLM in buckets, against one ``collective_rpc`` for each parameter, by which all arrive as well."""
    model = smollm2()
    strategy = local.build(StrategyConfig(bf16=False))
    strategy.setup_distributed()
    engine = cast(Any, strategy.setup_inference_engine(SimpleNamespace(max_model_len=128), "vllm", model))

    def each_alone() -> None:
        call = engine.state.llm.collective_rpc
        call("lightrft_start_update")
        for name, tensor in model.named_parameters():
            one: list[tuple[str, Tensor]] = [(name, tensor.detach())]
            call("lightrft_load_weights", args=(one,))
        call("lightrft_finish_update")

    times = alternate([lambda: strategy.update_engine_weights(model), each_alone], rounds, warm_up=1)
    strategy.close()
    return figure("weights of 134.5 M parameters into vLLM (rival: one collective_rpc each)", times, 3.0)


def measure(rounds: int = 12) -> list[Figure]:
    """What this environment can run."""
    tiny = language_model(64, 2, 2, 512, 128)
    if find_spec("vllm") is not None:
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
        return [through_the_strategy("vllm", tiny, rounds), by_buckets(rounds // 2)]
    return [to_a_copy(rounds), gathering(rounds), through_the_strategy("hf", tiny, rounds)]
