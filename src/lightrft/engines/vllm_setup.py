"""Sets vLLM up in this process, and takes it down: what it would leave behind in the process is put back."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import distributed
from torch.nn import Module

from lightrft.engines.expected_weights import Model, expected_weights, first_names, model_of, write_config
from lightrft.engines.hf_sampling import Tokenizer
from lightrft.engines.protocol import Capabilities
from lightrft.engines.vllm import Llm, MakeParams, VllmEngine, VllmState
from lightrft.engines.vllm_worker import RECEIVER
from lightrft.errors import EngineError, missing
from lightrft.ops.seeds import derived_seed, seeded
from lightrft.ops.world import World

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

logger = logging.getLogger(__name__)

OLDEST = "0.20"
"""The first version of vLLM with everything that is called here."""

ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
"""What vLLM is told unless the user told it something else. Binding its threads would bind the trainer's; it warns at each
update of layers that have no weights."""

CPU_CACHE_BYTES = 1 << 30
"""The most that keys and values get on the CPU, where there is no share of a device to take."""


class MakeLlm(Protocol):
    """``vllm.LLM``."""

    def __call__(self, **settings: object) -> Llm: ...


def vllm(
    source: Module | str | Path,
    tokenizer: Tokenizer | None = None,
    max_model_len: int | None = None,
    *,
    dtype: torch.dtype | None = None,
    tensor_parallel: int = 1,
    world: World | None = None,
    device: torch.device | None = None,
    memory_share: float = 0.5,
    can_sleep: bool = False,
    bucket_bytes: int = 256 << 20,
    seed: int = 42,
    options: Mapping[str, object] | None = None,
    processor: object = None,
) -> VllmEngine:
    """vLLM in this process, on the model in a directory, or on an actor's.

    Of an actor only the config is read: the engine refuses to generate until ``update_weights`` gave it all weights. A
    directory's weights are loaded. ``tokenizer`` is needed for stop strings and text, ``processor`` for images
    and videos. ``max_model_len`` bounds prompt and completion together, in tokens, by default at the
    model's. ``dtype`` is by default the actor's, or what the directory says.

    In a ``world`` of several processes torch's process group has to exist; ``tensor_parallel`` consecutive ranks then
    make one engine, and have to ask it the same. ``memory_share`` is vLLM's part of a CUDA device; ``can_sleep`` sets
    it up for sleep where vLLM can. ``options`` go to ``vllm.LLM`` as they are, before ours.

    The random numbers of this process are left alone. An engine that was set up without a process group makes one of
    its own and ends it when it is closed; one that is set up later in the same process has to be closed before.
    Raises ``EngineError`` when vLLM cannot run the model, ``MissingDependency`` without vLLM.
    """
    world = World() if world is None else world
    device = torch.device("cpu") if device is None else device
    check_world(tensor_parallel, world)
    folder = TemporaryDirectory(prefix="lightrft-vllm-")
    try:
        directory = Path(source) if not isinstance(source, Module) else Path(folder.name)
        if isinstance(source, Module):
            write_config(source, directory)
            dtype = next(source.parameters()).dtype if dtype is None else dtype
        knows_tokenizer, tokenizer_directory = place_tokenizer(processor or tokenizer, directory, Path(folder.name))
        model, config = model_of(directory), config_of(directory)
        limit = model.max_position_embeddings if max_model_len is None else max_model_len
        with environment(world), seeded(seed, device), own_set_num_threads():
            make_llm, make_params, sleeps = parts_of_vllm()
            settings: dict[str, object] = {
                "model": str(directory),
                "tokenizer": tokenizer_directory,
                "skip_tokenizer_init": tokenizer_directory is None,
                "load_format": "dummy" if isinstance(source, Module) else "auto",
                "dtype": "auto" if dtype is None else str(dtype).removeprefix("torch."),
                "max_model_len": limit,
                "tensor_parallel_size": tensor_parallel,
                "generation_config": "vllm",
                "logprobs_mode": "raw_logprobs",
                "enable_prefix_caching": True,
                "worker_extension_cls": RECEIVER,
                "seed": derived_seed(seed, 5, world.rank // tensor_parallel) % 2**31,
                "enable_sleep_mode": can_sleep and sleeps,
            }
            if world.world_size > 1:
                settings["distributed_executor_backend"] = "external_launcher"
            if device.type == "cuda":
                settings["gpu_memory_utilization"] = memory_share
            else:
                settings |= {"enforce_eager": True, "kv_cache_memory_bytes": cache_bytes(config, limit)}
                if tensor_parallel > 1:
                    start = world.rank - world.rank % tensor_parallel
                    if world.rank == start:
                        remove_dead_segments(range(start, start + tensor_parallel))
                    distributed.barrier()
            had_group = distributed.is_initialized()
            try:
                llm = make_llm(**{**settings, **(options or {})})
            except Exception as error:
                end_vllm(None, ends_group=not had_group)
                raise EngineError(
                    f"vLLM {installed()} could not be set up with the model in {directory}: "
                    f"{type(error).__name__}: {error}. If memory ran out, lower engine_mem_util or max_model_len."
                ) from error
    except BaseException:
        folder.cleanup()
        raise

    def release(llm: Llm) -> None:
        end_vllm(llm, ends_group=not had_group)
        folder.cleanup()

    return VllmEngine(
        state=VllmState(llm, incomplete=isinstance(source, Module)),
        make_params=make_params,
        model=Model(model.vocab_size, model.max_position_embeddings, ends_of(model, tokenizer)),
        max_model_len=limit,
        tokenizer=tokenizer,
        processor=processor,
        knows_tokenizer=knows_tokenizer,
        expected=expected_weights(directory),
        first_names=first_names(directory),
        dtype=dtype_of(dtype, config),
        device=device,
        bucket_bytes=bucket_bytes,
        seed=derived_seed(seed, 5, world.rank // tensor_parallel),
        release=release,
        capabilities=Capabilities(
            sleep=can_sleep and sleeps,
            multimodal=hasattr(config, "vision_config"),
            tensor_parallel=tensor_parallel > 1,
        ),
    )


# ---------------------------------------------------------------------------------------------------- what vLLM offers


def parts_of_vllm() -> tuple[MakeLlm, MakeParams, bool]:
    """``LLM``, ``SamplingParams`` and whether this platform can sleep; by looking, since vLLM moves its parts about."""
    make_llm = cast("MakeLlm", part("LLM", "vllm", "vllm.entrypoints.llm"))
    make_params = cast("MakeParams", part("SamplingParams", "vllm", "vllm.sampling_params"))
    for name in ("initialize_layerwise_reload", "finalize_layerwise_reload"):
        part(name, "vllm.model_executor.model_loader.reload")
    platform = part("current_platform", "vllm.platforms")
    sleeps = cast("Callable[[], bool]", getattr(platform, "is_sleep_mode_available", lambda: False))()
    return make_llm, make_params, sleeps


def part(name: str, *modules: str) -> object:
    """The first ``modules`` that has ``name``. Raises ``MissingDependency`` without vLLM, ``EngineError`` for one that is
    broken or too old."""
    if find_spec("vllm") is None:
        raise missing("vllm", "vllm", "engine 'vllm'")
    for module in modules:
        try:
            found = getattr(import_module(module), name, None)
        except ModuleNotFoundError as error:
            if error.name is None or not module.startswith(error.name):
                raise broken(module, error) from error
            continue
        except (ImportError, RuntimeError, OSError) as error:
            raise broken(module, error) from error
        if found is not None:
            return found
    raise EngineError(
        f"vLLM {installed()} has no {name} where it is looked for ({', '.join(modules)}). "
        f"Install vLLM {OLDEST} or later, or use engine_type='hf'."
    )


def broken(module: str, error: Exception) -> EngineError:
    """The error for a vLLM that is there and cannot be imported."""
    return EngineError(
        f"vLLM {installed()} is installed and importing {module} failed: {type(error).__name__}: {error}. "
        f"Supported is vLLM {OLDEST} or later, with the torch that it was built for; on the CPU, uninstall torchvision, "
        f"torchaudio and torchcodec if they were built for another torch."
    )


def installed() -> str:
    """The version of vLLM."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return "of unknown version"


