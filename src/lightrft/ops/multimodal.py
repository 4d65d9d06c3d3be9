"""Images and videos beside prompts: which belong to which prompt, and the placeholders that stand for them (R6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, cast

from attrs import evolve, frozen

from lightrft.engines.protocol import Request
from lightrft.errors import listed

Media = tuple[object, ...]
"""The images, or the videos, of one prompt."""


def media_by_prompt(
    kind: str, media: Sequence[object] | None, counts: Sequence[int] | None, prompts: int
) -> list[Media]:
    """For each prompt its images (or videos: ``kind`` is for errors).

    ``media`` is nested (for each prompt a list, one item, or None), or with ``counts`` flat: all items one after
    another, so many for each prompt. Both may be given if they agree. Raises ``ValueError`` with the numbers where
    they do not add up (FC39).
    """
    if media is None:
        if counts is not None and any(counts):
            raise ValueError(f"{kind}_num announces {sum(counts)} {kind}, and all_{kind} holds none. Pass them.")
        return [()] * prompts
    if counts is not None:
        return _counted(kind, media, [int(count) for count in counts], prompts)
    if not media:
        return [()] * prompts
    if len(media) != prompts:
        raise ValueError(
            f"all_{kind} has {len(media)} entries for {prompts} prompts: pass one for each (a list, one item, or None), "
            f"or all of them flat with {kind}_num."
        )
    return [_as_tuple(entry) for entry in media]


def _counted(kind: str, media: Sequence[object], counts: list[int], prompts: int) -> list[Media]:
    if len(counts) != prompts or any(count < 0 for count in counts):
        raise ValueError(f"{kind}_num is {counts} for {prompts} prompts: pass a count from 0 for each.")
    nested = [_as_tuple(entry) for entry in media]
    if len(media) == prompts and [len(entry) for entry in nested] == counts:
        return nested
    flat = [item for entry in nested for item in entry]
    if len(flat) != sum(counts):
        raise ValueError(f"{kind}_num adds up to {sum(counts)} ({counts}), and all_{kind} holds {len(flat)}.")
    ends = [sum(counts[: index + 1]) for index in range(prompts)]
    return [tuple(flat[end - count : end]) for count, end in zip(counts, ends, strict=True)]


def _as_tuple(entry: object) -> Media:
    """A list or tuple as it is, None as nothing, anything else as one item."""
    if entry is None:
        return ()
    return tuple(entry) if isinstance(entry, (list, tuple)) else (entry,)


# ------------------------------------------------------------------------------------------------------- placeholders


class Processor(Protocol):
    """What is read of a Hugging Face processor: the token that stands for an image, and the one for a video."""

    @property
    def tokenizer(self) -> Converts: ...


class Converts(Protocol):
    """A tokenizer."""

    def convert_tokens_to_ids(self, token: str, /) -> int | None: ...


@frozen
class Placeholders:
    """Token ids that stand for media; None where the model takes none of that kind.

    ``around``: tokens that the chat template puts around a placeholder, and that go with it.
    """

    image: int | None = None
    video: int | None = None
    around: tuple[tuple[int, int], ...] = ()


def placeholders_of(processor: object) -> Placeholders:
    """As the processor has them: its ``image_token_id`` and ``video_token_id``, or its tokens by name.

    The ids around a placeholder are those that the processor calls ``vision_start_token`` and ``vision_end_token`` (or
    ``boi_token`` and ``eoi_token``), where it has them.
    """
    pairs = (("vision_start_token", "vision_end_token"), ("boi_token", "eoi_token"))
    around = [(_token_id(processor, start), _token_id(processor, end)) for start, end in pairs]
    return Placeholders(
        _token_id(processor, "image_token"),
        _token_id(processor, "video_token"),
        tuple((start, end) for start, end in around if start is not None and end is not None),
    )


def _token_id(processor: object, name: str) -> int | None:
    tokenizer: object = getattr(processor, "tokenizer", None)
    for holder in (processor, tokenizer):
        found = getattr(holder, f"{name}_id", None)
        if isinstance(found, int):
            return found
        token = getattr(holder, name, None)
        if isinstance(token, str) and tokenizer is not None:
            return cast(Converts, tokenizer).convert_tokens_to_ids(token)
    return None


def with_media(
    requests: Sequence[Request], images: Sequence[Media], videos: Sequence[Media], placeholders: Placeholders
) -> list[Request]:
    """Requests with their media, and with as many placeholders as media, unexpanded: one for each.

    A prompt without images loses the placeholders of images, likewise of videos. Raises ``ValueError`` that lists every
    row whose numbers differ (FC13, FC47).
    """
    problems: list[str] = []
    made: list[Request] = []
    for index, request in enumerate(requests):
        ids = request.prompt_token_ids
        of_kind: Mapping[str, tuple[int | None, Media]] = {
            "image": (placeholders.image, images[index]),
            "video": (placeholders.video, videos[index]),
        }
        for kind, (token, items) in of_kind.items():
            if not items:
                ids = without(ids, token, placeholders.around)
            elif token is None:
                problems.append(f"prompt {index} has {len(items)} {kind}s, and this model takes none")
            elif ids.count(token) != len(items):
                problems.append(
                    f"prompt {index} has {len(items)} {kind}s and {ids.count(token)} placeholders (token {token}): "
                    f"one for each is needed, unexpanded, as the chat template writes them"
                )
        made.append(evolve(request, prompt_token_ids=ids, images=images[index], videos=videos[index]))
    if problems:
        raise ValueError(f"prompts and media do not fit:{listed(problems)}")
    return made


def without(ids: tuple[int, ...], token: int | None, around: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """The ids without a placeholder, and without what stands around it."""
    if token is None or token not in ids:
        return ids
    kept: list[int] = []
    position = 0
    while position < len(ids):
        if ids[position] == token:
            while position < len(ids) and ids[position] == token:
                position += 1
            if kept and position < len(ids) and (kept[-1], ids[position]) in around:
                kept.pop()
                position += 1
        else:
            kept.append(ids[position])
            position += 1
    return tuple(kept)
