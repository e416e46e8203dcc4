"""The peak table: one literal a GPU. To add one, add a literal; a test recomputes its figures."""

from __future__ import annotations

from typing import Any

from harness.machine.hardware.amd import AMD
from harness.machine.hardware.blackwell import BLACKWELL_GPUS
from harness.machine.hardware.device import Device, Other, Reached
from harness.machine.hardware.export import EXPORT_GPUS
from harness.machine.hardware.silicon import ADA, AMPERE, GEFORCE, HOPPER, NVLINK3, NVLINK4, PCIE4, PCIE5
from harness.machine.hardware.sources import MAMF, TITAN, TORCHAO

_NVIDIA = "https://www.nvidia.com/en-us/data-center/"
_A100 = f"NVIDIA A100 data sheet, {_NVIDIA}a100/"
_H100 = f"NVIDIA H100 page, {_NVIDIA}h100/"
_H200 = f"NVIDIA H200 page, {_NVIDIA}h200/"
_GH200 = f"NVIDIA GH200 data sheet, {_NVIDIA}grace-hopper-superchip/"
_ADA_PAPER = "NVIDIA Ada GPU architecture white paper, appendix A, through pages that quote it"


def _a100(key: str, names: tuple[str, ...], memory_gib: float, power_w: float, bandwidth: float) -> Device:
    link = PCIE4 if "PCIe" in key else NVLINK3
    shared: dict[str, Any] = {"capability": "8.0", "max_clock_mhz": 1410, "link_gb_s": link}
    return Device(
        key, names, memory_gib, power_w, 108, 1410, AMPERE, {"bf16": 312.0}, bandwidth, _A100, **shared
    )


def _gh200(key: str, name: str, memory_gib: float, bandwidth: float, others: tuple[Other, ...]) -> Device:
    return Device(
        key=key,
        names=(name,),
        memory_gib=memory_gib,
        max_power_w=1000,
        sm_count=132,
        clock_mhz=1830,
        flop_per_clock_sm=HOPPER,
        tflops={"bf16": 989.0, "fp8": 1979.0},
        bandwidth_tb_s=bandwidth,
        source=_GH200,
        capability="9.0",
        max_clock_mhz=1980,
        clock_implied=True,
        link_gb_s=NVLINK4,
        others=others,
        reached=(
            Reached("bf16", 828.6, MAMF, power_w=900),
            Reached("fp8", 1535.0, MAMF, (1024, 14336, 14336), power_w=900),
        ),
        remark="one limit is shared by GPU and CPU: 450 to 1000 W",
    )


