"""What an inference engine is: a small Protocol and the three records that travel through it.

A strategy is composed with an engine and does not know which. Token ids are plain Python ints on this boundary, so that
no engine's tensor library shows in a signature.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from attrs import field, frozen, validators

if TYPE_CHECKING:
    from torch import Tensor


def _strings(stop: str | Iterable[str]) -> tuple[str, ...]:
    """A single string is one stop string, not the sequence of its characters."""
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _ids(token_ids: Iterable[int]) -> tuple[int, ...]:
    """As a tuple; ``converter=tuple`` would let any element through the type checkers."""
    return tuple(token_ids)


FinishReason = Literal["stop", "length", "abort"]
"""``stop``: an end-of-sequence token, a stop token or a stop string. ``length``: ``max_new_tokens`` reached."""


@frozen(kw_only=True)
class Sampling:
    """How to continue a prompt; means the same on every engine (law R7).

    ``temperature`` 0 is greedy decoding (then ``n`` must be 1). ``top_k`` 0 and ``top_p`` 1 switch the filters off.
    ``stop`` strings and ``stop_token_ids`` end a completion; the text of a stop string stays in the output tokens.
    ``seed`` makes the same call repeat itself. ``logprobs`` asks for the log-probability of every sampled token.
    """

    max_new_tokens: int = field(default=16, validator=validators.ge(1))
    temperature: float = field(default=1.0, validator=validators.ge(0.0))
    top_p: float = field(default=1.0, validator=[validators.gt(0.0), validators.le(1.0)])
    top_k: int = field(default=0, validator=validators.ge(0))
    n: int = field(default=1, validator=validators.ge(1))
    stop: tuple[str, ...] = field(default=(), converter=_strings)
    stop_token_ids: tuple[int, ...] = field(default=(), converter=_ids)
    seed: int | None = None
    logprobs: bool = True


@frozen
class Request:
    """One prompt, as the token ids that the model reads."""

    prompt_token_ids: tuple[int, ...] = field(converter=_ids)
    seed: int | None = None
    """Draws this prompt's completions from this seed, whatever else is in the batch; None: from the call's seed and the
    position among its requests."""
    images: tuple[object, ...] = ()
    """What the image placeholders of the prompt stand for, in their order: PIL images or arrays. The placeholders are
    those of the chat template, one for each image, unexpanded (law R6)."""
    videos: tuple[object, ...] = ()
    """The same for video placeholders: arrays or lists of frames."""


@frozen
class Completion:
    """One continuation of one prompt (law R8).

    ``logprobs[i]`` is the natural logarithm of the probability with which ``output_token_ids[i]`` was drawn, under the
    model's distribution at the sampling temperature and before top-p / top-k; None where the caller asked for none.
    Greedy decoding draws nothing: its log-probabilities are those at temperature 1.
    """

    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    finish_reason: FinishReason


@frozen(kw_only=True)
class Capabilities:
    """What an engine can do: drives which laws are checked on it, and the table in the docs."""

    sleep: bool = False
    weight_update: bool = True
    shares_weights: bool = False
    """The engine generates from the trainer's own parameters: an update copies nothing."""
    multimodal: bool = False
    tensor_parallel: bool = False
    seeds: bool = True
    """Equal seeds draw equal completions."""


class Engine(Protocol):
    """An inference engine."""

    @property
    def name(self) -> str:
        """``hf``, ``vllm``, ..."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What this engine can do here, on this machine."""
        ...

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """``len(requests) * sampling.n`` completions, in the order of the requests, n of one prompt adjacent.

        Raises ``EngineError`` naming the index of a prompt that is empty, too long or outside the vocabulary (law R5).
        """
        ...

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Takes the trainer's weights, by their names in the plain model, one bucket after another."""
        ...

    def flush_cache(self) -> None:
        """Forgets everything computed with older weights."""
        ...

    def sleep(self, level: int = 1) -> None:
        """Frees what can be freed between rollouts. Level 2 drops the weights too."""
        ...

    def wake_up(self, *, weights_only: bool = False) -> None:
        """Undoes :meth:`sleep`. ``weights_only``: as far as an update needs it; the caches come with the next call."""
        ...

    def close(self) -> None:
        """Frees everything; a second call is harmless."""
        ...
