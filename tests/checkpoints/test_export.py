"""A checkpoint as a directory for `from_pretrained`: the same logits, or nothing at all (K8, K10)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from lightrft import cli
from lightrft.checkpoints.deepspeed_native import fp32_weights
from lightrft.checkpoints.export import Exported, Tokenizer, export_checkpoint, skeleton
from lightrft.checkpoints.layout import write_checkpoint
from lightrft.errors import CheckpointError
from support import save_state

IDS = torch.arange(10)[None]


def tiny(tied: bool = True, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    model: nn.Module = Qwen2ForCausalLM(config)
    return model.eval()


def base_directory(path: Path, tied: bool = True) -> str:
    """A model of other weights than the checkpoint's, and a tokenizer."""
    from tokenizers import Tokenizer as Words
    from tokenizers import models

    save_pretrained(tiny(tied, seed=9), path)
    words = Words(models.WordLevel({str(index): index for index in range(32)}, unk_token="0"))
    make: Callable[..., Tokenizer] = PreTrainedTokenizerFast
    make(tokenizer_object=words, unk_token="0").save_pretrained(str(path))
    return str(path)


def save_pretrained(model: nn.Module, path: Path) -> None:
    cast("Callable[[Path], None]", model.save_pretrained)(path)


def save(root: Path, model: nn.Module, tag: str = "step1") -> Path:
    return write_checkpoint(
        root, tag, lambda directory: save_state(directory, model=model), backend="local", world_size=1, step=1
    )


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return cast(Tensor, model(IDS).logits)


def loaded(path: Path) -> nn.Module:
    return cast("Callable[[Path], nn.Module]", AutoModelForCausalLM.from_pretrained)(path)


