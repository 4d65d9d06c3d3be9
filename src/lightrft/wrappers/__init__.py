"""Strategy in, strategy out: what is put around the operations of any backend."""

from lightrft.wrappers.checked import RankMismatch, checked
from lightrft.wrappers.traced import TimeSpent, merge_traces, time_spent, time_table, traced

__all__ = ["RankMismatch", "TimeSpent", "checked", "merge_traces", "time_spent", "time_table", "traced"]