@contextmanager
def environment(world: World) -> Iterator[None]:
    """The variables that vLLM reads while it is set up; afterwards they are what they were."""
    before = dict(os.environ)
    mine = {**ENVIRONMENT, "RANK": str(world.rank), "LOCAL_RANK": str(world.local_rank)}
    # In this process, so that weights are handed over and not copied.
    os.environ.update({**{k: v for k, v in mine.items() if k not in before}, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    try:
        yield
    finally:
        for name in {*os.environ} - {*before}:
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def own_set_num_threads() -> Iterator[None]:
    """On the CPU vLLM puts a function that does nothing in the place of ``torch.set_num_threads``, for the whole process."""
    own = torch.set_num_threads
    try:
        yield
    finally:
        setattr(torch, "set_num_threads", own)  # noqa: B010  # an assignment is what the checkers refuse


def end_vllm(llm: Llm | None, *, ends_group: bool) -> None:
    """Stops vLLM's parts; the process group too, if it was vLLM that made it."""
    core = getattr(getattr(llm, "llm_engine", None), "engine_core", None)
    if core is not None:
        core.shutdown()
    del llm, core
    gc.collect()
    if ends_group and distributed.is_initialized():
        from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

        destroy_model_parallel()
        destroy_distributed_environment()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def remove_dead_segments(ranks: range, directory: Path = Path("/dev/shm")) -> None:
    """Removes what a run that was killed left where the ranks of an engine on the CPU meet.

    vLLM names that shared memory by the ranks alone, and refuses to start where it is there already ("errno: 17"). What a
    living process has mapped stays.
    """
    found = list(directory.glob(f"*-[[]{'-'.join(map(str, ranks))}]-cpushm_*"))
    if not found:
        return
    mapped = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # it ended, or is another user's
            mapped += maps.read_text(errors="replace")
    for path in found:
        if str(path) not in mapped:
            path.unlink(missing_ok=True)
            logger.warning("removed %s, which a run of vLLM that was killed has left", path)


# -------------------------------------------------------------------------------------------------------- the settings


def check_world(tensor_parallel: int, world: World) -> None:
    """Refuses what cannot be dealt out to the ranks."""
    if world.world_size % tensor_parallel:
        raise EngineError(
            f"engine_tp_size={tensor_parallel} does not divide the {world.world_size} ranks of this run. "
            f"Use a divisor of {world.world_size}."
        )
    if world.world_size > 1 and not distributed.is_initialized():
        raise EngineError("engine 'vllm' on several ranks needs torch's process group. Call setup_distributed() first.")


def place_tokenizer(tokenizer: object, directory: Path, folder: Path) -> tuple[bool, str | None]:
    """Whether vLLM has our tokenizer (or processor), and the directory from which it loads one, if any."""
    save = getattr(tokenizer, "save_pretrained", None)
    if callable(save):
        save(str(folder))
        return True, str(folder)
    own = any((directory / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"))
    return False, str(directory) if own else None


def ends_of(model: Model, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The tokens that end a completion: those of the model, then those of the tokenizer."""
    own = getattr(tokenizer, "eos_token_id", None)
    more = () if own is None else (own,) if isinstance(own, int) else tuple(own)
    return tuple(dict.fromkeys((*model.eos_token_ids, *more)))


def config_of(directory: Path) -> PreTrainedConfig:
    """The Hugging Face config."""
    from transformers import AutoConfig

    config: PreTrainedConfig = AutoConfig.from_pretrained(directory)
    return config


def dtype_of(dtype: torch.dtype | None, config: PreTrainedConfig) -> torch.dtype:
    """What vLLM's "auto" is: fp32 weights are computed with in bf16."""
    if dtype is not None:
        return dtype
    own = getattr(config, "dtype", None)
    return own if isinstance(own, torch.dtype) and own != torch.float32 else torch.bfloat16


def cache_bytes(config: PreTrainedConfig, limit: int | None) -> int:
    """Room for 32 sequences of the greatest length in fp32, at most :data:`CPU_CACHE_BYTES`; for one in any case."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    one: int = 8 * text.num_hidden_layers * heads * size * ((limit or 4096) + 256)
    return max(2 * one, min(32 * one, CPU_CACHE_BYTES))
