"""Where a stop string ends a completion, for engines that look for it in text of their own, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Decodes(Protocol):
    """What is asked of a tokenizer."""

    def decode(self, token_ids: list[int], /) -> str: ...


def string_end(tokenizer: Decodes, output: Sequence[int], stop: Sequence[str]) -> int | None:
    """The number of tokens up to the first one at which the text holds a stop string; None where it never does.

    The last few tokens are decoded anew at each place: a stop string spans at most as many as it has bytes.
    """
    if not stop or not any(string in tokenizer.decode(list(output)) for string in stop):
        return None
    window = max(len(string.encode()) for string in stop) + 8
    for length in range(1, len(output) + 1):
        text = tokenizer.decode(list(output[max(0, length - window) : length]))
        if any(string in text for string in stop):
            return length
    return None
