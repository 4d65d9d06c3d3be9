"""What tests/conformance/test_pool.py lets its ranks do."""

from __future__ import annotations

import os
import signal
import sys
import threading

import torch
import torch.distributed as dist

from lightrft import StrategyConfig
from lightrft.backends import local


class Unpicklable(Exception):
    """Comes back from pickle as a TypeError."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def sum_over_ranks(number: float) -> float:
    total = torch.tensor(number * (dist.get_rank() + 1))
    dist.all_reduce(total)
    return float(total)


def places() -> dict[str, str | None]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LIGHTRFT_POOL_TEST", "MASTER_PORT")
    return {name: os.environ.get(name) for name in names}


def rank_and_threads() -> tuple[int, int]:
    return dist.get_rank(), torch.get_num_threads()


def doubled(value: torch.Tensor) -> torch.Tensor:
    return value * 2


def nothing() -> None: ...


def raise_from(number: int, ranks: list[int]) -> int:
    if dist.get_rank() in ranks:
        raise ValueError(f"{number} is too much for rank {dist.get_rank()}")
    return number


def raise_above_nine(number: int) -> int:
    return raise_from(number, [1]) if number > 9 else number


def raise_two_types() -> None:
    if dist.get_rank() == 0:
        raise KeyError("zero")
    raise ValueError("one")


def raise_unpicklable() -> None:
    raise Unpicklable(1, 2)


def leave() -> None:
    sys.exit(3)


def raise_before_the_collective() -> None:
    if dist.get_rank() == 0:
        raise ValueError("the others wait in vain")
    dist.barrier()


def raise_out_of_step() -> None:
    """Both ranks answer, but one has begun a collective that the other has not."""
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1000), async_op=True)
    raise ValueError("out of step")


def hang_on_rank_1() -> int:
    if dist.get_rank() == 1:
        threading.Event().wait()
    return 17


def end_rank_1(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def destroy_the_group() -> None:
    dist.barrier()
    dist.destroy_process_group()


def return_a_lambda() -> object:
    return lambda: None


def build_local() -> str:
    return local.build(StrategyConfig.from_args({"bf16": False})).name
