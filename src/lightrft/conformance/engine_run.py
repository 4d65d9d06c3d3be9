"""``check_engine_laws``: every law of engines on one engine, and what came of each.

The engine runs in this process: some cannot live in the process of a rank. What hangs there hangs here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import cast

import torch
from torch.nn import Module

from lightrft.conformance.building import load_attribute
from lightrft.conformance.engines import ENGINE_LAWS, LIMIT, EngineLaw, Letters, MakeEngine, check_engine, named
from lightrft.conformance.law import Broken
from lightrft.conformance.run import BackendReport, Result, ignore, judged, refuse_unknown_xfails, skipped
from lightrft.conformance.source import name_of
from lightrft.engines.hf import hf, hf_copy
from lightrft.engines.protocol import Engine
from lightrft.engines.scripted import scripted
from lightrft.errors import ConfigError, not_known

COMPUTES_NOTHING = frozenset({"scripted"})


def check_engine_laws(
    make: MakeEngine | str,
    *,
    name: str | None = None,
    laws: Sequence[EngineLaw] = ENGINE_LAWS,
    computes: bool = True,
    xfails: Mapping[str, str] | None = None,
    advance: Callable[[Result], None] = ignore,
) -> BackendReport:
    """Checks every law of engines on what ``make(directory, tokenizer)`` makes, each on a small random Qwen2 in fp32.

    ``make`` may be its name, ``"package.module:function"``. ``computes``: False for an engine that computes nothing, of
    which no law about a model's numbers is asked. ``xfails`` as in ``check_backend``. Laws that the engine's own
    ``capabilities`` exclude are skipped. Raises ``ConfigError`` for a name that is not to be found.
    """
    expected = xfails or {}
    refuse_unknown_xfails(expected, [law.name for law in laws])
    results = []
    with known_engine(make) if isinstance(make, str) else nullcontext(make) as function:
        for law in laws:
            results.append(result_of_engine(law, function, computes, expected))
            advance(results[-1])
    return BackendReport(
        name=name or (make if isinstance(make, str) else name_of(make)), world_size=None, results=results
    )


def result_of_engine(law: EngineLaw, make: MakeEngine, computes: bool, xfails: Mapping[str, str]) -> Result:
    """One law."""
    start = time.monotonic()
    broken = None
    with TemporaryDirectory(prefix="lightrft-engine-") as directory:
        try:
            if not check_engine(law, make, Path(directory), computes=computes):
                return skipped(law.name, "not about an engine of these capabilities")
        except Exception as error:
            broken = Broken({}, error)
    return judged(xfails, law.name, time.monotonic() - start, broken, "")


# -------------------------------------------------------------------------------------------------------- those we know


@contextmanager
def known_engine(name: str) -> Iterator[MakeEngine]:
    """How an engine is made: by its name, or as ``package.module:function``. Closes what it kept."""
    if name not in KEPT:
        yield load_engine(name)
        return
    kept: list[Engine] = []

    def make(directory: Path, tokenizer: Letters | None) -> Engine:
        if not kept:
            kept.append(KEPT[name](directory, tokenizer))
        else:
            kept[0].update_weights(named(model_in(directory)))
            kept[0].flush_cache()
        return kept[0]

    try:
        yield make
    finally:
        for engine in kept:
            engine.close()


def load_engine(name: str) -> MakeEngine:
    """The function that makes an engine."""
    if ":" in name:
        return cast("MakeEngine", load_attribute(name, "engine", "make(directory: Path, tokenizer) -> Engine"))
    if name not in MAKERS:
        raise ConfigError(
            f"{not_known('engine', name, [*MAKERS, *KEPT])} Name another as package.module:function, which gets a directory "
            f"with a model and a tokenizer, and gives an engine."
        )
    return MAKERS[name]


def model_in(directory: Path) -> Module:
    """As Hugging Face loads it."""
    from transformers import AutoModelForCausalLM

    load = cast("Callable[..., Module]", AutoModelForCausalLM.from_pretrained)
    return load(directory, dtype=torch.float32)


def make_hf(directory: Path, tokenizer: Letters | None) -> Engine:
    """On the trainer's own module."""
    return hf(model_in(directory), tokenizer)


def make_hf_copy(directory: Path, tokenizer: Letters | None) -> Engine:
    """With weights of its own."""
    model = model_in(directory)
    engine = hf_copy(model, tokenizer)
    engine.update_weights(named(model))
    return engine


def make_scripted(directory: Path, tokenizer: Letters | None) -> Engine:
    """It computes nothing."""
    return scripted(max_model_len=LIMIT)


def start_vllm(directory: Path, tokenizer: Letters | None) -> Engine:
    """In fp32, with several buckets to an update."""
    from lightrft.engines.vllm_setup import vllm

    return vllm(directory, tokenizer, dtype=torch.float32, bucket_bytes=BUCKET)


def start_sglang(directory: Path, tokenizer: Letters | None) -> Engine:
    """The same."""
    from lightrft.engines.sglang import sglang

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return sglang(
        directory, tokenizer, device=device, dtype=torch.float32, bucket_bytes=BUCKET, can_sleep=device.type == "cuda"
    )


BUCKET = 40_000
"""Bytes: less than a model of the laws has."""
MAKERS: Mapping[str, MakeEngine] = MappingProxyType({"hf": make_hf, "hf-copy": make_hf_copy, "scripted": make_scripted})
KEPT: Mapping[str, MakeEngine] = MappingProxyType({"sglang": start_sglang, "vllm": start_vllm})
"""Those of which one serves all laws: to start it takes longer than all of them."""
