"""Log-probabilities of completions under a language model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import Module

from lightrft.engines.protocol import Completion
from lightrft.ops.models import cache_keyword, unwrap_model
from lightrft.rlvr.losses import token_logprobs

# Shape suffixes: U distinct prompts, B completions, P longest prompt, T longest completion, V vocabulary.


@frozen
class CompletionBatch:
    """Completions as tensors. Prompts are left-padded and stand once each; completions are right-padded."""

    prompt_ids_UP: Tensor
    prompt_mask_UP: Tensor
    row_B: Tensor
    """For each completion, the row of its prompt."""
    output_ids_BT: Tensor
    output_mask_BT: Tensor


def pad(rows: Sequence[Sequence[int]], *, left: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids as one int64 tensor, and the mask of what is no padding."""
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        where = slice(width - len(row), width) if left else slice(0, len(row))
        ids[index, where] = torch.tensor(row, dtype=torch.long)
        mask[index, where] = 1
    return ids.to(device), mask.to(device)


def completion_batch(completions: Sequence[Completion], device: torch.device) -> CompletionBatch:
    """The tensors of these completions."""
    rows: dict[tuple[int, ...], int] = {}
    for completion in completions:
        rows.setdefault(completion.prompt_token_ids, len(rows))
    prompt_ids, prompt_mask = pad(list(rows), left=True, device=device)
    output_ids, output_mask = pad([c.output_token_ids for c in completions], left=False, device=device)
    row = torch.tensor([rows[c.prompt_token_ids] for c in completions], device=device)
    return CompletionBatch(prompt_ids, prompt_mask, row, output_ids, output_mask)


def completion_logprobs(model: Module, batch: CompletionBatch, temperature: float = 1.0) -> Tensor:
    """``log p(token)`` of every output token, float32 [B, T]; what stands at padding means nothing.

    Each distinct prompt goes through the model once and its keys and values are shared by its completions, gradient
    included: the samples of a group differ only after the prompt, so this computes the same numbers as one forward of
    every whole sequence, with a fraction of its work when n is large. Logits are made where a token was drawn, nowhere
    else. With gradient checkpointing, under which a model keeps no cache, every sequence goes through whole.
    """
    without_cache = model.training and checkpoints_gradients(model)
    logits_BTV = whole_logits(model, batch) if without_cache else shared_prompt_logits(model, batch)
    return token_logprobs(logits_BTV / temperature if temperature != 1.0 else logits_BTV, batch.output_ids_BT)


def checkpoints_gradients(model: Module) -> bool:
    """Whether layers are recomputed in the backward pass; transformers is renaming the attribute that says so."""
    plain = unwrap_model(model)
    names = ("is_activation_checkpointing", "is_gradient_checkpointing")
    return next((bool(getattr(plain, name)) for name in names if hasattr(plain, name)), False)


def positions(mask: Tensor) -> Tensor:
    """Position ids that do not count padding."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def whole_logits(model: Module, batch: CompletionBatch) -> Tensor:
    """The logits from which each output token was drawn, [B, T, V], by a forward of every whole sequence."""
    ids_BL = torch.cat([batch.prompt_ids_UP[batch.row_B], batch.output_ids_BT], dim=1)
    mask_BL = torch.cat([batch.prompt_mask_UP[batch.row_B], batch.output_mask_BT], dim=1)
    drawn = batch.output_ids_BT.shape[1]
    output = model(
        input_ids=ids_BL,
        attention_mask=mask_BL,
        position_ids=positions(mask_BL),
        use_cache=False,
        logits_to_keep=drawn + 1,
    )
    logits_BTV: Tensor = output.logits[:, :-1]
    return logits_BTV


def shared_prompt_logits(model: Module, batch: CompletionBatch) -> Tensor:
    """The same, [B, T, V], from one forward of the distinct prompts and one of the completions."""
    from transformers import DynamicCache

    keyword, cache = cache_keyword(model), DynamicCache()
    prompt = model(
        input_ids=batch.prompt_ids_UP,
        attention_mask=batch.prompt_mask_UP,
        position_ids=positions(batch.prompt_mask_UP),
        use_cache=True,
        logits_to_keep=1,
        **{keyword: cache},
    )
    first_B1V: Tensor = prompt.logits[batch.row_B]
    if batch.output_ids_BT.shape[1] == 1:
        return first_B1V
    cache.batch_select_indices(batch.row_B)
    mask_BL = torch.cat([batch.prompt_mask_UP[batch.row_B], batch.output_mask_BT[:, :-1]], dim=1)
    rest = model(
        input_ids=batch.output_ids_BT[:, :-1],
        attention_mask=mask_BL,
        position_ids=positions(mask_BL)[:, batch.prompt_ids_UP.shape[1] :],
        use_cache=True,
        **{keyword: cache},
    )
    return torch.cat([first_B1V, rest.logits], dim=1)
