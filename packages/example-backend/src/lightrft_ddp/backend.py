"""``ddp``: torch's ``DistributedDataParallel``, over gloo on CPU and NCCL on CUDA.

Every rank holds the whole model and optimizer. DDP's hooks average the gradients of a backward pass while it goes on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from attrs import evolve, field, frozen
from lightrft.backends.parts import (
    ENGINE_FIELDS,
    IN_PARAMETERS,
    ModelT,
    Parts,
    RunState,
    StrategyConfig,
    StrategyRecord,
    bind,
    check_engine_groups,
    collecting,
    composed,
    compute_in_bf16,
    device_of_rank,
    init_whole_model_context,
    keep_master_weights,
    leave_ranks,
    naming_peers,
    place,
    refuse_ignored,
    require_set_up,
    run_state,
    set_up_ranks,
    setup_inference_engine,
    unwrap_model,
    wait_for_ranks,
    world_of_ranks,
)
from lightrft.errors import unsupported
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

NAME = "ddp"
CARRIES = frozenset({"bf16", "overlap_comm", *ENGINE_FIELDS})
"""The configuration fields, of those that a backend answers for, that this one carries out. DDP overlaps in any case."""
INSTEAD = (
    "call backward after each forward; if it did follow one, then parameters were reached twice: checkpoint activations "
    "with use_reentrant=False"
)


@frozen(eq=False)
class Reducing:
    """What goes through DDP."""

    ready: WeakSet[Module] = field(factory=WeakSet)
    """The models that had a forward and, since then, no backward: DDP averages the first backward after a forward."""

    def prepare_model(self, state: RunState, model: ModelT, optimizer: Optimizer | None) -> ModelT:
        """DDP around a model that is trained, its weights those of rank 0; one that is only evaluated stays as it is."""
        require_set_up(state, "prepare")
        if isinstance(model, DistributedDataParallel) or model in state.prepared:
            return model
        place(model, state.device)
        if state.config.bf16:
            keep_master_weights(model)
            compute_in_bf16(model, state.device)
        if not any(parameter.requires_grad for parameter in model.parameters()):  # DDP refuses those
            state.prepared.add(model)
            return model
        # Buffers are each rank's own, as on the other backends: so no forward waits for another rank's. (torch 2.13 warns of
        # the keyword, whose new name torch 2.8 does not know.)
        wrapped = DistributedDataParallel(model, find_unused_parameters=True, broadcast_buffers=False)
        wrapped.register_forward_hook(self.note_forward)
        return cast("ModelT", wrapped)

    def note_forward(self, module: Module, args: object, output: object) -> None:
        """DDP makes itself ready where a backward can follow."""
        if torch.is_grad_enabled():
            self.ready.add(unwrap_model(module))

    def add_gradient(self, state: RunState, loss: Tensor, model: Module, optimizer: Optimizer) -> None:
        """After it gradients are means over the ranks, those of earlier micro-batches with them.

        Raises ``UnsupportedOperation`` where the loss needs parameters that the latest forward did not use.
        """
        averages = unwrap_model(model) in self.ready
        self.ready.discard(unwrap_model(model))
        try:
            IN_PARAMETERS.add(state, loss, model, optimizer)
        except RuntimeError as error:
            if "mark a variable ready only once" not in str(error):
                raise
            raise unsupported(NAME, "a backward into more than the latest forward used", INSTEAD) from error
        if not averages:
            with naming_peers(state, "backward"):
                average_gradients(model.parameters(), state.world.world_size)


def average_gradients(parameters: Iterable[Parameter], world_size: int) -> None:
    """By hand, for a backward that DDP let pass. What no rank has used keeps no gradient, as with DDP."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    used = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.uint8)
    used = used.to(trained[0].device)
    dist.all_reduce(used, dist.ReduceOp.MAX)
    for parameter, somewhere in zip(trained, used.tolist(), strict=True):
        if somewhere:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = gradient.div_(world_size)
            dist.all_reduce(parameter.grad)


def build(config: StrategyConfig, args: object = None) -> StrategyRecord:
    """The ranks that the launcher started, or one without a launcher; nobody is met before ``setup_distributed``."""
    refuse_ignored(config, NAME, CARRIES)
    world = world_of_ranks(config)
    check_engine_groups(config, world)
    run = run_state(config, world, device_of_rank(world))
    reducing = Reducing()
    parts = Parts(
        setup_distributed=bind(set_up_ranks, run),
        barrier=bind(wait_for_ranks, run),
        close=bind(leave_ranks, run),
        collecting=collecting(run),
        prepare_model=reducing.prepare_model,
        gradients=evolve(IN_PARAMETERS, add=reducing.add_gradient),
        init_model_context=bind(init_whole_model_context, run),
        setup_inference_engine=bind(setup_inference_engine, run),
    )
    return composed(NAME, run, config if args is None else args, parts)
