"""Triton kernels and their launchers; no policy.

`reference` holds every function in plain PyTorch, `ops` registers each as an operator `fp8core::*` that
composes with `torch.compile`, autograd and activation checkpointing and picks the kernel or the reference.
"""
