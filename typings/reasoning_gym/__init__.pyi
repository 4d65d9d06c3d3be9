# What lightrft calls of reasoning-gym, which is not py.typed. Not shipped.
from collections.abc import Iterator
from typing import Protocol, type_check_only

@type_check_only
class ProceduralDataset(Protocol):
    def __iter__(self) -> Iterator[dict[str, object]]: ...
    def score_answer(self, answer: str | None, entry: dict[str, object]) -> float: ...

def create_dataset(name: str, **options: object) -> ProceduralDataset: ...
