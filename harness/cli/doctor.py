"""`python -m harness doctor`: what this machine can do, each capability tried by one tiny run.

A version number promises nothing: an FP8 dtype may exist without kernels, a peer may import without its
core. So every line is the outcome of running the thing, and says why where it does not run. On a GPU that fp8core's kernels
run on, each is compared with its twin in plain PyTorch, and layers have the sizes of training.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from fp8core import BACKENDS, FORMATS, RECIPES, Float8Linear, Format, four_bits, quantize, scaled_mm, verify
from fp8core.extensions import installed
from fp8core.formats import E2M1FN, native_pair
from fp8core.history import update_scales
from fp8core.kernels.ops import OPERATORS
from harness.cli import kernel_checks
from harness.machine import environment, terminal
from harness.machine.gpu_monitor import GpuMonitor
from harness.machine.hardware import of_env
from harness.peers import PEERS
from harness.store import printer
from harness.store.errors import Cause, cause_of, text_of
from harness.store.extensions import TABLES
from harness.store.printer import Table, Tone, picked
from harness.store.text import some
from harness.store.words import key, options_of
from harness.suites.common import kernels_missing
from harness.suites.extended import faults
from harness.suites.gemm import quantised
from harness.suites.oracle import FOUR_BITS_DB
from harness.timing import metrics
from harness.timing.compiling import compile_unavailable, fresh_compile
from harness.timing.timers import timer_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fp8core.extensions import Extension
    from fp8core.recipe import Granularity
    from harness.peers import Peer

# A GEMM of e5m2 codes keeps about 25 dB, a wrong scale or layout below 5: 15 tells them apart.
_SOUND_DB = 15.0
# One that is all too large by a factor passes that bound up to 17 %; rounding of codes moves the factor by 0.2 % at the most.
_OFF = 0.02
# mxfp4's rounding shrinks a product by its noise, 2.6 %; a block scale that is off by e4m3's largest step is off by 12 %.
_FOUR_BITS_OFF = 0.05
# Why a line is no "yes": nothing there, there and wrong, an error, or not tried.
Code = Literal["", "missing", "wrong", "raised", "unchecked"]
_SHOWN: dict[Code, str] = {
    "": "yes",
    "wrong": "WRONG",
    "raised": "no",
    "missing": "no",
    "unchecked": "not checked",
}
_COUNTED: dict[Code, str] = {
    "": "right",
    "wrong": "wrong",
    "raised": "in error",
    "missing": "not here",
    "unchecked": "not checked",
}


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """python -m harness doctor: what this machine can run, each tried by one tiny run, and the reasons where it cannot
    exit 0, also where much is missing; 1 something runs and computes wrongly; 2 the request could not be carried out
    """

    device: str = key("cpu or cuda", "auto")
    kernels_s: float = key(
        "seconds for fp8core's kernels on a GPU; one that is not reached is named", 30.0, span=(0, 3600)
    )
    json: bool = key("as plain values", False)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """One line of the table."""

    area: str
    name: str
    detail: str  # what was seen, or why it does not work
    code: Code = ""

    @property
    def works(self) -> bool:
        """True where it was tried and is right."""
        return not self.code

    @property
    def faulty(self) -> bool:
        """True where something that is there computes wrongly; an operator runs wherever its kernel does, or is wrong."""
        return self.code == "wrong" or (self.code == "raised" and self.area == "kernel")


@dataclass(frozen=True, slots=True)
class Tried:
    """What was tried on a device."""

    device: str
    findings: Sequence[ProbeResult]

    @property
    def tone(self) -> Tone:
        """Good where everything works, bad where something computes wrongly."""
        if any(f.faulty for f in self.findings):
            return "bad"
        return "good" if all(f.works for f in self.findings) else ""

    def lines(self) -> list[str]:
        """How much works, what this machine can answer, and what to run next."""
        missing = [f"{f.area} {f.name}" for f in self.findings if not f.works]
        return [
            f"{self.device}: {len(self.findings) - len(missing)} of {len(self.findings)} work",
            *([f"not: {some(missing, 6, ', ')}"] if missing else []),
            checked(self.findings),
            *conclusion(self.device, self.findings),
        ]

    def tables(self) -> list[Table]:
        """A row a thing."""
        rows = [(f.area, f.name, _SHOWN[f.code], f.detail) for f in self.findings]
        return [
            printer.table(
                f"What this machine can do on {self.device}", ("area", "what", "works", "seen"), rows
            )
        ]

    def data(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "device": self.device,
            "findings": [picked(f, "area name works code detail") for f in self.findings],
        }


class Unavailable(Exception):  # noqa: N818 -- an answer, not an error
    """A probe's way to say why something is not there, or not right."""

    def __init__(self, reason: str, code: Code = "missing") -> None:
        super().__init__(reason)
        self.code: Code = code


