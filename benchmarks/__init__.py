"""Each figure pairs lightrft with what it is compared with, in one run. ``python -m benchmarks`` writes RESULTS.md."""
