# What lightrft calls of DeepSpeed, which is not py.typed and takes both checkers half a minute to follow.
from collections.abc import Mapping
from datetime import timedelta
from typing import type_check_only

from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from deepspeed import ops as ops
from deepspeed import utils as utils
from deepspeed.runtime import zero as zero

@type_check_only
class ZeroOptimizer:
    """The wrapper of ZeRO stages 1 to 3 around the caller's optimizer: several classes of DeepSpeed's."""

    overflow: bool
    micro_step_id: int
    cpu_offload: bool
    offload_optimizer: bool
    accumulated_grads_in_cpu: dict[int, Tensor]
    averaged_gradients: dict[int, object]
    all_grad_tensors: dict[int, object]
    grad_partitions_flat_buffer: Tensor
    def _release_preflattened_grad_buffers(self) -> None: ...
    fp32_partitioned_groups_flat: list[Parameter]
    single_partition_of_fp32_groups: list[Parameter]
    _hp_optimizer_states_linked: bool
    def _lazy_init_hp_params_optimizer_state(self) -> None: ...
    def override_loss_scale(self, loss_scale: float) -> None: ...
    def zero_grad(self, set_to_none: bool = True) -> None: ...
    def reset_cpu_buffers(self) -> None: ...

class DeepSpeedEngine(Module):
    module: Module
    optimizer: Optimizer | ZeroOptimizer | None
    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor: ...
    def step(self, lr_kwargs: object = None) -> None: ...
    def zero_grad(self) -> None: ...  # type: ignore[override]  # DeepSpeed's own
    def allreduce_gradients(self) -> None: ...
    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None: ...
    def get_global_grad_norm(self) -> float | Tensor | None: ...
    def zero_optimization_stage(self) -> int: ...
    def destroy(self) -> None: ...

def initialize(
    args: object = None,
    model: Module | None = None,
    optimizer: Optimizer | None = None,
    model_parameters: object = None,
    training_data: object = None,
    lr_scheduler: object = None,
    distributed_port: int = 29500,
    mpu: object = None,
    dist_init_required: bool | None = None,
    collate_fn: object = None,
    config: Mapping[str, object] | None = None,
    mesh_param: object = None,
    config_params: Mapping[str, object] | None = None,
) -> tuple[DeepSpeedEngine, object, object, object]: ...
def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta = ...,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: object = None,
    rank: int = -1,
    world_size: int = -1,
) -> None: ...