def probe(device: str, kernels_s: float = 30.0) -> list[ProbeResult]:
    """Tries everything that the harness may want of a device ("cpu" or "cuda")."""
    return [_outcome(area, name, run) for area, name, run in _probes(device, kernels_s)]


def main(argv: Sequence[str]) -> int:
    """Prints the table for `device=cpu|cuda|auto`; exit code 0, also where much is missing, and 1 where a result is wrong.

    Raises:
        UsageError: another argument, or device=cuda without one.
    """
    if (options := options_of(DoctorOptions, argv)) is None:
        return 0
    kind = environment.device_kind(options.device)
    out = terminal.console()
    with out.status("trying ...") as status:
        findings = []
        for area, name, run in _probes(kind, options.kernels_s):
            status.update(f"trying {area}: {name} ...")
            findings.append(_outcome(area, name, run))
    tried = Tried(kind, findings)
    printer.show(tried, out, tables_first=True, as_program=options.json)
    return int(any(each.faulty for each in findings))


def checked(findings: Sequence[ProbeResult]) -> str:
    """How many kernels and layers gave the right result, and what became of the others."""
    parts = []
    for area, name in (("kernel", "kernels"), ("recipe", "layers")):
        counts = Counter(f.code for f in findings if f.area == area)
        parts.append(f"{name}: " + ", ".join(f"{count} {_COUNTED[code]}" for code, count in counts.items()))
    return f"Checked here: {'; '.join(parts)}"


def conclusion(device: str, findings: Sequence[ProbeResult]) -> tuple[str, str]:
    """What this machine can answer, and what to run next."""
    if faulty := [f"{each.area} {each.name}" for each in findings if each.faulty]:
        return (
            f"It computes wrongly: {some(faulty, 4, ', ')}.",
            "Next: measure nothing here before that is mended",
        )
    works = {(f.area, f.name) for f in findings if f.works}
    quick, ask = "python -m harness sweep=quick", "python -m harness advise model=NAME gpu=NAME"
    if device == "cpu":
        return (
            "It can answer whether FP8's numerics, bytes and losses are right, not how fast a GPU is.",
            f"Next: {quick}; of a GPU that is not here: {ask}",
        )
    if not any(area == "gemm" and BACKENDS[name].is_fp8 for area, name in works):
        return "It multiplies no FP8: it can answer for bf16 alone.", f"Next, of a GPU that does: {ask}"
    return (
        "It can answer whether FP8 is faster here, sound, and trains the same.",
        f"Next: {quick}; all of it, in a checkout: make gpu",
    )


def _outcome(area: str, name: str, run: Callable[[], str]) -> ProbeResult:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a probe's finding is whether it works, not what it mutters
            return ProbeResult(area, name, run())
    except Unavailable as reason:
        return ProbeResult(area, name, str(reason), reason.code)
    except Exception as error:  # noqa: BLE001 -- whatever a library raises here is the finding
        text = " ".join(text_of(error).split())
        code: Code = "missing" if cause_of(error, Cause.RUN) is Cause.MISSING else "raised"
        return ProbeResult(area, name, f"{type(error).__name__}: {text}"[:300], code)


