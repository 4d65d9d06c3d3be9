"""Every law of lightrft, and our own, on one rank and on two."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightrft.conformance.laws import LAWS
from lightrft.conformance.run import check_backend

from laws_of_ddp import LAWS_OF_DDP
from lightrft_ddp import build

XFAILS = Path(__file__).parents[1] / "xfails.txt"


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_law(world_size: int) -> None:
    check_backend(
        build,
        name="ddp",
        world_size=world_size,
        capabilities=("bf16", "checkpoints", "engine"),  # all that there are
        xfails=XFAILS,
        laws=(*LAWS, *LAWS_OF_DDP),
    ).raise_failures()
