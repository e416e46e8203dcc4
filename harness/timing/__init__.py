"""Timing: how one case is timed and compared. Warm-up, rounds, stop rule, timers, compilation, workloads."""
