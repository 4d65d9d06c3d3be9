# What lightrft calls of DeepSpeed, which is not py.typed and takes both checkers half a minute to follow.
from collections.abc import Mapping
from datetime import timedelta

from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from deepspeed import ops as ops
from deepspeed import utils as utils
from deepspeed import zero as zero

class ZeroOptimizer:
    """The wrapper of ZeRO stages 1 to 3 around the caller's optimizer."""

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
    def step(self) -> None: ...
    def allreduce_gradients(self) -> None: ...
    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None: ...
    def get_global_grad_norm(self) -> float | Tensor | None: ...
    def zero_optimization_stage(self) -> int: ...
    def destroy(self) -> None: ...

def initialize(
    *,
    model: Module,
    optimizer: Optimizer | None = None,
    config: Mapping[str, object],
    dist_init_required: bool | None = None,
) -> tuple[DeepSpeedEngine, object, object, object]: ...
def init_distributed(
    dist_backend: str, auto_mpi_discovery: bool = True, verbose: bool = True, timeout: timedelta = ...
) -> None: ...
