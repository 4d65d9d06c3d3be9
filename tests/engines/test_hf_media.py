"""R6: prompts with images through ``hf``, against what transformers' own processor and model make of their text."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from engines.pictures import IMAGE, PATCHES, WORDS, model_of_pictures, picture, processor_of_pictures
from lightrft import StrategyConfig
from lightrft.backends.local import build
from lightrft.engines.hf import hf, hf_copy
from lightrft.engines.protocol import Completion, Request, Sampling
from lightrft.errors import EngineError, UnsupportedOperation
from lightrft.ops.models import named_weights
from lightrft.ops.weight_sync import plain_weights
from lightrft.strategy.protocol import Strategy

GREEDY = Sampling(max_new_tokens=5, temperature=0.0)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return model_of_pictures()


@pytest.fixture(scope="module")
def processor() -> Any:
    return processor_of_pictures()


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(WORDS.index, text.split()))


def assert_as_transformers(model: nn.Module, processor: Any, text: str, images: list[Any], got: Completion) -> None:
    """The tokens are greedy, and as probable as the model says that is given the text and the images."""
    inputs = processor(text=[text], images=images or None, return_tensors="pt")
    assert inputs["input_ids"].shape[1] == len(text.split()) + len(images) * (PATCHES - 1)
    output = torch.tensor([got.output_token_ids])
    read = inputs["input_ids"].shape[1]
    sequence = torch.cat([inputs["input_ids"], output], 1)
    media = {"pixel_values": inputs["pixel_values"]} if images else {}
    with torch.no_grad():
        logits = cast(Any, model)(input_ids=sequence, **media).logits[0, read - 1 : -1]
    assert logits.argmax(-1).tolist() == output[0].tolist()
    expected = logits.log_softmax(-1).gather(1, output.T)[:, 0]
    torch.testing.assert_close(torch.tensor(got.logprobs), expected, atol=1e-4, rtol=0)


def test_R6_FC13_images_are_read_where_their_placeholders_are(model: nn.Module, processor: Any) -> None:
    texts = ["a <image> b", "a b", "<image> c <image>", "<image> a a b"]
    images = [[picture(0)], [], [picture(1), picture(2, 60, 90)], [picture(3)]]
    engine = hf(model, processor.tokenizer, processor=processor)
    got = engine.generate(
        [Request(ids(text), images=tuple(some)) for text, some in zip(texts, images, strict=True)], GREEDY
    )
    assert [one.prompt_token_ids for one in got] == [ids(text) for text in texts]
    for text, some, one in zip(texts, images, got, strict=True):
        assert_as_transformers(model, processor, text, some, one)
    assert len({one.output_token_ids for one in got}) == len(got)


def test_R1_R7_samples_of_a_prompt_with_an_image_are_adjacent_and_follow_its_seed(
    model: nn.Module, processor: Any
) -> None:
    engine = hf(model, processor.tokenizer, processor=processor)
    pictured, text = Request(ids("a <image>"), 5, (picture(0),)), Request(ids("b c"), 6)
    sampling = Sampling(max_new_tokens=6, n=3)
    both, other_order = engine.generate([pictured, text], sampling), engine.generate([text, pictured], sampling)
    assert both == other_order[3:] + other_order[:3]
    assert [one.prompt_token_ids for one in both] == [ids("a <image>")] * 3 + [ids("b c")] * 3
    assert len({one.output_token_ids for one in both[:3]}) > 1


def test_R5_limits_count_what_an_image_takes(model: nn.Module, processor: Any) -> None:
    request = Request(ids("a <image>"), images=(picture(0),))
    needed = 1 + PATCHES + GREEDY.max_new_tokens
    assert hf(model, None, needed, processor=processor).generate([request], GREEDY)
    with pytest.raises(EngineError, match=rf"prompt 0: {1 + PATCHES} tokens"):
        hf(model, None, needed - 1, processor=processor).generate([request], GREEDY)


@pytest.mark.parametrize(("text", "images", "says"), [("a <image> <image>", 1, "more"), ("<image> a", 2, "fewer")])
def test_FC47_placeholders_and_images_that_differ_are_refused(
    model: nn.Module, processor: Any, text: str, images: int, says: str
) -> None:
    request = Request(ids(text), images=tuple(picture(seed) for seed in range(images)))
    with pytest.raises(EngineError, match=f"{says} placeholders"):
        hf(model, processor=processor).generate([request], GREEDY)


def test_R6_without_a_processor_it_says_what_is_missing(model: nn.Module) -> None:
    assert not hf(model).capabilities.multimodal
    with pytest.raises(UnsupportedOperation, match=r"args\.processor"):
        hf(model).generate([Request(ids("<image>"), images=(picture(0),))], GREEDY)


def test_R2_a_copy_has_the_weights_by_their_names(processor: Any) -> None:
    model = model_of_pictures(seed=1)
    engine = hf_copy(model, processor=processor)
    engine.update_weights(plain_weights(model, named_weights(model)))
    request = Request(ids("a <image> b"), images=(picture(0),))
    (got,) = engine.generate([request], GREEDY)
    assert_as_transformers(model, processor, "a <image> b", [picture(0)], got)


# ------------------------------------------------------------------------------------------------ through a strategy


@pytest.fixture
def strategy(model: nn.Module, processor: Any) -> Iterator[Strategy]:
    made = build(StrategyConfig(bf16=False))
    made.setup_distributed()
    args = SimpleNamespace(tokenizer=processor.tokenizer, processor=processor)
    made.setup_inference_engine(args, engine_type="hf", actor=model)
    made.update_engine_weights(model)
    yield made
    made.close()


def test_R6_FC39_nested_and_flat_images_through_a_strategy(
    strategy: Strategy, model: nn.Module, processor: Any
) -> None:
    prompts = [ids("a <image> b"), ids("c <image> d"), ids("<image> <image> e")]
    nested = [[picture(0)], None, [picture(1), picture(2)]]
    flat = [picture(0), picture(1), picture(2)]
    got = strategy.gather_and_generate(GREEDY, prompts, all_images=nested)
    assert got == strategy.gather_and_generate(GREEDY, prompts, all_images=flat, images_num=[1, 0, 2])
    assert got[1].prompt_token_ids == ids("c d")
    for text, some, one in zip(
        ["a <image> b", "c d", "<image> <image> e"], ([flat[0]], [], flat[1:]), got, strict=True
    ):
        assert_as_transformers(model, processor, text, some, one)
    inputs = [{"prompt_token_ids": prompts[0], "multi_modal_data": {"image": flat[0]}}]
    assert strategy.engine_generate_local(GREEDY, multi_modal_inputs=inputs) == got[:1]


def test_FC47_text_alone_is_left_as_it_was_typed(strategy: Strategy) -> None:
    with pytest.raises(ValueError, match=r"prompt 1 has 1 images and 2 placeholders"):
        strategy.gather_and_generate(
            GREEDY, [ids("<image>"), ids("<image> <image>")], all_images=[[picture(0)], [picture(1)]]
        )
    with pytest.raises(ValueError, match="1 entries for 2 prompts"):
        strategy.gather_and_generate(GREEDY, [(1,), (2,)], all_images=[[picture(0)]])
    (got,) = strategy.gather_and_generate(GREEDY, [ids("a b")], all_images=[None])
    assert got.prompt_token_ids == ids("a b")
    assert IMAGE not in got.prompt_token_ids
