"""Parallel training in FP8, over several processes."""