def _probes(device: str, kernels_s: float = 30.0) -> Iterator[tuple[str, str, Callable[[], str]]]:
    """(area, name, run) of every probe; `run` returns what was seen."""
    yield "device", device, partial(_device, device)
    yield "device", "timer", partial(_timer, device)
    if device == "cuda":
        yield "device", "NVML", _nvml
        yield "device", "peak table", _peak
    for fmt in FORMATS.values():
        yield "dtype", fmt.name, partial(_dtype, fmt, device)
    if kernels_missing(device, ""):
        why = "fp8core's kernels run on NVIDIA GPUs; here their twins in plain PyTorch compute"
        yield "kernel", f"all {len(OPERATORS)}", partial(_refuse, why)
    else:
        end = time.monotonic() + kernels_s
        yield "compile", "kernels", partial(_compile_kernels, end)
        for name in OPERATORS:
            yield "kernel", name, partial(_kernel, name, device, end)
    for name in BACKENDS:
        yield "gemm", name, partial(_gemm, name, device)
    for name in RECIPES:
        yield "recipe", name, partial(_recipe, name, device)
    yield "compile", "torch.compile", partial(_compile, device)
    for name, peer in PEERS.items():
        yield "peer", name, partial(_peer, peer, device)
    for table in TABLES:
        for extension in installed(table):
            yield "extension", f"{table.removesuffix('s')} {extension.name}", partial(_extension, extension)


def _device(device: str) -> str:
    facts = environment.fingerprint(device)
    software = (
        f"torch {facts['torch']}, triton {facts['triton'] or 'not installed'}, Python {facts['python']}"
    )
    if device == "cpu":
        return f"{facts['cpu']}, {facts['threads']} threads, {' '.join(facts['isa'])}; {software}"
    power = facts.get("power_limit_w")
    return (
        f"{facts['gpu']}, {facts['gpu_memory_gib']} GiB, capability {facts['gpu_capability']}, "
        f"{'power limit not readable' if power is None else f'{power:.0f} W'}, "
        f"driver {facts.get('driver') or 'not readable'}, CUDA {facts['cuda'] or facts['hip']}; {software}"
    )


def _timer(device: str) -> str:
    timer = timer_for(device)
    x = torch.ones(64, 64, device=device)
    best = min(timer.block(lambda: x + x, 10))
    return f"{timer.method}, L2 {timer.l2}; a 64 x 64 addition takes {1e3 * best:.1f} us"


def _nvml() -> str:
    with environment.monitor_for("cuda") as monitor:
        if isinstance(monitor, GpuMonitor) and monitor.problem:
            raise Unavailable(
                f"{monitor.problem}; clocks, power and throttling will be missing from the rows"
            )
        state = monitor.state()
    missing = [name for name, value in state.items() if value is None]
    if len(missing) == len(state):
        raise Unavailable("every reading is refused (container or permission?)")
    seen = f"SM {state['sm_clock_mhz']} MHz, {state['power_w']} W of {state['power_limit_w']} W"
    return seen + (f"; not readable: {', '.join(missing)}" if missing else "")


def _peak() -> str:
    facts = environment.fingerprint("cuda")
    device = of_env(facts)
    if device is None:
        raise Unavailable(
            f"no entry for {facts['gpu']!r} in harness/machine/hardware/devices.yaml: shares of peak will read N/A"
        )
    peaks = ", ".join(f"{rate} {value:g} TFLOP/s" for rate, value in device.tflops.items())
    return f"{device.key}: {peaks}, {device.bandwidth_tb_s:g} TB/s (dense)"


