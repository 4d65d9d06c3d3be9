"""lightrft on torch's ``DistributedDataParallel``: every rank holds the whole model, gradients are averaged in backward."""

from __future__ import annotations

from lightrft_ddp.backend import build

__all__ = ["build"]
