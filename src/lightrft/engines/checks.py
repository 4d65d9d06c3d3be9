"""What every engine refuses before it runs anything (law R5): a bad prompt must not take a batch down half way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightrft.engines.protocol import Request, Sampling
from lightrft.errors import EngineError, listed


def check_requests(
    requests: Sequence[Request],
    sampling: Sampling,
    *,
    vocab_size: int,
    max_model_len: int | None,
    has_tokenizer: bool,
) -> None:
    """Raises one ``EngineError`` that lists every request that cannot be served, by its index, and why.

    ``max_model_len`` is the number of tokens, prompt and completion together, that the model can read; None: no limit.
    A prompt that leaves no room for ``max_new_tokens`` is refused rather than cut short: a cut would count as truncated
    completions that no one asked for.
    """
    problems = [*_sampling_problems(sampling, has_tokenizer)]
    for index, request in enumerate(requests):
        problems += (
            f"prompt {index}: {problem}" for problem in _problems(request, sampling, vocab_size, max_model_len)
        )
    if problems:
        raise EngineError(f"nothing was generated:{listed(problems)}")


def _sampling_problems(sampling: Sampling, has_tokenizer: bool) -> Iterator[str]:
    if sampling.temperature == 0.0 and sampling.n > 1:
        yield f"n={sampling.n} at temperature 0 would give equal completions: use n=1, or a temperature above 0"
    if "" in sampling.stop:
        yield f"stop={sampling.stop!r} holds an empty string, which every text contains: remove it"
    elif sampling.stop and not has_tokenizer:
        yield f"stop={sampling.stop!r} needs a tokenizer, and this engine has none: pass it one, or use stop_token_ids"


def _problems(request: Request, sampling: Sampling, vocab_size: int, max_model_len: int | None) -> Iterator[str]:
    ids = request.prompt_token_ids
    if not ids:
        yield "is empty: give it at least one token, such as the model's beginning-of-sequence token"
    elif min(ids) < 0 or max(ids) >= vocab_size:
        outside = next(token for token in ids if not 0 <= token < vocab_size)
        yield f"token id {outside} is outside the vocabulary of {vocab_size}: was another model's tokenizer used?"
    if max_model_len is not None and len(ids) + sampling.max_new_tokens > max_model_len:
        yield (
            f"{len(ids)} tokens and max_new_tokens={sampling.max_new_tokens} are more than the model's limit of "
            f"{max_model_len}: shorten the prompt or lower max_new_tokens"
        )
