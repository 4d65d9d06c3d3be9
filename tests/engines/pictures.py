"""A tiny vision-language model with its processor, made here: random weights, words of one letter."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import nn

WORDS = ["<pad>", "<eos>", *"abcdefghij", "<image>"]
IMAGE = WORDS.index("<image>")
PATCH, SIZE = 14, 28
PATCHES = (SIZE // PATCH) ** 2
"""Tokens that an image takes."""


def model_of_pictures(seed: int = 0) -> nn.Module:
    """LLaVA: two layers that see and two that speak."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    sees = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=SIZE,
        patch_size=PATCH,
    )
    speaks = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, bos_token_id=0, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = LlavaForConditionalGeneration(
            LlavaConfig(vision_config=sees, text_config=speaks, image_token_index=IMAGE)
        ).train(False)
        for parameter in made.parameters():
            parameter.data.mul_(4)  # so that what is seen shows in what is said
        made.lm_head.weight.data[IMAGE] = 0  # it does not say "image"
    model: nn.Module = made
    return model


def processor_of_pictures() -> Any:
    """Its processor, with a tokenizer that knows :data:`WORDS`."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import LlavaProcessor, PreTrainedTokenizerFast
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    words = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = cast(Any, WhitespaceSplit())
    tokenizer = cast(Any, PreTrainedTokenizerFast)(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", extra_special_tokens={"image_token": "<image>"}
    )
    pictures = CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE})
    return cast(Any, LlavaProcessor)(
        pictures, tokenizer, patch_size=PATCH, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )


def picture(seed: int, width: int = 40, height: int = 30) -> Any:
    """Noise."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)
