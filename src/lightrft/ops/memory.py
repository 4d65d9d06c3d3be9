"""What lies where: moving models, and how much memory is in use."""

from __future__ import annotations

import logging
import resource
from pathlib import Path

import torch

from lightrft.ops.models import unwrap_model
from lightrft.strategy.protocol import MemoryReport, ModelT
from lightrft.strategy.record import RunState

logger = logging.getLogger(__name__)


def offload_model(state: RunState, model: ModelT) -> ModelT:
    """To the CPU; remembered, so that a backward in between is an error and not a surprise."""
    state.offloaded.add(unwrap_model(model))
    model.to("cpu")
    return model


def reload_model(state: RunState, model: ModelT) -> ModelT:
    """Back to the strategy's device."""
    state.offloaded.discard(unwrap_model(model))
    model.to(state.device)
    return model


def resident_bytes() -> int:
    """This process's resident memory now; its peak where the system tells no more."""
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def report_memory(state: RunState, prefix: str = "") -> MemoryReport:
    """Measures, and logs on rank 0."""
    on_cuda = state.device.type == "cuda"
    report = MemoryReport(
        resident=resident_bytes(),
        device_allocated=torch.cuda.memory_allocated(state.device) if on_cuda else None,
        device_peak=torch.cuda.max_memory_allocated(state.device) if on_cuda else None,
    )
    if state.world.rank == 0:
        device = f", device {report.device_allocated / 1e9:.2f} GB" if report.device_allocated is not None else ""
        logger.info("%smemory: resident %.2f GB%s", f"{prefix} " if prefix else "", report.resident / 1e9, device)
    return report
