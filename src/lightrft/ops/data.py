"""Batches: every sample once per epoch, in an order that depends on the seed and the epoch alone, resumable."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import cast
from weakref import ref

import torch
from attrs import define
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from lightrft.errors import ConfigError
from lightrft.ops.seeds import derived_seed
from lightrft.strategy.protocol import Dataset, T
from lightrft.strategy.record import RunState

logger = logging.getLogger(__name__)


@define(eq=False)
class EpochSampler:
    """The indices of one rank, epoch after epoch.

    The order over all ranks is one permutation of the seed and the epoch; rank r takes its share of each global batch,
    so that the samples of a global batch are the same whatever the world size. ``consumed`` samples of the first epoch,
    over all ranks, are skipped.

    Checkpoints hold how far it is (:meth:`position`), and put it there again (:meth:`move_to`).
    """

    length: int
    batch_size: int
    """Of one rank."""
    rank: int
    world_size: int
    shuffle: bool
    drop_last: bool
    seed: int
    epoch: int = 0
    consumed: int = 0
    reached: tuple[int, int] | None = None
    """Where the running pass is: an epoch, and the samples of it that were handed out, over all ranks."""

    @property
    def position(self) -> tuple[int, int]:
        """The epoch, and how many of its samples were handed out: where a run that goes on begins."""
        return (self.epoch, self.consumed) if self.reached is None else self.reached

    def move_to(self, epoch: int, consumed: int) -> None:
        """The next pass begins there."""
        self.epoch, self.consumed, self.reached = epoch, consumed, None

    def global_order(self) -> list[int]:
        """All indices of this epoch that are still to come, in the order of the whole run."""
        if not self.shuffle:
            return list(range(self.length))[self.consumed :]
        generator = torch.Generator().manual_seed(derived_seed(self.seed, 2, self.epoch))
        return cast("list[int]", torch.randperm(self.length, generator=generator).tolist())[self.consumed :]

    def __iter__(self) -> Iterator[int]:
        order = self.global_order()
        step = self.batch_size * self.world_size
        usable = len(order) - len(order) % step if self.drop_last else len(order)
        epoch, before = self.epoch, self.consumed
        self.epoch, self.consumed, self.reached = epoch + 1, 0, None
        for start in range(0, usable, step):
            end = min(start + step, usable)
            share = order[start:end]
            # A loader takes a batch whole: once its first sample is asked for, all of it is.
            self.reached = (epoch, before + end) if end < usable else None
            yield from share[self.rank * self.batch_size : (self.rank + 1) * self.batch_size]

    def __len__(self) -> int:
        left, step = self.length - self.consumed, self.batch_size * self.world_size
        if self.drop_last:
            return left // step * self.batch_size
        rest = left % step - self.rank * self.batch_size
        return left // step * self.batch_size + max(0, min(self.batch_size, rest))


def setup_dataloader(
    state: RunState,
    replay_buffer: Dataset[T],
    batch_size: int,
    pin_memory: bool = False,
    shuffle: bool = True,
    collate_fn: Callable[[list[T]], object] | None = None,
    drop_last: bool = True,
    sampler: Iterable[int] | None = None,
    consumed_samples: int = 0,
) -> DataLoader[T]:
    """A torch DataLoader with a sampler of ours, unless the caller brings one."""
    length = len(cast(Sized, replay_buffer))
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size}: a batch has at least 1 sample.")
    if sampler is None:
        if length and not consumed_samples >= 0:
            raise ConfigError(f"consumed_samples={consumed_samples}: pass 0 or more.")
        epoch, consumed = divmod(consumed_samples, length) if length else (0, 0)
        sampler = EpochSampler(
            length, batch_size, state.world.rank, state.world.world_size, shuffle, drop_last, state.config.seed,
            epoch, consumed,
        )  # fmt: skip
        state.samplers.append(ref(sampler))
    elif consumed_samples:
        raise ConfigError(
            "consumed_samples goes with the strategy's own sampler. Let yours skip, or pass sampler=None."
        )
    return DataLoader(
        cast("TorchDataset[T]", replay_buffer),
        batch_size=batch_size,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=drop_last,
        pin_memory=pin_memory,
    )


def sampler_positions(state: RunState) -> dict[str, int]:
    """How far each loader is that is still in use, in the order in which they were made."""
    found: dict[str, int] = {}
    for index, sampler in enumerate(samplers_in_use(state)):
        epoch, consumed = sampler.position
        found |= {f"sampler{index}.length": sampler.length, f"sampler{index}.epoch": epoch}
        found |= {f"sampler{index}.consumed": consumed}
    return found


def restore_sampler_positions(state: RunState, counters: Mapping[str, int]) -> None:
    """Puts the loaders in use where those of the checkpoint were; one of another length stays where it is."""
    for index, sampler in enumerate(samplers_in_use(state)):
        length = counters.get(f"sampler{index}.length")
        if length == sampler.length:
            sampler.move_to(counters[f"sampler{index}.epoch"], counters[f"sampler{index}.consumed"])
        elif length is not None:
            logger.warning(
                "data loader %d is of %d samples and the checkpoint's of %d: it begins at its first sample",
                index, sampler.length, length,
            )  # fmt: skip


def samplers_in_use(state: RunState) -> list[EpochSampler]:
    """Those of our samplers that a loader still holds."""
    found = [(held, held()) for held in state.samplers]
    state.samplers[:] = [held for held, sampler in found if sampler is not None]
    return [sampler for _, sampler in found if sampler is not None]
