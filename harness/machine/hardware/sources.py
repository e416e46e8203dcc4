"""Sources that entries of several vendors share."""

from __future__ import annotations

MAMF = "ml-engineering, MAMF table, best of a sweep over shapes (there M x N x K)"
TITAN = "torchtitan, get_peak_flops"
TORCHAO = "torchao, roofline_utils.py"
NVIDIA = "https://www.nvidia.com/en-us/"
