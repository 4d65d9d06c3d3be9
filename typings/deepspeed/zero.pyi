from collections.abc import Iterable
from contextlib import AbstractContextManager

from torch import Tensor

def GatheredParameters(params: Iterable[Tensor], modifier_rank: int | None = None) -> AbstractContextManager[None]: ...
