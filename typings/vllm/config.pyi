from contextlib import AbstractContextManager

class ModelConfig: ...

class VllmConfig:
    model_config: ModelConfig

def set_current_vllm_config(vllm_config: VllmConfig) -> AbstractContextManager[None]: ...
