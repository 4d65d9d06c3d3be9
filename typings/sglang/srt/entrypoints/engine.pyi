from collections.abc import Sequence
from typing import NotRequired, Protocol, TypedDict

from torch import Tensor

class FinishReason(TypedDict):
    type: str
    message: NotRequired[str]

class MetaInfo(TypedDict):
    finish_reason: FinishReason
    output_token_logprobs: Sequence[tuple[float, int, None]]

class Generated(TypedDict):
    """What one completion is; no class of SGLang's."""

    output_ids: list[int]
    meta_info: MetaInfo

class Flushed(Protocol):
    """No class of SGLang's either."""

    success: bool

class Engine:
    def __init__(self, **server_args: object) -> None: ...
    def generate(
        self,
        *,
        input_ids: list[list[int]],
        sampling_params: list[dict[str, object]],
        return_logprob: bool,
    ) -> list[Generated]: ...
    def begin_weight_update(self) -> tuple[bool, str]: ...
    def update_weights_from_tensor(
        self, named_tensors: list[tuple[str, Tensor]], *, flush_cache: bool = True
    ) -> tuple[bool, str]: ...
    def end_weight_update(self) -> tuple[bool, str]: ...
    def flush_cache(self) -> Flushed: ...
    def release_memory_occupation(self) -> object: ...
    def resume_memory_occupation(self, tags: list[str] | None = None) -> object: ...
    def shutdown(self) -> None: ...
