"""Real vLLM on two ranks: one engine that both make together, and one for each (`make test-engines`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

from engines.vllm_bodies import roll_out
from lightrft.conformance.engines import greedy, long_prompts, small_model
from lightrft.conformance.pool import RankPool, rank_pool

pytestmark = pytest.mark.engines


@pytest.fixture
def pool() -> Iterator[RankPool]:
    with rank_pool(2, timeout=180.0, environ={"TORCH_COMPILE_DISABLE": "1"}) as pool:
        yield pool


@pytest.mark.parametrize("tensor_parallel", [2, 1], ids=["tp2", "dp2"])
def test_R1_R2_R7_FC38_FC42_vllm_on_two_ranks(tensor_parallel: int, pool: RankPool) -> None:
    (greedy_0, free_0, sum_0), (greedy_1, free_1, sum_1) = pool.run(roll_out, "fsdp", tensor_parallel)
    model = small_model(tied=False)
    prompts = [request.prompt_token_ids for request in long_prompts()]
    assert greedy_0 == [greedy(model, prompt, 5) for prompt in prompts[:3]]
    assert greedy_1 == [greedy(model, prompt, 5) for prompt in prompts[:1]]
    assert (free_0 == free_1) == (tensor_parallel == 2)
    assert sum_0 == sum_1 == [2, 1]