def _dtype(fmt: Format, device: str) -> str:
    """Casts 1 there and back, and looks at what an overflow becomes: torch 2.11 and 2.13 differ."""
    if fmt is E2M1FN:  # torch 2.13 casts to no packed dtype
        x = torch.tensor([1.0, 1e9], device=device)
        values = four_bits.decode(four_bits.encode(x)).tolist()
        if values != [1.0, fmt.max]:
            raise Unavailable(f"a cast of 1.0 and 1e9 comes back as {values}", "wrong")
        return "casts in plain PyTorch; an overflow saturates at 6"
    there = torch.tensor([1.0, 1e9], device=device).to(fmt.dtype)
    one, overflow = there.float().tolist()
    if one != 1.0:
        raise Unavailable(f"a cast of 1.0 comes back as {one}", "wrong")
    if overflow <= fmt.max < 1e9:
        return f"casts; an overflow saturates at {overflow:g}"
    return "casts" if fmt.max >= 1e9 else f"casts; an overflow becomes {overflow} (fp8core clamps before)"


def _refuse(why: str) -> str:
    raise Unavailable(why)


def _compile_kernels(end: float) -> str:
    is_whole, words = kernel_checks.compile_all(end)
    if not is_whole:
        raise Unavailable(words, "unchecked")
    return words


def _kernel(name: str, device: str, end: float) -> str:
    """Compares one operator with its twin, unless the time for kernels is over."""
    if time.monotonic() > end:
        raise Unavailable("not reached in time; kernels_s=SECONDS gives more", "unchecked")
    rows, columns = kernel_checks.ROWS, kernel_checks.COLUMNS
    if why := kernel_checks.fault(name, rows, columns, device):
        raise Unavailable(f"runs, but its result is wrong: {why}", "wrong")
    return f"as its twin in plain PyTorch, {rows} x {columns}, input in {', '.join(kernel_checks.SOURCES)}"


def _gemm(backend: str, device: str) -> str:
    """One 32 x 64 x 48 product of each granularity against float64."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(32, 64, generator=generator), torch.randn(48, 64, generator=generator)
    e4m3 = native_pair()[0]
    seen: list[str] = []
    refused: list[str] = []
    granularities: tuple[Granularity, ...] = ("tensorwise", "rowwise")
    for granularity in granularities:
        left = quantize(a.to(device), e4m3, granularity, dim=1)
        right = quantize(b.to(device).t(), e4m3, granularity, dim=0)  # [64, 48], column-major
        try:
            product = scaled_mm(left, right, backend=backend)
        except (RuntimeError, ValueError) as error:
            refused.append(f"{granularity} refused: {' '.join(text_of(error).split())[:150]}")
        else:
            seen.append(f"{granularity} {_sound(product, a.double() @ b.double().t()):.1f} dB")
    if not seen:
        raise Unavailable("; ".join(refused))
    if backend == "triton" and kernels_missing(device, ""):
        raise Unavailable(
            f"fp8core's kernels run on NVIDIA GPUs; here their plain twin does: {', '.join(seen)}"
        )
    return ", ".join(seen + refused)


def _recipe(name: str, device: str) -> str:
    """Forward and backward of one layer against float64, and fp8core's proof that FP8 ran in it, where it is not emulated."""
    tokens, inputs, outputs = (4096, 4096, 4096) if device == "cuda" else (32, 64, 96)
    torch.manual_seed(0)
    linear = torch.nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16, device=device)
    x = torch.randn(tokens, inputs, dtype=torch.bfloat16, device=device, requires_grad=True)
    layer = Float8Linear.from_float(linear, config=name)
    output = layer(x)
    grad = torch.randn_like(output)
    output.backward(grad)
    assert x.grad is not None
    assert layer.weight.grad is not None
    x64, w64, g64 = (t.detach().double() for t in (x, linear.weight, grad))
    pairs = {
        "output": (output, x64 @ w64.t()),
        "grad_input": (x.grad, g64 @ w64),
        "grad_weight": (layer.weight.grad, g64.t() @ x64),
    }
    gemms = RECIPES[name].gemms
    sound = {gemm: _sound(*pair, is_four_bit=gemms[gemm].is_four_bit) for gemm, pair in pairs.items()}
    seen = [f"{gemm} {sqnr:.1f} dB" for gemm, sqnr in sound.items()]
    if not BACKENDS[RECIPES[name].backend].is_fp8:
        return f"{', '.join(seen)}; emulated in high precision"

    def step() -> None:
        layer(x).backward(grad)
        update_scales(layer)

    proof = verify(step, layer, recipe=RECIPES[name], announce=False)
    if not proof.ok:
        raise Unavailable(f"runs, but is not proved to run in FP8: {proof.line}", "wrong")
    return f"{', '.join(seen)}; proved to run in FP8"


