"""From an engine's name to a running engine."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightrft.engines.protocol import Engine
from lightrft.errors import EngineError, UnsupportedOperation, missing
from lightrft.ops.models import compute_in_bf16, unwrap_model
from lightrft.ops.seeds import derived_seed

if TYPE_CHECKING:
    from torch.nn import Module

    from lightrft.strategy.record import RunState

ENGINES = ("hf", "scripted", "vllm", "sglang")


def setup_inference_engine(
    state: RunState, args: object, engine_type: str | Engine = "vllm", actor: Module | None = None
) -> Engine:
    """Starts the engine and makes it the run's; an engine from before is closed first.

    ``args`` may be anything: ``tokenizer``, ``processor`` and ``max_model_len`` are read from it where it has them, and
    ``engine_options``, a mapping of further settings for vLLM's or SGLang's own constructor.
    """
    engine = make_engine(state, args, engine_type, actor) if isinstance(engine_type, str) else engine_type
    if state.engine.engine is not None and state.engine.engine is not engine:
        state.engine.engine.close()
    state.engine.engine, state.engine.asleep = engine, False
    return engine


def make_engine(state: RunState, args: object, engine_type: str, actor: Module | None) -> Engine:
    """The engine of that name."""
    if engine_type == "hf":
        if actor is None:
            raise EngineError("engine 'hf' generates from the actor's own weights. Pass actor=model.")
        return make_hf(state, args, unwrap_model(actor))
    if engine_type == "scripted":
        from lightrft.engines.scripted import scripted

        return scripted()
    if engine_type == "vllm":
        return make_vllm(state, args, actor)
    if engine_type == "sglang":
        return make_sglang(state, args, actor)
    raise EngineError(f"engine_type={engine_type!r} is no engine. Use one of {', '.join(ENGINES)}, or pass an Engine.")


def make_hf(state: RunState, args: object, model: Module) -> Engine:
    """On the model itself; on a copy that computes in the run's precision where this process holds but a part of it."""
    from lightrft.engines.hf import hf, hf_copy

    if state.config.engine_tp_size > 1:
        raise UnsupportedOperation(
            f"engine 'hf' cannot be shared by {state.config.engine_tp_size} ranks. Instead: set engine_tp_size=1, or use "
            f"engine_type='vllm'."
        )
    tokenizer, max_model_len = getattr(args, "tokenizer", None), getattr(args, "max_model_len", None)
    processor: object = getattr(args, "processor", None)
    if not is_sharded(model):
        return hf(model, tokenizer, max_model_len, processor=processor)
    engine = hf_copy(model, tokenizer, max_model_len, device=state.device, processor=processor)
    if state.config.bf16:
        compute_in_bf16(engine.model, state.device)
    return engine


def model_for(engine: str, actor: Module | None) -> Module:
    """The plain model that an engine of a library of that name is set up from. Raises where one of the two is not there."""
    if find_spec(engine) is None:
        raise missing(engine, engine, f"engine {engine!r}")
    if actor is None:
        raise EngineError(f"engine {engine!r} is set up from the actor's config. Pass actor=model.")
    return unwrap_model(actor)


def make_vllm(state: RunState, args: object, actor: Module | None) -> Engine:
    """On the actor's config: its weights come with the first update."""
    model = model_for("vllm", actor)
    from lightrft.engines.vllm_setup import vllm

    config = state.config
    return vllm(
        model,
        getattr(args, "tokenizer", None),
        getattr(args, "max_model_len", None),
        dtype=torch.bfloat16 if config.bf16 else torch.float32,
        tensor_parallel=config.engine_tp_size,
        world=state.world,
        device=state.device,
        memory_share=config.engine_mem_util,
        can_sleep=config.enable_engine_sleep,
        bucket_bytes=config.weight_sync_bucket_mb * 10**6,
        seed=config.seed,
        options=getattr(args, "engine_options", None),
        processor=getattr(args, "processor", None),
    )


def make_sglang(state: RunState, args: object, actor: Module | None) -> Engine:
    """One for each rank, in a process of its own, on the actor's config: its weights come with the first update."""
    model = model_for("sglang", actor)
    config = state.config
    if config.engine_tp_size > 1:
        raise UnsupportedOperation(
            f"engine 'sglang' cannot be shared by {config.engine_tp_size} ranks here. Instead: set engine_tp_size=1, or "
            f"use engine_type='vllm'."
        )
    from lightrft.engines.sglang import sglang

    return sglang(
        model,
        getattr(args, "tokenizer", None),
        getattr(args, "max_model_len", None),
        device=state.device,
        dtype=torch.bfloat16 if config.bf16 else torch.float32,
        seed=derived_seed(config.seed, 5, state.world.rank),
        bucket_bytes=config.weight_sync_bucket_mb * 10**6,
        can_sleep=config.enable_engine_sleep and state.device.type == "cuda",
        memory_share=config.engine_mem_util,
        options=getattr(args, "engine_options", None),
    )


def is_sharded(model: Module) -> bool:
    """Whether this process holds but a part of any parameter: FSDP2's are DTensors, ZeRO-3's have a ``ds_id``.

    After a forward FSDP2 may keep parameters whole for a while; its modules show then.
    """
    return any(isinstance(module, FSDPModule) for module in model.modules()) or any(
        isinstance(parameter, DTensor) or hasattr(parameter, "ds_id") for parameter in model.parameters()
    )
