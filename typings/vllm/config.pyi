from contextlib import AbstractContextManager

class ModelConfig: ...

class VllmConfig:
    model_config: ModelConfig

def set_current_vllm_config(
    vllm_config: VllmConfig, check_compile: bool = False, prefix: str | None = None
) -> AbstractContextManager[None]: ...
