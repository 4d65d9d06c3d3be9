"""The laws of engines on those that need no inference library."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
from torch.nn import Module

from lightrft.conformance.engines import (
    ENGINE_LAWS,
    LIMIT,
    EngineLaw,
    Letters,
    MakeEngine,
    check_engine,
    named,
    small_model,
)
from lightrft.engines.hf import hf, hf_copy
from lightrft.engines.protocol import Engine
from lightrft.engines.scripted import scripted

pytest.importorskip("transformers")

LAWS = [pytest.param(law, id=law.name) for law in ENGINE_LAWS]


def model_in(directory: Path) -> Module:
    from transformers import AutoModelForCausalLM

    return cast("Module", AutoModelForCausalLM.from_pretrained(directory))


def shared(directory: Path, tokenizer: Letters | None) -> Engine:
    return hf(model_in(directory), tokenizer)


def copied(directory: Path, tokenizer: Letters | None) -> Engine:
    model = model_in(directory)
    engine = hf_copy(model, tokenizer)
    engine.update_weights(named(model))
    return engine


def script(directory: Path, tokenizer: Letters | None) -> Engine:
    return scripted(max_model_len=LIMIT)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("make", [shared, copied])
@pytest.mark.parametrize("law", LAWS)
def test_hf_obeys(law: EngineLaw, make: MakeEngine, tied: bool, tmp_path: Path) -> None:
    if not check_engine(law, make, tmp_path, tied=tied):
        assert law.updates
        assert make is shared


@pytest.mark.parametrize("law", LAWS)
def test_scripted_obeys(law: EngineLaw, tmp_path: Path) -> None:
    assert check_engine(law, script, tmp_path, computes=False) != law.computes


def test_the_models_of_the_laws_differ_and_are_tied_as_asked() -> None:
    one, other = (dict(named(small_model(tied=True, seed=seed))) for seed in (0, 1))
    assert all(not tensor.equal(other[name]) for name, tensor in one.items())
    assert ("lm_head.weight" in one, "lm_head.weight" in dict(named(small_model(tied=False)))) == (False, True)
