"""Where ``hf`` hooks into Hugging Face's ``generate``: what is drawn, with which probability, and where a row ends.

Shape suffixes: R rows (one per completion), N new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
import torch
from attrs import define, field
from torch import Tensor

from lightrft.engines.protocol import FinishReason, Request, Sampling
from lightrft.errors import EngineError
from lightrft.ops.seeds import derived_seed

if TYPE_CHECKING:
    from transformers import GenerationConfig


Warper = Callable[[Tensor, Tensor], Tensor]
"""From the tokens so far and the scores of the next one, float [R, V], to other scores."""


class Tokenizer(Protocol):
    """What the engine asks of a tokenizer: stop strings are looked for in decoded text, text prompts are encoded."""

    @property
    def eos_token_id(self) -> int | list[int] | None: ...
    def decode(self, token_ids: list[int], /) -> str: ...
    def encode(self, text: str, /, *, add_special_tokens: bool) -> list[int]: ...


def generation_config(sampling: Sampling, stops: Sequence[int]) -> GenerationConfig:
    """Hugging Face's words for how long to go on. Nothing is sampled there: see :class:`Sampler`."""
    return hugging_face_config(
        max_new_tokens=sampling.max_new_tokens,
        use_cache=True,
        do_sample=False,
        eos_token_id=list(stops) or None,
        pad_token_id=stops[0] if stops else 0,
    )


def hugging_face_config(**settings: object) -> GenerationConfig:
    """Their record of settings; what is not set is None."""
    from transformers import GenerationConfig

    return GenerationConfig(**settings)  # type: ignore[no-untyped-call]  # transformers leaves __init__ untyped


# ------------------------------------------------------------------------------------------------- what is drawn


def row_seeds(requests: Sequence[Request], sampling: Sampling) -> list[int]:
    """One seed for each completion, ``n`` of one request adjacent.

    Without any seed given they follow from one number of torch's ordinary random numbers, drawn only then.
    """
    call = sampling.seed
    if call is None:
        call = int(torch.randint(2**62, ())) if any(request.seed is None for request in requests) else 0
    return [
        derived_seed(call, index, sample) if request.seed is None else derived_seed(request.seed, sample)
        for index, request in enumerate(requests)
        for sample in range(sampling.n)
    ]


def uniforms(seeds: Sequence[int], length: int) -> Tensor:
    """Random numbers in [0, 1 - 2**-53], float64 [R, length]: each row from its seed alone, the same for every device."""
    # Not torch.Generator, which on the CPU takes no more than 32 bits of a seed.
    return torch.from_numpy(np.stack([np.random.default_rng(seed).random(length) for seed in seeds]))


def warpers(sampling: Sampling) -> list[Warper]:
    """Temperature, top-k and top-p, in the order of ``generate``; those that change nothing are left out."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    some = (
        TemperatureLogitsWarper(sampling.temperature) if sampling.temperature != 1.0 else None,
        TopKLogitsWarper(sampling.top_k) if sampling.top_k > 0 else None,
        TopPLogitsWarper(sampling.top_p) if sampling.top_p < 1.0 else None,
    )
    return [cast("Warper", warper) for warper in some if warper is not None]


@define(eq=False)
class Sampler:
    """The last logits processor: leaves each row the one token that its own random number falls on.

    By the inverse of the cumulative distribution, so that a row depends on no other: another batch, whose logits differ
    in the last digits, then changes a token only where the random number lies within that difference of a boundary.
    """

    uniform_RN: Tensor
    """float64."""
    prompt_length: int
    finite: Tensor | None = None
    """Whether the logits were so far: a bool scalar, read once at the end so as not to wait for the device."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        uniform_R = self.uniform_RN[:, input_ids.shape[1] - self.prompt_length]
        # In float64: in float32 the last of a large vocabulary's tokens would be lost to rounding.
        cumulative_RV = scores.softmax(-1).cumsum(-1, dtype=torch.float64)
        total_R = cumulative_RV[:, -1]
        # A uniform number is at most 1 - 2**-53, so the product is below the total, rounded too.
        token_R1 = torch.searchsorted(cumulative_RV, (uniform_R * total_R)[:, None], right=True)
        finite = total_R.isfinite().all()
        self.finite = finite if self.finite is None else self.finite & finite
        return torch.full_like(scores, -torch.inf).scatter_(1, token_R1.clamp(max=scores.shape[1] - 1), 0.0)

    def check(self) -> None:
        """Raises ``EngineError`` when there was a distribution that nothing can be drawn from."""
        if self.finite is not None and not self.finite:
            raise EngineError(
                "the model's logits were not finite (NaN or infinite), so nothing can be drawn from them. "
                "Look at the last updates: a gradient that was not finite, or a learning rate that is too high."
            )


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


# ---------------------------------------------------------------------------------------------- where a row ends


def end_of(output: Sequence[int], stops: frozenset[int], string_end: int | None) -> tuple[int, FinishReason]:
    """The number of tokens of a completion, its stop token included, and why it ended."""
    token_end = next((place + 1 for place, token in enumerate(output) if token in stops), None)
    ends = [end for end in (token_end, string_end) if end is not None]
    return (min(ends), "stop") if ends else (len(output), "length")


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
