"""From an engine's name to a running engine."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightrft.engines.protocol import Engine
from lightrft.errors import EngineError, UnsupportedOperation, missing
from lightrft.ops.models import compute_in_bf16, unwrap_model

if TYPE_CHECKING:
    from torch.nn import Module

    from lightrft.strategy.record import RunState

ENGINES = ("hf", "scripted", "vllm", "sglang")


def setup_inference_engine(
    state: RunState, args: object, engine_type: str | Engine = "vllm", actor: Module | None = None
) -> Engine:
    """Starts the engine and makes it the run's; an engine from before is closed first.

    ``args`` may be anything: ``tokenizer`` and ``max_model_len`` are read from it where it has them.
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
    if engine_type in ("vllm", "sglang"):
        if find_spec(engine_type) is None:
            raise missing(engine_type, engine_type, f"engine {engine_type!r}")
        raise UnsupportedOperation(
            f"engine {engine_type!r} is installed, but this version of lightrft does not drive it yet. "
            f"Use engine_type='hf'."
        )
    raise EngineError(f"engine_type={engine_type!r} is no engine. Use one of {', '.join(ENGINES)}, or pass an Engine.")


def make_hf(state: RunState, args: object, model: Module) -> Engine:
    """On the model itself; on a copy that computes in the run's precision where this process holds but a part of it."""
    from lightrft.engines.hf import hf, hf_copy

    tokenizer, max_model_len = getattr(args, "tokenizer", None), getattr(args, "max_model_len", None)
    if not is_sharded(model):
        return hf(model, tokenizer, max_model_len)
    engine = hf_copy(model, tokenizer, max_model_len, device=state.device)
    if state.config.bf16:
        compute_in_bf16(engine.model, state.device)
    return engine


def is_sharded(model: Module) -> bool:
    """Whether this process holds but a part of any parameter: FSDP2's are DTensors, ZeRO-3's have a ``ds_id``.

    After a forward FSDP2 may keep parameters whole for a while; its modules show then.
    """
    return any(isinstance(module, FSDPModule) for module in model.modules()) or any(
        isinstance(parameter, DTensor) or hasattr(parameter, "ds_id") for parameter in model.parameters()
    )
