"""R6: which images belong to which prompt, and what stands for them in it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightrft.engines.protocol import Request
from lightrft.ops.multimodal import Placeholders, media_by_prompt, placeholders_of, with_media

IMAGE, VIDEO, START, END = 90, 91, 92, 93
KNOWN = Placeholders(IMAGE, VIDEO, ((START, END),))


def fitted(
    *rows: Sequence[int], images: Sequence[tuple[object, ...]], videos: Sequence[tuple[object, ...]] | None = None
) -> list[Request]:
    return with_media([Request(tuple(row)) for row in rows], images, videos or [()] * len(rows), KNOWN)


@given(st.lists(st.lists(st.integers(), max_size=3), max_size=6))
def test_R6_nested_flat_and_both_are_the_same(nested: list[list[int]]) -> None:
    counts, flat = [len(row) for row in nested], list(chain.from_iterable(nested))
    expected = [tuple(row) for row in nested]
    assert media_by_prompt("images", nested, None, len(nested)) == expected
    assert media_by_prompt("images", flat, counts, len(nested)) == expected
    assert media_by_prompt("images", nested, counts, len(nested)) == expected


def test_R6_FC39_none_and_empty_are_no_images_and_one_item_is_one() -> None:
    assert media_by_prompt("images", [["i0"], None], None, 2) == [("i0",), ()]
    assert media_by_prompt("images", [["i0"], []], None, 2) == [("i0",), ()]
    assert media_by_prompt("images", ["i0", None], None, 2) == [("i0",), ()]
    assert media_by_prompt("images", None, None, 2) == [(), ()]
    assert media_by_prompt("images", [], [0, 0], 2) == [(), ()]
    assert media_by_prompt("images", None, [0, 0], 2) == [(), ()]


@pytest.mark.parametrize(
    ("media", "counts", "numbers"),
    [
        (["a"], None, "1 entries for 2 prompts"),
        (["a", "b", "c"], [1, 1], r"adds up to 2 .* holds 3"),
        (["a", "b"], [1, 2], r"adds up to 3 .* holds 2"),
        ([["a"], ["b", "c"]], [2, 2], r"adds up to 4 .* holds 3"),
        (["a"], [1], r"\[1\] for 2 prompts"),
        (["a", "b"], [3, -1], r"\[3, -1\] for 2 prompts"),
        (None, [1, 0], "announces 1 images"),
    ],
)
def test_R6_counts_that_do_not_add_up_are_named(media: list[object], counts: list[int], numbers: str) -> None:
    with pytest.raises(ValueError, match=numbers):
        media_by_prompt("images", media, counts, 2)


def test_R6_FC13_FC39_a_row_with_images_keeps_its_placeholders_and_one_without_loses_them() -> None:
    (with_one, without_any) = fitted([1, START, IMAGE, END, 2], [3, START, IMAGE, END, 4], images=[("i0",), ()])
    assert with_one.prompt_token_ids == (1, START, IMAGE, END, 2)
    assert with_one.images == ("i0",)
    assert without_any.prompt_token_ids == (3, 4)
    assert without_any.images == ()


def test_R6_only_what_stands_around_a_placeholder_goes_with_it() -> None:
    rows = ([IMAGE, 1], [START, 1, END, IMAGE], [START, VIDEO, END, START, IMAGE, IMAGE, END, END], [START, END])
    got = fitted(*rows, images=[()] * 4, videos=[(), (), ("v",), ()])
    assert [one.prompt_token_ids for one in got] == [
        (1,),
        (START, 1, END),
        (START, VIDEO, END, END),
        (START, END),
    ]


def test_R6_FC47_numbers_of_images_and_placeholders_that_differ_name_their_rows() -> None:
    with pytest.raises(
        ValueError, match=r"(?s)prompt 0 has 1 images and 2 placeholders.*prompt 2 has 2 videos and 0 "
    ) as e:
        fitted([IMAGE, IMAGE], [1, IMAGE], [5], images=[("a",), ("b",), ()], videos=[(), (), ("v", "w")])
    assert "prompt 1" not in str(e.value)
    with pytest.raises(ValueError, match="this model takes none"):
        with_media([Request((1,))], [()], [("v",)], Placeholders(IMAGE))


def test_R6_placeholders_are_the_processors() -> None:
    vocabulary = {"<image>": 7, "<v>": 8, "<s>": 9, "<e>": 10}
    tokenizer = SimpleNamespace(convert_tokens_to_ids=vocabulary.get)
    by_name = SimpleNamespace(tokenizer=tokenizer, image_token="<image>", boi_token="<s>", eoi_token="<e>")
    assert placeholders_of(by_name) == Placeholders(7, None, ((9, 10),))
    by_id = SimpleNamespace(tokenizer=tokenizer, image_token_id=3, video_token="<v>")
    assert placeholders_of(by_id) == Placeholders(3, 8)
    with_tokens = SimpleNamespace(convert_tokens_to_ids=vocabulary.get, image_token="<image>", vision_start_token="<s>")
    assert placeholders_of(SimpleNamespace(tokenizer=with_tokens)) == Placeholders(7)
