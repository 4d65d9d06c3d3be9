from collections.abc import Iterable

from torch import Tensor
from torch.nn import Module

class GatheredParameters:
    def __init__(
        self,
        params: Iterable[Tensor],
        modifier_rank: int | None = None,
        fwd_module: Module | None = None,
        enabled: bool = True,
    ) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *exc: object) -> None: ...
