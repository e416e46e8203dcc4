"""What an SM of each NVIDIA architecture multiplies in a clock, dense, and what its links carry one way in GB/s."""

from __future__ import annotations

from types import MappingProxyType

AMPERE = MappingProxyType({"bf16": 2048})
ADA = MappingProxyType({"bf16": 1024, "fp8": 2048})
# GeForce, and the L20, halve the rates that accumulate in fp32.
GEFORCE = MappingProxyType({"bf16": 512, "fp8": 1024, "fp8_fp16acc": 2048})
HOPPER = MappingProxyType({"bf16": 4096, "fp8": 8192})
BLACKWELL = MappingProxyType({"bf16": 8192, "fp8": 16384})

NVLINK3, NVLINK4, NVLINK5, PCIE4, PCIE5 = 300.0, 450.0, 900.0, 32.0, 64.0
