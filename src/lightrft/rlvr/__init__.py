"""The reference trainer: tasks, rewards, advantages and losses as plain functions, and the loop over a ``Strategy``."""
