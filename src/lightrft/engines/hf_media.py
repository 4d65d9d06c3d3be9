"""Images and videos for ``hf``: what its model reads instead of a placeholder, as the model's own processor says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, cast

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from lightrft.engines.protocol import Request
from lightrft.errors import EngineError
from lightrft.ops.multimodal import placeholders_of

TYPE_IDS = "mm_token_type_ids"
NOT_INPUTS = ("input_ids", "attention_mask", TYPE_IDS)


class Reads(Protocol):
    """A Hugging Face processor."""

    def __call__(self, *, text: list[str], return_tensors: str, **media: object) -> Mapping[str, Tensor]: ...


@frozen(eq=False)
class Expanded:
    """A request as the model reads it."""

    request: Request
    """With as many tokens in place of each placeholder as the image or the video takes."""
    inputs: Mapping[str, Tensor] = field(factory=dict)
    """What the model's forward takes beside token ids: pixel values and the like, of this one prompt."""


def expanded(processor: object, request: Request) -> Expanded:
    """Each placeholder in place of which the processor's tokens come, and what the pictures are to the model.

    A processor expands text only, and text cannot be had back from token ids: so it is asked for each item alone, with
    nothing but its placeholder, and what it puts there goes into the prompt.
    """
    read = cast(Reads, processor)
    known = placeholders_of(processor)
    pieces: dict[int, list[Tensor]] = {}
    types: dict[int, list[Tensor]] = {}
    inputs: dict[str, Tensor] = {}
    for kind, token, items in (("image", known.image, request.images), ("video", known.video, request.videos)):
        if not items:
            continue
        text = getattr(processor, f"{kind}_token", None)
        if token is None or not isinstance(text, str):
            raise EngineError(f"this model's processor has no token for a {kind}, and the prompt has {len(items)}.")
        for item in items:
            alone = read(text=[text], return_tensors="pt", **{f"{kind}s": [item]})
            where = (alone["input_ids"][0] == token).nonzero()[:, 0]
            between = slice(int(where[0]), int(where[-1]) + 1)
            pieces.setdefault(token, []).append(alone["input_ids"][0, between])
            if TYPE_IDS in alone:
                types.setdefault(token, []).append(alone[TYPE_IDS][0, between])
        together = read(text=[text * len(items)], return_tensors="pt", **{f"{kind}s": list(items)})
        inputs |= {name: tensor for name, tensor in together.items() if name not in NOT_INPUTS}
    ids, kinds = spliced(request.prompt_token_ids, pieces, types)
    if types:
        inputs[TYPE_IDS] = torch.tensor([kinds])
    return Expanded(evolve(request, prompt_token_ids=ids), inputs)


def spliced(
    ids: Sequence[int], pieces: Mapping[int, Sequence[Tensor]], types: Mapping[int, Sequence[Tensor]]
) -> tuple[list[int], list[int]]:
    """The ids with the pieces of a token in place of it, one after another, and the type of each."""
    made: list[int] = []
    kinds: list[int] = []
    used = dict.fromkeys(pieces, 0)
    for token in ids:
        if token not in pieces:
            made.append(token)
            kinds.append(0)
            continue
        if used[token] == len(pieces[token]):
            raise EngineError(
                f"a prompt has more placeholders (token {token}) than the {used[token]} images or videos that came with it."
            )
        piece = pieces[token][used[token]].tolist()
        made += piece
        kinds += types[token][used[token]].tolist() if token in types else [0] * len(piece)
        used[token] += 1
    if any(used[token] < len(pieces[token]) for token in pieces):
        raise EngineError(f"a prompt has fewer placeholders than images or videos: {used} were found.")
    return made, kinds


def repeated(inputs: Mapping[str, Tensor], rows: int, device: torch.device) -> dict[str, Tensor]:
    """The same for so many rows of one prompt."""
    return {name: torch.cat([tensor.to(device)] * rows) for name, tensor in inputs.items()}
