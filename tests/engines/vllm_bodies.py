"""What the ranks of test_vllm_ranks.py do."""

from __future__ import annotations

import torch
from torch.nn import Module

from lightrft import get_strategy
from lightrft.conformance.engines import TOLERANCE, drift, long_prompts, outputs, small_model
from lightrft.engines.protocol import Sampling

Tokens = list[tuple[int, ...]]


def roll_out(backend: str, tensor_parallel: int) -> tuple[Tokens, Tokens, list[int]]:
    """Greedy tokens of the rank's own prompts, tokens without a seed of one prompt, and the sum of all ranks."""
    strategy = get_strategy(
        {
            "backend": backend,
            "bf16": False,
            "engine_type": "vllm",
            "engine_tp_size": tensor_parallel,
            "train_batch_size": 2,
            "weight_sync_bucket_mb": 1,
        }
    )
    strategy.setup_distributed()
    try:
        model = small_model(tied=False)
        optimizer = strategy.create_optimizer(model, lr=0.0)
        actor: Module
        actor, optimizer = strategy.prepare((model, optimizer))
        strategy.setup_inference_engine(None, engine_type="vllm", actor=actor)
        strategy.update_engine_weights(actor)
        rank = strategy.get_rank()
        mine = [request.prompt_token_ids for request in long_prompts()][: 3 - 2 * rank]
        greedy = strategy.gather_and_generate(Sampling(max_new_tokens=5, temperature=0.0), all_prompt_token_ids=mine)
        assert [one.prompt_token_ids for one in greedy] == list(mine)
        far = drift(small_model(tied=False), greedy)
        assert far <= TOLERANCE, f"rank {rank}: log-probabilities are off by {far}"
        unseeded = strategy.engine_generate_local(Sampling(max_new_tokens=6, temperature=2.0), [(3, 5, 8)])
        summed = strategy.all_reduce(torch.tensor([1, rank]), "sum").tolist()
        return outputs(greedy), outputs(unseeded), summed
    finally:
        strategy.close()
