"""``scripted``: an engine that computes nothing. It says what a function tells it, and records what is done to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from attrs import define, field, frozen

from lightrft.engines.checks import check_requests
from lightrft.engines.protocol import Capabilities, Completion, FinishReason, Request, Sampling
from lightrft.errors import EngineError, UnsupportedOperation

if TYPE_CHECKING:
    from torch import Tensor

Reply = Callable[[tuple[int, ...], int], Sequence[int]]
"""From a prompt's token ids and the number of the sample (0 to n - 1) to output token ids. It may raise."""

Operation = Literal["generate", "update_weights", "flush_cache", "sleep", "wake_weights", "wake_up", "close"]


@frozen
class Call:
    """One thing that was asked of the engine: the prompts of a generate, the parameter names of an update."""

    operation: Operation
    prompts: tuple[tuple[int, ...], ...] = ()
    names: tuple[str, ...] = ()


@define
class ScriptState:
    """What changes while the engine lives."""

    calls: list[Call] = field(factory=list)
    asleep: bool = False
    takes_weights: bool = True
    """Awake, or its weights are."""


@frozen
class ScriptedEngine:
    """See :func:`scripted`."""

    reply: Reply | None
    vocab_size: int
    max_model_len: int | None
    capabilities: Capabilities
    state: ScriptState = field(factory=ScriptState)
    name: str = "scripted"

    @property
    def calls(self) -> list[Call]:
        """Everything that was asked so far, refused calls included."""
        return self.state.calls

    @property
    def operations(self) -> list[Operation]:
        """The names of :attr:`calls`."""
        return [call.operation for call in self.state.calls]

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """What the script says, cut at ``max_new_tokens`` and after the first stop token."""
        self._record(Call("generate", prompts=tuple(request.prompt_token_ids for request in requests)))
        self._refuse_asleep("generate")
        check_requests(
            requests, sampling, vocab_size=self.vocab_size, max_model_len=self.max_model_len, has_tokenizer=False
        )
        return [self._completion(request, sample, sampling) for request in requests for sample in range(sampling.n)]

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Takes note of the names."""
        self._record(Call("update_weights", names=tuple(name for name, _ in named_tensors)))
        if not self.state.takes_weights:
            self._refuse_asleep("update_weights")

    def flush_cache(self) -> None:
        """There is none."""
        self._record(Call("flush_cache"))

    def sleep(self, level: int = 1) -> None:
        """From here on it refuses to generate or to update."""
        self._record(Call("sleep"))
        if not self.capabilities.sleep:
            raise UnsupportedOperation("engine 'scripted' was made with can_sleep=False. Instead: leave it awake.")
        self.state.asleep, self.state.takes_weights = True, False

    def wake_up(self, *, weights_only: bool = False) -> None:
        """Undoes :meth:`sleep`, for updates alone or for all."""
        self._record(Call("wake_weights" if weights_only else "wake_up"))
        self.state.takes_weights = True
        self.state.asleep = weights_only and self.state.asleep

    def close(self) -> None:
        """There is nothing to free."""
        self._record(Call("close"))

    def _record(self, call: Call) -> None:
        self.state.calls.append(call)

    def _refuse_asleep(self, operation: Operation) -> None:
        if self.state.asleep:
            raise EngineError(f"{operation} while the engine 'scripted' sleeps. Call wake_up() first.")

    def _completion(self, request: Request, sample: int, sampling: Sampling) -> Completion:
        prompt = request.prompt_token_ids
        said = tuple(
            default_reply(request, sample, sampling, self.vocab_size)
            if self.reply is None
            else self.reply(prompt, sample)
        )
        outside = [token for token in said if not 0 <= token < self.vocab_size]
        if outside:
            raise EngineError(
                f"the script answered token id {outside[0]}, outside its vocabulary of {self.vocab_size}. "
                f"Correct the reply, or raise vocab_size."
            )
        output, reason = ended(said, sampling)
        logprobs = tuple(-((7 * token + place) % 50 + 1) / 50 for place, token in enumerate(output))
        return Completion(prompt, output, logprobs if sampling.logprobs else None, reason)


def default_reply(request: Request, sample: int, sampling: Sampling, vocab_size: int) -> list[int]:
    """As many tokens as may be, from the prompt, the sample's number and the seed, the request's own before the call's.

    The same in every process and in every batch.
    """
    seed = sampling.seed if request.seed is None else request.seed
    weighted = sum((place + 1) * token for place, token in enumerate(request.prompt_token_ids))
    start = weighted + 31 * sample + 17 * (seed or 0)
    return [(start + 3 * place) % vocab_size for place in range(sampling.max_new_tokens)]


def ended(said: tuple[int, ...], sampling: Sampling) -> tuple[tuple[int, ...], FinishReason]:
    """What is left of a reply, and why it ends there: a reply that is shorter than it might be ended by itself."""
    output = said[: sampling.max_new_tokens]
    stops = [place for place, token in enumerate(output) if token in sampling.stop_token_ids]
    if stops:
        return output[: stops[0] + 1], "stop"
    return output, "stop" if len(said) < sampling.max_new_tokens else "length"


def scripted(
    reply: Reply | None = None,
    *,
    vocab_size: int = 128,
    max_model_len: int | None = None,
    can_sleep: bool = True,
) -> ScriptedEngine:
    """An engine for tests: deterministic, needs no model, keeps a list of its ``calls``.

    ``reply`` gives the output ids for a prompt and the number of the sample; without it they follow from the prompt,
    the sample's number and the seed. A ``reply`` that raises is a fault injected. Asleep, it refuses to
    generate or to update with an ``EngineError``: waking it first is the strategy's part (law R4).
    """
    return ScriptedEngine(reply, vocab_size, max_model_len, Capabilities(sleep=can_sleep))
