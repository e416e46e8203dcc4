"""The peak table's GPUs of NVIDIA's Blackwell: one literal each, as in `harness.machine.hardware.table`."""

from __future__ import annotations

from harness.machine.hardware.device import Device, Other, Reached
from harness.machine.hardware.silicon import ADA, BLACKWELL, GEFORCE, NVLINK5, PCIE5
from harness.machine.hardware.sources import MAMF, NVIDIA, TORCHAO

_BLACKWELL_PAPER = (
    "NVIDIA RTX Blackwell GPU architecture white paper, appendix B, through pages that quote it"
)

BLACKWELL_GPUS: tuple[Device, ...] = (
    Device(
        key="RTX 5080",
        names=("NVIDIA GeForce RTX 5080",),
        memory_gib=15.5,
        max_power_w=360,
        sm_count=84,
        clock_mhz=2617,
        flop_per_clock_sm=GEFORCE,
        tflops={"bf16": 112.6, "fp8": 225.1, "fp8_fp16acc": 450.2},
        bandwidth_tb_s=0.96,
        source=f"{NVIDIA}geforce/graphics-cards/50-series/rtx-5080/, an eighth of its 1,801 (FP4, sparse); to be confirmed, the page was not read",
        capability="12.0",
        max_clock_mhz=3090,
        link_gb_s=PCIE5,
        date="2026-11",
        others=(
            Other(
                "fp8", 900.4, "half of the page's 1,801", "with sparsity, accumulated in fp16", valid=False
            ),
        ),
        remark="nobody prints its bf16 rate: it is arithmetic only; the highest clock is the RTX PRO 6000's; cards that "
        "their makers let draw more than 360 W are not known",
    ),
    Device(
        key="RTX 5090",
        names=("NVIDIA GeForce RTX 5090",),
        memory_gib=31.4,
        max_power_w=600,
        sm_count=170,
        clock_mhz=2407,
        flop_per_clock_sm=GEFORCE,
        tflops={"bf16": 209.5, "fp8": 419.0, "fp8_fp16acc": 838.0},
        bandwidth_tb_s=1.792,
        source=_BLACKWELL_PAPER,
        capability="12.0",
        max_clock_mhz=3165,
        link_gb_s=PCIE5,
        others=(
            Other("bandwidth_tb_s", 1792.0, TORCHAO, "1,000 times too high: a slip of the unit", valid=False),
        ),
    ),
    Device(
        key="RTX PRO 6000 Blackwell",
        names=("NVIDIA RTX PRO 6000 Blackwell Workstation Edition",),
        memory_gib=95.6,
        max_power_w=600,
        sm_count=188,
        clock_mhz=2617,
        flop_per_clock_sm=ADA,
        tflops={"bf16": 503.8, "fp8": 1007.6},
        bandwidth_tb_s=1.792,
        source="https://hmc-tech.com/gpu/nvidia-rtx-pro-6000-blackwell-vs-amd-radeon-pro-duo-polaris, dense column; NVIDIA: "
        "4000 TOPS of sparse FP4",
        capability="12.0",
        max_clock_mhz=3090,
        link_gb_s=PCIE5,
        date="2026-11",
        others=(Other("fp8", 2015.2, "pages about it, large type", "with sparsity", valid=False),),
        remark="the Workstation Edition; the Server Edition (2430 MHz) and Max-Q (300 W) are other parts, whose rates or "
        "bandwidths no two sources agree on",
    ),
    Device(
        key="B200",
        names=("NVIDIA B200",),
        memory_gib=178.4,
        max_power_w=1000,
        sm_count=148,
        clock_mhz=1856,
        flop_per_clock_sm=BLACKWELL,
        tflops={"bf16": 2250.0, "fp8": 4500.0},
        bandwidth_tb_s=8.0,
        source=f"NVIDIA DGX B200 data sheet, {NVIDIA}data-center/dgx-b200/ (72 PFLOP/s sparse fp8 of 8 GPUs)",
        capability="10.0",
        max_clock_mhz=1965,
        clock_implied=True,
        link_gb_s=NVLINK5,
        others=(
            Other("bandwidth_tb_s", 7.672, TORCHAO, "from the bus width of 7680 bits that CUDA 13 reports"),
            Other("bf16", 4500.0, "an early entry of torchtitan", "with sparsity", valid=False),
        ),
        reached=(Reached("bf16", 1745.0, MAMF), Reached("fp8", 3432.5, MAMF)),
    ),
    Device(
        key="GB200",
        names=("NVIDIA GB200",),
        memory_gib=184.3,
        max_power_w=1200,
        sm_count=152,
        clock_mhz=2008,
        flop_per_clock_sm=BLACKWELL,
        tflops={"bf16": 2500.0, "fp8": 5000.0},
        bandwidth_tb_s=8.0,
        source=f"NVIDIA GB200 NVL72 page, {NVIDIA}data-center/gb200-nvl72/ (360 PFLOP/s sparse bf16 of 72 GPUs)",
        capability="10.0",
        max_clock_mhz=2062,
        clock_implied=True,
        link_gb_s=NVLINK5,
        others=(
            Other("bf16", 2250.0, TORCHAO, "the figure of a B200: 148 SMs and 1000 W"),
            Other("fp8", 4500.0, TORCHAO, "the figure of a B200: 148 SMs and 1000 W"),
        ),
        reached=(Reached("fp8", 3615.6, MAMF),),
        remark="one of the two GPUs of a superchip, or of the 72 of an NVL72",
    ),
    Device(
        key="B300",
        names=("NVIDIA B300 SXM6 AC",),
        memory_gib=268.6,
        max_power_w=1100,
        sm_count=148,
        clock_mhz=1856,
        flop_per_clock_sm=BLACKWELL,
        tflops={"bf16": 2250.0, "fp8": 4500.0},
        bandwidth_tb_s=7.7,
        source="NVIDIA Blackwell Ultra data sheet, through https://verda.com/blog/gb300-nvl72-architecture; NVIDIA "
        "aiconfigurator, b300_sxm.yaml",
        capability="10.3",
        max_clock_mhz=1965,
        clock_implied=True,
        link_gb_s=NVLINK5,
        date="2026-11",
        others=(
            Other("bandwidth_tb_s", 8.0, "pages about Blackwell Ultra", "rounded, or the GB300's"),
            Other("bandwidth_tb_s", 7.75, "NVIDIA aiconfigurator, b300_sxm.yaml", "not rounded"),
        ),
        remark="the highest clock is not published: the B200's",
    ),
    Device(
        key="GB300",
        names=("NVIDIA GB300",),
        memory_gib=277.5,
        max_power_w=1400,
        sm_count=152,
        clock_mhz=2008,
        flop_per_clock_sm=BLACKWELL,
        tflops={"bf16": 2500.0, "fp8": 5000.0},
        bandwidth_tb_s=8.0,
        source="NVIDIA Blackwell Ultra data sheet, through https://verda.com/blog/gb300-nvl72-architecture",
        capability="10.3",
        max_clock_mhz=2062,
        clock_implied=True,
        link_gb_s=NVLINK5,
        date="2026-11",
        others=(
            Other(
                "fp8",
                10000.0,
                f"{NVIDIA}data-center/gb300-nvl72/, of one of 72",
                "with sparsity",
                valid=False,
            ),
        ),
        remark="one of the 72 GPUs of an NVL72; the highest clock is not published: the GB200's",
    ),
)