def left(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


# --- whole models


@pytest.mark.parametrize("tied", [True, False])
def test_K10_the_exported_model_has_the_same_logits(tmp_path: Path, tied: bool) -> None:
    base, model = base_directory(tmp_path / "base", tied), tiny(tied)
    save(tmp_path / "run", model)
    done = export_checkpoint(tmp_path / "run", tmp_path / "out", model=base, load_base=skeleton)
    assert torch.equal(logits(loaded(tmp_path / "out")), logits(model))
    assert done == Exported(
        tmp_path / "out", tmp_path / "run" / "step1", "model", sum(each.numel() for each in model.parameters())
    )
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("7 3")["input_ids"] == [7, 3]
    assert left(tmp_path) == ["base", "out", "run"]


def test_K8_tied_weights_are_stored_once_and_are_tied_again(tmp_path: Path) -> None:
    base, model = base_directory(tmp_path / "base"), tiny()
    save(tmp_path / "run", model)
    export_checkpoint(tmp_path / "run", tmp_path / "out", model=base, load_base=skeleton)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert sum(each.numel() for each in stored.values()) == sum(each.numel() for each in model.parameters())
    again = loaded(tmp_path / "out")
    assert again.get_parameter("lm_head.weight") is again.get_parameter("model.embed_tokens.weight")


def test_K8_a_tied_weight_may_lack_in_the_checkpoint(tmp_path: Path) -> None:
    base, model = base_directory(tmp_path / "base"), tiny()
    save(tmp_path / "run", nn.ModuleDict({"model": model.get_submodule("model")}))  # no lm_head
    export_checkpoint(tmp_path / "run", tmp_path / "out", model=base, load_base=skeleton)
    assert torch.equal(logits(loaded(tmp_path / "out")), logits(model))


def test_in_bfloat16(tmp_path: Path) -> None:
    base, model = base_directory(tmp_path / "base"), tiny()
    save(tmp_path / "run", model)
    export_checkpoint(tmp_path / "run", tmp_path / "out", model=base, load_base=skeleton, dtype="bfloat16")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in stored.items():
        assert torch.equal(tensor, model.state_dict()[name].bfloat16()), name
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_names_that_wrappers_made_longer(tmp_path: Path) -> None:
    class Actor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Module()
            self.module.add_module("model", tiny())

    base = base_directory(tmp_path / "base")
    save(tmp_path / "run", Actor())
    export_checkpoint(tmp_path / "run", tmp_path / "out", model=base, load_base=skeleton)
    assert torch.equal(logits(loaded(tmp_path / "out")), logits(tiny()))


def test_without_an_architecture_the_weights_alone(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    path = save(tmp_path / "run", model)
    done = export_checkpoint(path, tmp_path / "out", load_base=skeleton)
    assert done.kind == "weights"
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored.keys() == {"0.weight", "0.bias", "1.bias"}
    assert done.parameters == 15
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in stored.items())


def test_what_deepspeed_itself_saved(tmp_path: Path) -> None:
    from checkpoints.test_deepspeed_native import write_native

    write_native(tmp_path / "run")
    export_checkpoint(tmp_path / "run", tmp_path / "out", load_base=skeleton)
    stored, told = load_file(tmp_path / "out" / "model.safetensors"), fp32_weights(tmp_path / "run")
    assert stored.keys() == told.keys()
    assert all(torch.equal(tensor, told[name]) for name, tensor in stored.items())


# --- nothing at all


def test_K7_the_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    base = base_directory(tmp_path / "base")
    for number, model in enumerate((nn.Linear(2, 2), tiny(tied=False))):
        save(tmp_path / f"run{number}", model)
        with pytest.raises(CheckpointError, match="is not of the model") as refused:
            export_checkpoint(tmp_path / f"run{number}", tmp_path / "out", model=base, load_base=skeleton)
        assert ("missing in the checkpoint" if number == 0 else "tied to") in str(refused.value)
    assert left(tmp_path) == ["base", "run0", "run1"]


def test_K6_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    base = base_directory(tmp_path / "base")
    path = save(tmp_path / "run", tiny())
    content = bytearray((path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "model.safetensors").write_bytes(content)
    for checkpoint in (path, tmp_path / "run"):
        with pytest.raises(CheckpointError, match="checksum does not match"):
            export_checkpoint(checkpoint, tmp_path / "out", model=base, load_base=skeleton)
    assert not (tmp_path / "out").exists()


def test_K4_a_failure_half_way_leaves_nothing_and_what_was_there(tmp_path: Path) -> None:
    class Full:
        def save_pretrained(self, save_directory: str, /) -> object:
            assert (Path(save_directory) / "model.safetensors").exists()
            raise OSError(28, "No space left on device")

    base = base_directory(tmp_path / "base")
    save(tmp_path / "run", tiny())
    out = tmp_path / "out"
    for there in (False, True):
        before = {path.name: path.read_bytes() for path in out.iterdir()} if there else {}
        with pytest.raises(CheckpointError, match=f"cannot write {out}: .*No space left"):
            export_checkpoint(
                tmp_path / "run", out, model=base, load_base=lambda spec: (skeleton(spec)[0], Full()), overwrite=there
            )
        assert left(tmp_path) == ["base", "out", "run"] if there else ["base", "run"]
        assert before == ({path.name: path.read_bytes() for path in out.iterdir()} if there else {})
        base_directory(out)


def test_only_told_to_it_replaces_a_model_and_nothing_else(tmp_path: Path) -> None:
    base, out = base_directory(tmp_path / "base"), tmp_path / "out"
    save(tmp_path / "run", tiny())
    base_directory(out)
    (out / "notes.txt").write_text("mine")
    (out / "model-00001-of-00002.safetensors").write_text("of a larger model")
    with pytest.raises(CheckpointError, match=f"{out} is not empty. Pass --overwrite"):
        export_checkpoint(tmp_path / "run", out, model=base, load_base=skeleton)
    export_checkpoint(tmp_path / "run", out, model=base, load_base=skeleton, overwrite=True)
    assert torch.equal(logits(loaded(out)), logits(tiny()))
    assert (out / "notes.txt").read_text() == "mine"
    assert not (out / "model-00001-of-00002.safetensors").exists()


def test_it_does_not_write_into_the_checkpoint_or_over_a_file(tmp_path: Path) -> None:
    path = save(tmp_path / "run", tiny())
    (tmp_path / "file").write_text("x")
    for out in (path, path / "hf", tmp_path / "run", tmp_path, tmp_path / "file"):
        with pytest.raises(CheckpointError, match=r"lie in each other|is a file"):
            export_checkpoint(path, out, load_base=skeleton, overwrite=True)


# --- adapters


def adapted(base: str, directory: Path) -> nn.Module:
    """A LoRA model with an adapter that does something, whose configuration is in ``directory``."""
    peft = pytest.importorskip("peft")
    model = cast("Callable[[str], nn.Module]", AutoModelForCausalLM.from_pretrained)(base)
    config = peft.LoraConfig(r=3, lora_alpha=7, target_modules=["q_proj", "v_proj"], base_model_name_or_path=base)
    made = cast(nn.Module, peft.get_peft_model(model, config)).eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    save_pretrained(made, directory)
    (directory / "adapter_model.safetensors").unlink()
    return made


@pytest.mark.parametrize("wrapped", [False, True])
def test_K10_an_adapter_alone(tmp_path: Path, wrapped: bool) -> None:
    peft = pytest.importorskip("peft")
    base = base_directory(tmp_path / "base")
    model = adapted(base, tmp_path / "adapter")
    save(tmp_path / "run", nn.ModuleDict({"model": model}) if wrapped else model)
    done = export_checkpoint(tmp_path / "run", tmp_path / "out", model=str(tmp_path / "adapter"), load_base=skeleton)
    assert done.kind == "adapter"
    again = peft.PeftModel.from_pretrained(loaded(Path(base)), tmp_path / "out").eval()
    assert torch.equal(logits(again), logits(model))
    assert not torch.equal(logits(again), logits(loaded(Path(base))))
    assert left(tmp_path / "out") == ["adapter_config.json", "adapter_model.safetensors"]


def test_K10_an_adapter_merged_into_its_model(tmp_path: Path) -> None:
    base = base_directory(tmp_path / "base")
    model = adapted(base, tmp_path / "adapter")
    save(tmp_path / "run", model)
    done = export_checkpoint(
        tmp_path / "run", tmp_path / "out", model=str(tmp_path / "adapter"), load_base=skeleton, merge=True
    )
    assert done.kind == "model"
    assert (logits(loaded(tmp_path / "out")) - logits(model)).abs().max() < 1e-5
    assert not (tmp_path / "out" / "adapter_config.json").exists()


def test_an_adapter_of_which_too_little_is_known_is_refused(tmp_path: Path) -> None:
    base = base_directory(tmp_path / "base")
    save(tmp_path / "run", adapted(base, tmp_path / "adapter"))
    save(tmp_path / "plain", tiny())
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        export_checkpoint(tmp_path / "run", tmp_path / "out", model=base, load_base=skeleton)
    with pytest.raises(CheckpointError, match="holds no adapter"):
        export_checkpoint(tmp_path / "plain", tmp_path / "out", model=base, load_base=skeleton, merge=True)
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "use_dora": True}))
    with pytest.raises(CheckpointError, match="use_dora=True"):
        export_checkpoint(
            tmp_path / "run", tmp_path / "out", model=str(tmp_path / "adapter"), load_base=skeleton, merge=True
        )
    assert not (tmp_path / "out").exists()


