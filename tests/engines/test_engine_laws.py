"""The laws of engines on those that need no inference library."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightrft.conformance.engine_run import make_hf, make_hf_copy, make_scripted
from lightrft.conformance.engines import ENGINE_LAWS, EngineLaw, MakeEngine, check_engine, named, small_model

pytest.importorskip("transformers")

LAWS = [pytest.param(law, id=law.name) for law in ENGINE_LAWS]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("make", [make_hf, make_hf_copy])
@pytest.mark.parametrize("law", LAWS)
def test_hf_obeys(law: EngineLaw, make: MakeEngine, tied: bool, tmp_path: Path) -> None:
    if not check_engine(law, make, tmp_path, tied=tied):
        assert law.updates
        assert make is make_hf


@pytest.mark.parametrize("law", LAWS)
def test_scripted_obeys(law: EngineLaw, tmp_path: Path) -> None:
    assert check_engine(law, make_scripted, tmp_path, computes=False) != law.computes


def test_the_models_of_the_laws_differ_and_are_tied_as_asked() -> None:
    one, other = (dict(named(small_model(tied=True, seed=seed))) for seed in (0, 1))
    assert all(not tensor.equal(other[name]) for name, tensor in one.items())
    assert ("lm_head.weight" in one, "lm_head.weight" in dict(named(small_model(tied=False)))) == (False, True)
