"""R2: the names and values that an engine is sent, and the look at whether it took them."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lightrft.conformance.parity import qwen2
from lightrft.engines.hf import hf_copy
from lightrft.errors import EngineError, UnsupportedOperation
from lightrft.ops.models import named_weights
from lightrft.ops.weight_sync import measured_drift, plain_name, plain_weights, verify

CPU = torch.device("cpu")


def sent(model: nn.Module) -> dict[str, Tensor]:
    return dict(plain_weights(model, named_weights(model)))


def adapted(base: nn.Module, **settings: object) -> nn.Module:
    """With factors that are not zero."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = LoraConfig(**{"r": 2, "lora_alpha": 3, "init_lora_weights": False, **settings})  # type: ignore[arg-type]
        made: nn.Module = get_peft_model(cast(Any, base), config)
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.data.add_(torch.randn_like(parameter) / 8)
    return made


def merged(model: nn.Module) -> dict[str, Tensor]:
    """As PEFT computes it."""
    plain = cast(Any, copy.deepcopy(model)).merge_and_unload()
    return {name: parameter.detach() for name, parameter in plain.named_parameters()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=0)


WRAPPINGS = st.lists(
    st.sampled_from(["module", "_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"]), max_size=3
)


@given(WRAPPINGS)
def test_FC32_names_lose_what_was_wrapped_around_the_model(before: list[str]) -> None:
    inside = [part for part in before if part != "module"]
    wrapped = ".".join([*before, "model", "layers", *inside, "0", "weight"])
    assert plain_name(wrapped) == "model.layers.0.weight"
    assert plain_name(".".join([*before, "base_model", "model", "x", "bias"])) == "x.bias"


def test_FC32_a_module_that_is_called_module_inside_keeps_its_name() -> None:
    assert plain_name("encoder.module.weight") == "encoder.module.weight"
    assert plain_name("module.weight") == "weight"


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "down_proj"]},
        {"target_modules": ["q_proj"], "use_rslora": True},
        {"target_modules": ["v_proj"], "modules_to_save": ["norm"]},
        {"target_modules": ["embed_tokens", "o_proj"]},
    ],
)
def test_R2_FC33_adapters_are_merged_as_peft_does(settings: dict[str, object]) -> None:
    base = qwen2()
    if "embed_tokens" in cast("list[str]", settings["target_modules"]):
        base = untied()
    model = adapted(base, **settings)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert_same(sent(model), merged(model))
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


def untied() -> nn.Module:
    """A language model whose head is its own."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    made: nn.Module = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]  # transformers' own
    return made


def test_R2_layers_whose_weights_lie_transposed_are_merged_too() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    base = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    model = adapted(base, target_modules=["c_attn"], fan_in_fan_out=True)
    assert_same(sent(model), merged(model))


def test_R2_what_is_merged_or_switched_off_counts_as_it_is() -> None:
    model = adapted(qwen2(), target_modules=["q_proj"])
    expected, plain = merged(model), {name: value.detach() for name, value in qwen2().named_parameters()}
    with cast(Any, model).disable_adapter():
        assert_same(sent(model), plain)
    cast(Any, model).merge_adapter()
    assert_same(sent(model), expected)


def test_R2_FC33_bf16_is_merged_in_fp32_and_a_hundred_times_changes_nothing() -> None:
    model = adapted(qwen2().to(torch.bfloat16), target_modules=["q_proj"])
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    first = found = sent(model)
    for _ in range(100):
        found = sent(model)
    assert all(torch.equal(first[name], found[name]) for name in first)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    name = "model.layers.0.self_attn.q_proj"
    base, layer = before[f"base_model.model.{name}.base_layer.weight"], model.get_submodule(f"base_model.model.{name}")
    factors = [before[f"base_model.model.{name}.lora_{part}.default.weight"].float() for part in "AB"]
    expected = base.float() + cast(Any, layer).scaling["default"] * (factors[1] @ factors[0])
    assert torch.equal(found[f"{name}.weight"], expected)


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"lora_bias": True}])
def test_R2_adapters_that_do_more_than_add_are_refused(settings: dict[str, object]) -> None:
    model = adapted(qwen2(), target_modules=["q_proj"], **settings)
    with pytest.raises(UnsupportedOperation, match=r"q_proj.*merge_and_unload"):
        sent(model)


def test_R3_no_more_than_one_layer_is_held_at_a_time() -> None:
    model = adapted(qwen2(), target_modules=["q_proj", "k_proj"])
    came: list[str] = []

    def stream() -> Iterable[tuple[str, Tensor]]:
        for name, tensor in named_weights(model):
            came.append(name)
            yield name, tensor

    for name, _ in plain_weights(model, stream()):
        path, _, last = name.rpartition(".")
        behind = [each for each in came if f"{path}." in each and each.endswith(last)]
        since = len(came) - came.index(behind[0])
        assert since <= 4, f"{name} came {since} parameters after its first part"


# ----------------------------------------------------------------------------------------------------------- verifying


def test_R2_verification_passes_for_what_was_sent_and_names_what_was_not() -> None:
    model, other = qwen2(), qwen2(seed=1)
    engine = hf_copy(model, None, None, device=CPU)
    engine.update_weights(sent(model).items())
    assert verify(engine, model, CPU, sent(model).items()).largest < 1e-5
    changed = sent(model)
    name = "model.layers.1.mlp.up_proj.weight"
    changed[name] = dict(other.named_parameters())[name].detach()
    engine.update_weights(changed.items())
    assert measured_drift(engine, model, CPU).largest > 1e-3
    with pytest.raises(EngineError, match=rf"do.*differ by up to .*First weights that differ: {name}\."):
        verify(engine, model, CPU, sent(model).items())
    assert model.training


def test_R2_verification_needs_a_vocabulary() -> None:
    with pytest.raises(UnsupportedOperation, match="verify_weight_sync"):
        measured_drift(hf_copy(qwen2(), None, None, device=CPU), nn.Linear(2, 2), CPU)