# --- the command


def test_the_command_says_what_it_did_and_explains_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, run, out = base_directory(tmp_path / "base"), tmp_path / "run", tmp_path / "out"
    path = save(run, tiny())
    capsys.readouterr()

    def export(*words: str) -> tuple[int, str]:
        code = cli.run_command(["export", *words])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        return code, captured.out + captured.err

    assert export(str(tmp_path / "missing"), str(out)) == (
        2,
        f"lightrft: no checkpoint in {tmp_path}/missing: there is no such directory. Check the path.\n",
    )
    for words, reason in (
        ((base, str(out)), "no whole checkpoint"),
        ((str(run), str(out), "--model", str(run)), "is no directory with config.json"),
        ((str(run), str(out), "--merge"), "Leave out --merge"),
    ):
        code, text = export(*words)
        assert code == 2
        assert reason in text
        assert not out.exists()
    code, text = export(str(run), str(out), "--model", base)
    assert code == 0
    assert f"{path} -> {out}: a model of {sum(each.numel() for each in tiny().parameters()):,} parameters" in text
    assert export(str(run), str(out), "--model", base)[0] == 2
    assert export(str(run), str(out), "--model", base, "--overwrite")[0] == 0
    assert torch.equal(logits(loaded(out)), logits(tiny()))
    assert not torch.distributed.is_initialized()