DEVICES: tuple[Device, ...] = (
    _a100("A100 SXM 80GB", ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"), 79.2, 400, 2.039),
    _a100("A100 SXM 40GB", ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"), 39.4, 400, 1.555),
    _a100("A100 PCIe 40GB", ("NVIDIA A100-PCIE-40GB", "A100-PCIE-40GB"), 39.4, 250, 1.555),
    _a100("A100 PCIe 80GB", ("NVIDIA A100 80GB PCIe",), 79.2, 300, 1.935),
    Device(
        key="L4",
        names=("NVIDIA L4",),
        memory_gib=22.0,
        max_power_w=72,
        sm_count=58,
        clock_mhz=2040,
        flop_per_clock_sm=ADA,
        tflops={"bf16": 121.0, "fp8": 242.0},
        bandwidth_tb_s=0.3,
        source=f"NVIDIA L4 data sheet, {_NVIDIA}l4/, halved",
        capability="8.9",
        max_clock_mhz=2040,
        link_gb_s=PCIE4,
        others=(
            Other("bf16", 242.0, "the data sheet's large type", "with sparsity", valid=False),
            Other("fp8", 485.0, "the data sheet's large type", "with sparsity", valid=False),
        ),
        remark="72 W hold it far below its peak under load",
    ),
    Device(
        key="L40S",
        names=("NVIDIA L40S",),
        memory_gib=45.0,
        max_power_w=350,
        sm_count=142,
        clock_mhz=2490,
        flop_per_clock_sm=ADA,
        tflops={"bf16": 362.05, "fp8": 733.0},
        bandwidth_tb_s=0.864,
        source=f"NVIDIA L40S data sheet, {_NVIDIA}l40s/, halved",
        capability="8.9",
        max_clock_mhz=2520,
        clock_implied=True,
        link_gb_s=PCIE4,
        others=(
            Other(
                "fp8",
                724.1,
                "arithmetic at the clock of its bf16 figure",
                "the data sheet disagrees with itself",
            ),
            Other("fp8", 1466.0, "the data sheet's large type", "with sparsity", valid=False),
        ),
        remark="the data sheet's fp8 is 1.2 % above twice its bf16; 2520 MHz gives 366.4 and 732.9",
    ),
    Device(
        key="RTX 6000 Ada",
        names=("NVIDIA RTX 6000 Ada Generation",),
        memory_gib=47.4,
        max_power_w=300,
        sm_count=142,
        clock_mhz=2505,
        flop_per_clock_sm=ADA,
        tflops={"bf16": 364.2, "fp8": 728.5},
        bandwidth_tb_s=0.96,
        source="NVIDIA RTX 6000 Ada data sheet, https://www.nvidia.com/en-us/design-visualization/rtx-6000/, halved",
        capability="8.9",
        max_clock_mhz=3105,
        link_gb_s=PCIE4,
        others=(Other("fp8", 1457.0, "the data sheet's large type", "with sparsity", valid=False),),
    ),
    Device(
        key="RTX 4070",
        names=("NVIDIA GeForce RTX 4070",),
        memory_gib=11.7,
        max_power_w=250,
        sm_count=46,
        clock_mhz=2475,
        flop_per_clock_sm=GEFORCE,
        tflops={"bf16": 58.3, "fp8": 116.6, "fp8_fp16acc": 233.2},
        bandwidth_tb_s=0.504,
        source="https://www.nvidia.com/en-us/geforce/graphics-cards/40-series/rtx-4070-family/, a quarter of its 466",
        capability="8.9",
        max_clock_mhz=3105,
        link_gb_s=PCIE4,
        others=(
            Other("fp8", 466.0, "the vendor's page", "FP8 with sparsity, accumulated in fp16", valid=False),
        ),
        remark="nobody prints its bf16 rate: it is arithmetic only",
    ),
    Device(
        key="RTX 4080",
        names=("NVIDIA GeForce RTX 4080",),
        memory_gib=15.7,
        max_power_w=320,
        sm_count=76,
        clock_mhz=2505,
        flop_per_clock_sm=GEFORCE,
        tflops={"bf16": 97.5, "fp8": 194.9, "fp8_fp16acc": 389.9},
        bandwidth_tb_s=0.717,
        source="https://www.holynerdvana.com/2022/10/nvidia-geforce-rtx-4080-specifications.html, a quarter of its 780",
        capability="8.9",
        max_clock_mhz=3105,
        link_gb_s=PCIE4,
        date="2026-11",
        others=(Other("fp8", 780.0, "the same page", "FP8 with sparsity, accumulated in fp16", valid=False),),
        remark="its bf16 rate is arithmetic only; cards that their makers let draw more than 320 W are not known",
    ),
    Device(
        key="RTX 4090",
        names=("NVIDIA GeForce RTX 4090",),
        memory_gib=23.6,
        max_power_w=600,
        sm_count=128,
        clock_mhz=2520,
        flop_per_clock_sm=GEFORCE,
        tflops={"bf16": 165.2, "fp8": 330.3, "fp8_fp16acc": 660.6},
        bandwidth_tb_s=1.008,
        source=_ADA_PAPER,
        capability="8.9",
        max_clock_mhz=3105,
        link_gb_s=PCIE4,
        others=(
            Other(
                "fp8",
                660.6,
                "pages that quote the white paper",
                "accumulated in fp16; some call it sparse",
                valid=False,
            ),
            Other(
                "fp8",
                1321.2,
                "the white paper's large type",
                "with sparsity, accumulated in fp16",
                valid=False,
            ),
        ),
        remark="cards boost well above 2520 MHz; limits go up to 600 W",
    ),
    Device(
        key="H100 SXM",
        names=("NVIDIA H100 80GB HBM3",),
        memory_gib=79.2,
        max_power_w=700,
        sm_count=132,
        clock_mhz=1830,
        flop_per_clock_sm=HOPPER,
        tflops={"bf16": 989.4, "fp8": 1978.9},
        bandwidth_tb_s=3.35,
        source=_H100,
        capability="9.0",
        max_clock_mhz=1980,
        clock_implied=True,
        link_gb_s=NVLINK4,
        others=(
            Other(
                "bandwidth_tb_s", 2.4, TORCHAO, "a customer's own variant with HBM2e and 500 W", valid=False
            ),
        ),
        reached=(
            Reached("bf16", 794.5, MAMF, (2048, 13312, 2048)),
            Reached("fp8", 1402.6, MAMF, (1024, 14336, 9216)),
        ),
    ),
    Device(
        key="H100 PCIe",
        names=("NVIDIA H100 PCIe",),
        memory_gib=79.2,
        max_power_w=350,
        sm_count=114,
        clock_mhz=1620,
        flop_per_clock_sm=HOPPER,
        tflops={"bf16": 756.0, "fp8": 1513.0},
        bandwidth_tb_s=2.0,
        source=_H100,
        capability="9.0",
        max_clock_mhz=1755,
        clock_implied=True,
        link_gb_s=PCIE5,
    ),
    Device(
        key="H100 NVL",
        names=("NVIDIA H100 NVL",),
        memory_gib=93.6,
        max_power_w=400,
        sm_count=132,
        clock_mhz=1545,
        flop_per_clock_sm=HOPPER,
        tflops={"bf16": 835.0, "fp8": 1671.0},
        bandwidth_tb_s=3.9,
        source=_H100,
        capability="9.0",
        max_clock_mhz=1785,
        clock_implied=True,
        link_gb_s=NVLINK3,
        others=(
            Other("bf16", 1979.0, "Lightning forks", "with sparsity", valid=False),
            Other("bf16", 1671.0, "an early data sheet", "two boards, or one with sparsity", valid=False),
        ),
        remark="one GPU; figures for the pair, and sparse ones, are in circulation under the same name",
    ),
    Device(
        key="H200 SXM",
        names=("NVIDIA H200",),
        memory_gib=139.8,
        max_power_w=700,
        sm_count=132,
        clock_mhz=1830,
        flop_per_clock_sm=HOPPER,
        tflops={"bf16": 989.0, "fp8": 1979.0},
        bandwidth_tb_s=4.8,
        source=_H200,
        capability="9.0",
        max_clock_mhz=1980,
        clock_implied=True,
        link_gb_s=NVLINK4,
        reached=(
            Reached("bf16", 794.5, MAMF, (2048, 13312, 2048), of="H100 SXM"),
            Reached("fp8", 1453.4, MAMF, (1280, 12032, 4096)),
        ),
    ),
    Device(
        key="H200 NVL",
        names=("NVIDIA H200 NVL",),
        memory_gib=139.8,
        max_power_w=600,
        sm_count=132,
        clock_mhz=1545,
        flop_per_clock_sm=HOPPER,
        tflops={"bf16": 835.5, "fp8": 1670.5},
        bandwidth_tb_s=4.8,
        source=_H200 + " (1,671 and 3,341 with sparsity)",
        capability="9.0",
        max_clock_mhz=1785,
        clock_implied=True,
        link_gb_s=NVLINK4,
        others=(
            Other(
                "bf16",
                989.0,
                f"{TITAN} and others",
                "taken for an H200 SXM by part of its name",
                valid=False,
            ),
        ),
        reached=(
            Reached(
                "bf16", 601.0, "TransformerEngine, docs/examples/gemm_profiling, M = 15872, mean of a layer"
            ),
            Reached(
                "fp8", 1146.0, "TransformerEngine, docs/examples/gemm_profiling, M = 15872, mean of a layer"
            ),
        ),
    ),
    _gh200(
        "GH200 144GB",
        "NVIDIA GH200 144G HBM3e",
        142.5,
        4.9,
        (Other("bandwidth_tb_s", 4.8, "ml-engineering", "HBM3e at the speed of the H200's"),),
    ),
    _gh200("GH200 96GB", "NVIDIA GH200 480GB", 94.5, 4.0, ()),
    *EXPORT_GPUS,
    *BLACKWELL_GPUS,
    *AMD,
)
