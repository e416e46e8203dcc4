"""The peak table's GPUs that NVIDIA made for export rules: one literal each, as in `harness.machine.hardware.table`."""

from __future__ import annotations

from types import MappingProxyType

from harness.machine.hardware.device import Device, Other
from harness.machine.hardware.silicon import HOPPER, NVLINK4, PCIE4, PCIE5

# Their published rates are a quarter and a half of what SMs of their architecture multiply at the clock that they run at.
_QUARTER_HOPPER = MappingProxyType({"bf16": 1024, "fp8": 2048})
_HALF_ADA = MappingProxyType({"bf16": 512, "fp8": 1024})
_CONFIGURATOR = "NVIDIA aiconfigurator, src/aiconfigurator/systems/"

EXPORT_GPUS: tuple[Device, ...] = (
    Device(
        key="H20",
        names=("NVIDIA H20",),
        memory_gib=95.6,
        max_power_w=500,
        sm_count=78,
        clock_mhz=1853,
        flop_per_clock_sm=_QUARTER_HOPPER,
        tflops={"bf16": 148.0, "fp8": 296.0},
        bandwidth_tb_s=4.0,
        source="NVIDIA HGX H20 brief, through https://www.tweaktown.com/news/95224/; feifeibear/LLMRoofline, hardware_dict.py",
        capability="9.0",
        max_clock_mhz=1980,
        clock_implied=True,
        link_gb_s=NVLINK4,
        date="2026-11",
        others=(Other("fp8", 294.0, _CONFIGURATOR + "h20_sxm.yaml", "rounded otherwise"),),
        remark="the share of Hopper's rate is implied by figures and SMs; 400 W in the brief, 500 W as nvidia-smi shows; the "
        "H20-3e with 141 GB is another part",
    ),
    Device(
        key="H800 SXM",
        names=("NVIDIA H800",),
        memory_gib=79.2,
        max_power_w=700,
        sm_count=132,
        clock_mhz=1830,
        flop_per_clock_sm=HOPPER,
        tflops={"bf16": 989.0, "fp8": 1979.0},
        bandwidth_tb_s=3.35,
        source=_CONFIGURATOR + "h800_sxm.yaml",
        capability="9.0",
        max_clock_mhz=1980,
        clock_implied=True,
        link_gb_s=200.0,
        date="2026-11",
        others=(Other("fp8", 1978.0, _CONFIGURATOR + "h800_sxm.yaml", "rounded otherwise"),),
        remark="an H100 SXM with less than half of its NVLink",
    ),
    Device(
        key="H800 PCIe",
        names=("NVIDIA H800 PCIe",),
        memory_gib=79.2,
        max_power_w=350,
        sm_count=114,
        clock_mhz=1620,
        flop_per_clock_sm=HOPPER,
        tflops={"bf16": 756.0, "fp8": 1513.0},
        bandwidth_tb_s=2.0,
        source="https://lenovopress.lenovo.com/lp1814-thinksystem-nvidia-h800-pcie-gen5-gpu, halved; to be confirmed, the page was not read",
        capability="9.0",
        max_clock_mhz=1755,
        clock_implied=True,
        link_gb_s=PCIE5,
        date="2026-11",
        others=(Other("fp8", 3026.0, "the data sheet's large type", "with sparsity", valid=False),),
    ),
    Device(
        key="L20",
        names=("NVIDIA L20",),
        memory_gib=45.0,
        max_power_w=275,
        sm_count=92,
        clock_mhz=2520,
        flop_per_clock_sm=_HALF_ADA,
        tflops={"bf16": 119.5, "fp8": 239.0},
        bandwidth_tb_s=0.864,
        source="https://www.topcpu.net/en/gpu-c/a40-pcie-vs-l20 (clock, SMs, W, TB/s); citsjtu2020/LLM-Prof, hardware_spec.md",
        capability="8.9",
        max_clock_mhz=2520,
        link_gb_s=PCIE4,
        date="2026-11",
        remark="fp8 is quoted as INT8's 239; the share of Ada's rate is implied by figures and SMs",
    ),
)
