"""The global norm of a model's gradients, and clipping by it (T3).

A gradient is whole in this process, or it is a ``DTensor``, of which this process holds a shard; a model may have both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Module
from torch.nn.utils import get_total_norm


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of it: all, or a shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharding_dimensions(tensor: Tensor) -> tuple[tuple[DeviceMesh, int], ...]:
    """The dimensions of the device mesh along which it is cut, with their mesh; none for a whole one."""
    if not isinstance(tensor, DTensor):
        return ()
    return tuple(
        (tensor.device_mesh, dimension) for dimension, place in enumerate(tensor.placements) if isinstance(place, Shard)
    )


def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm over all gradients together, shards of other ranks included: a scalar, the same on every rank."""
    cut: dict[tuple[tuple[DeviceMesh, int], ...], list[Tensor]] = {}
    for gradient in gradients:
        cut.setdefault(sharding_dimensions(gradient), []).append(local_part(gradient))
    norms = []
    for dimensions, parts in cut.items():
        norm = get_total_norm(parts)
        if dimensions:
            square = norm.double().square()  # squared in single precision, a norm of 1e20 would overflow
            for mesh, dimension in dimensions:
                dist.all_reduce(square, group=mesh.get_group(dimension))
            norm = square.sqrt().to(norm.dtype)
        norms.append(norm)
    return norms[0] if len(norms) == 1 else get_total_norm(norms)


def clip_gradients(model: Module, max_norm: float, rescale: float = 1.0) -> float:
    """Scales all gradients of ``model`` by ``rescale``, then to a norm of at most ``max_norm`` (0: no limit).

    Returns the global 2-norm between the two. A norm that is not finite leaves the gradients as they are. Equal to
    ``torch.nn.utils.clip_grad_norm_`` (Pascanu et al., arXiv:1211.5063, section 3.2) over all parameters together.
    """
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    parts = [local_part(gradient) for gradient in gradients]
    if rescale != 1.0:
        torch._foreach_mul_(parts, rescale)  # pyright: ignore[reportPrivateImportUsage]
    norm = global_norm(gradients)
    value = float(norm)
    # torch divides by norm + 1e-6; a norm under the limit needs no pass, and one that is not finite no update.
    if 0 < max_norm < value + 1e-6 < float("inf"):
        scale = (max_norm / (norm + 1e-6)).to(parts[0].device)
        torch._foreach_mul_(parts, scale)  # pyright: ignore[reportPrivateImportUsage]
    return value
