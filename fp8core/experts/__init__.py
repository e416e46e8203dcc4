"""Experts: grouped GEMM and mixture of experts in FP8."""
