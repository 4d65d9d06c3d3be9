"""Log-probabilities with a shared prompt are those of the whole sequences, gradients included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightrft.engines.protocol import Completion
from lightrft.rlvr.models import tiny_model
from lightrft.rlvr.policy import completion_batch, completion_logprobs, shared_prompt_logits, whole_logits


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return tiny_model().double()


token_ids = st.lists(st.integers(3, 60), min_size=1, max_size=6).map(tuple)


@st.composite
def completions(draw: st.DrawFn) -> list[Completion]:
    prompts = draw(st.lists(token_ids, min_size=1, max_size=3))
    return [Completion(p, draw(token_ids), None, "stop") for p in prompts for _ in range(draw(st.integers(1, 3)))]


def alone(model: nn.Module, completion: Completion) -> Tensor:
    """One sequence by itself: no padding, no cache."""
    ids = torch.tensor([completion.prompt_token_ids + completion.output_token_ids])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(completion.prompt_token_ids) - 1 : -1]
    tokens = torch.tensor(completion.output_token_ids)
    logprobs: Tensor = logits.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    return logprobs


@settings(max_examples=20)
@given(rows=completions())
def test_equals_every_sequence_by_itself(model: nn.Module, rows: list[Completion]) -> None:
    batch = completion_batch(rows, torch.device("cpu"))
    together = completion_logprobs(model, batch)
    for row, completion in zip(together, rows, strict=True):
        torch.testing.assert_close(
            row[: len(completion.output_token_ids)].double(), alone(model, completion), atol=1e-6, rtol=1e-6
        )


@settings(max_examples=10)
@given(rows=completions())
def test_the_gradient_is_the_same_too(model: nn.Module, rows: list[Completion]) -> None:
    batch = completion_batch(rows, torch.device("cpu"))
    weights = batch.output_mask_BT[..., None]
    gradients = []
    for logits in (shared_prompt_logits, whole_logits):
        model.zero_grad()
        torch.autograd.backward((logits(model, batch).log_softmax(-1) * weights).square().mean())
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for shared, whole in zip(*gradients, strict=True):
        # Qwen2's norms compute in float32 whatever the model's dtype, hence no tighter than that.
        torch.testing.assert_close(shared, whole, atol=1e-6, rtol=1e-4)


def test_gradient_checkpointing_keeps_no_cache_and_changes_nothing() -> None:
    torch.manual_seed(0)
    checkpointed = tiny_model()
    rows = [Completion((5, 6), (7, 8), None, "stop"), Completion((5, 6), (9, 4, 3), None, "stop")]
    batch = completion_batch(rows, torch.device("cpu"))
    expected = completion_logprobs(checkpointed, batch)
    checkpointed.gradient_checkpointing_enable()  # type: ignore[no-untyped-call]  # transformers' own
    found = completion_logprobs(checkpointed.train(), batch)
    mask = batch.output_mask_BT.bool()
    torch.testing.assert_close(found[mask], expected[mask], atol=1e-5, rtol=1e-5)


def test_temperature_divides_the_logits(model: nn.Module) -> None:
    batch = completion_batch([Completion((5, 6), (7, 8), None, "stop")], torch.device("cpu"))
    expected = (whole_logits(model, batch) / 0.5).log_softmax(-1).gather(2, batch.output_ids_BT[..., None]).squeeze(2)
    torch.testing.assert_close(completion_logprobs(model, batch, 0.5).double(), expected, atol=1e-6, rtol=1e-6)
