"""Build functions that are wrong in the ways that happen, for ``check_backend``."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from argparse import Namespace
from typing import Any, cast

import torch.distributed as dist
from attrs import evolve, fields

from lightrft.backends import fsdp, local
from lightrft.strategy.config import StrategyConfig
from lightrft.strategy.protocol import Strategy
from lightrft.strategy.record import StrategyRecord


def a_dict(config: StrategyConfig, args: object = None) -> Strategy:
    return cast("Strategy", {"name": "dict"})


def mistyped(config: StrategyConfig, args: object = None) -> Strategy:
    record = local.build(config, args)
    members: dict[str, Any] = {field.name: getattr(record, field.name) for field in fields(StrategyRecord)}
    facts = ("seed", "max_norm", "micro_train_batch_size", "train_batch_size", "accumulated_gradient")
    members |= {name: getattr(record, name) for name in facts}
    del members["moving_average"]
    members["world_size"] = "1"
    members["get_rank"] = lambda group: 0
    return cast("Strategy", Namespace(**members))


def raises_on_rank_1(config: StrategyConfig, args: object = None) -> Strategy:
    if dist.get_rank() == 1:
        raise OSError("no such device")
    return fsdp.build(config, args)


def hangs_on_rank_1(config: StrategyConfig, args: object = None) -> Strategy:
    if dist.get_rank() == 1:
        time.sleep(60)
    return fsdp.build(config, args)


def exits(config: StrategyConfig, args: object = None) -> Strategy:
    os._exit(3)


def behaves_badly(config: StrategyConfig, args: object = None) -> Strategy:
    sys.stdout.write("loading the backend\n")
    os.environ["BACKEND_WAS_HERE"] = "1"
    cast("dict[str, list[str]]", vars(args))["prompts"].append("b") if args else None
    subprocess.Popen(["sleep", "5"])
    return local.build(config, args)


def sums_for_a_mean(config: StrategyConfig, args: object = None) -> Strategy:
    record = fsdp.build(config, args)

    def all_reduce(data: object, op: str = "mean") -> object:
        return cast("Any", record.all_reduce)(data, "sum" if op == "mean" else op)

    return evolve(record, all_reduce=cast("Any", all_reduce))


def hangs_in_a_law(config: StrategyConfig, args: object = None) -> Strategy:
    def broadcast(data: object, src: int = 0) -> object:
        time.sleep(60)
        return data

    return evolve(fsdp.build(config, args), broadcast=cast("Any", broadcast))
