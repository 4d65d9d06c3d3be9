# What is used of vLLM, which takes the checkers most of a minute to read.
class SamplingParams:
    def __init__(
        self,
        *,
        n: int = 1,
        max_tokens: int | None = 16,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int | None = None,
        stop: str | list[str] | None = None,
        stop_token_ids: list[int] | None = None,
        logprobs: int | None = None,
    ) -> None: ...