def _sound(actual: torch.Tensor, reference: torch.Tensor, *, is_four_bit: bool = False) -> float:
    """SQNR in dB, refused where it is too low for a cast that works, of four bits too high for one that ran at all; or where
    the result is a multiple of the right one."""
    result, wanted = actual.detach().double(), reference.to(actual.device)
    sqnr = metrics.sqnr_db(result, wanted)
    least, most = FOUR_BITS_DB if is_four_bit else (_SOUND_DB, math.inf)
    if not least <= sqnr <= most:
        raise Unavailable(
            f"runs, but its result is wrong: SQNR {sqnr:.1f} dB, expected {least:g} to {most:g}", "wrong"
        )
    factor = float((result * wanted).sum() / wanted.square().sum())
    if not abs(factor - 1) <= (_FOUR_BITS_OFF if is_four_bit else _OFF):
        raise Unavailable(f"runs, but its result is wrong: {factor:.3f} times what it should be", "wrong")
    return sqnr


def _compile(device: str) -> str:
    why_not = compile_unavailable(device)
    if why_not:
        raise Unavailable(why_not)
    x = torch.arange(64.0, device=device)
    begin = time.perf_counter()
    doubled = fresh_compile(lambda t: t * 2 + 1)(x)
    seconds = time.perf_counter() - begin
    if not torch.equal(doubled, x * 2 + 1):
        raise Unavailable("a compiled x * 2 + 1 gives another result than the eager one", "wrong")
    return f"first graph in {seconds:.1f} s"


def _extension(extension: Extension) -> str:
    """Imports it; what its recipe, backend or peer can do is seen in those areas."""
    if why := faults().get(extension):
        raise Unavailable(why)
    return f"of {extension.owner}, not ours: {extension.target}"


def _peer(peer: Peer, device: str) -> str:
    silenced = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        absent = peer.missing(device)
        if absent is not None:
            raise Unavailable(absent)
        reasons = {recipe: peer.unfit(recipe, device) for recipe in peer.recipes}
        fitting, lacking = (
            [r for r, why in reasons.items() if not why],
            [why for why in reasons.values() if why],
        )
        if not _tried(peer, fitting, device):
            raise Unavailable("; ".join(lacking) or "offers nothing that could be tried here")
        return "; ".join([f"{peer.version()}: {peer.doc}", *lacking])
    finally:
        logging.disable(silenced)


def _tried(peer: Peer, recipes: Sequence[str], device: str) -> bool:
    """Whether a part of the peer ran, and so was imported: a layer is made, products and casts are held against float64."""
    if peer.linear and recipes:
        peer.linear(torch.nn.Linear(16, 16, bias=False, device=device), recipes[0])
    x, weight = torch.randn(2, 128, 256, dtype=torch.bfloat16, device=device)
    for recipe in recipes if peer.gemm else ():
        forward = RECIPES[recipe].output
        assert peer.gemm
        assert forward.a
        assert forward.b
        left, right = quantised(x, forward.a, 1), quantised(weight.t(), forward.b, 0)
        product = peer.gemm(left.qdata, right.qdata, left.scale_inv, right.scale_inv, peer.fast_accum)
        _sound(product, x.double() @ weight.double().t())
    if peer.cast:
        codes, scale_inv = peer.cast(x, native_pair()[0].dtype, "tensorwise")
        _sound(codes.float() * scale_inv, x.double())
    return bool((recipes and (peer.linear or peer.gemm)) or peer.cast)
