"""Doctor. Oracles: the tables that it must cover, and fakes that break in a known way."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fakes import FakeNvml

import fp8core
from fp8core import BACKENDS, FORMATS, RECIPES
from fp8core.kernels import ops, reference
from harness.cli import doctor, kernel_checks
from harness.cli.doctor import ProbeResult, Unavailable, conclusion, main, probe
from harness.machine import environment
from harness.machine.gpu_monitor import GpuMonitor
from harness.peers.peer import imported, not_installed

if TYPE_CHECKING:
    from harness.peers import Peer


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilation takes seconds and is tested elsewhere; here it passes the function through."""
    monkeypatch.setattr(doctor, "compile_unavailable", lambda device: None)
    monkeypatch.setattr(doctor, "fresh_compile", lambda fn: fn)


@pytest.fixture
def no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    there = replace(doctor.PEERS["scaled_mm"], arm="json", version=lambda: "2.0")
    absent = replace(there, missing=lambda device: not_installed("no_such_peer", "ghost"))
    monkeypatch.setattr(doctor, "PEERS", {"json": there, "ghost": absent})


def by_name(findings: list[ProbeResult], area: str) -> dict[str, ProbeResult]:
    return {f.name: f for f in findings if f.area == area}


@pytest.mark.usefixtures("eager", "no_peers")
def test_every_entry_of_every_table_has_a_line_and_works_on_cpu() -> None:
    """A new format, backend or recipe is probed without a change here; what CPU lacks names a way out."""
    findings = probe("cpu")
    assert set(by_name(findings, "dtype")) == set(FORMATS)
    assert set(by_name(findings, "gemm")) == set(BACKENDS)
    assert set(by_name(findings, "recipe")) == set(RECIPES)
    for area in ("device", "dtype", "gemm", "compile"):
        for name, finding in by_name(findings, area).items():
            assert finding.works == (name != "triton"), finding  # a CPU has its plain twin alone
    for name, finding in by_name(findings, "recipe").items():
        assert finding.works or f"nearest that works: recipe {RECIPES[name].nearest!r}" in finding.detail
        assert finding.works == (name != "mxfp8")
    assert all(f.detail for f in findings)
    peers = by_name(findings, "peer")
    assert peers["json"].works
    assert not peers["ghost"].works
    assert peers["ghost"].detail == "no_such_peer is not installed: pip install 'ghost'"


def test_a_dtype_whose_cast_is_broken_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "float", lambda self: torch.tensor([0.5, 448.0]))
    with pytest.raises(Unavailable, match=r"a cast of 1\.0 comes back as 0\.5"):
        doctor._dtype(FORMATS["e4m3fn"], "cpu")


def test_a_wrong_product_is_no_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that runs and returns garbage must not be reported as working."""
    monkeypatch.setattr(doctor, "scaled_mm", lambda a, b, backend: torch.ones(32, 48))
    outcome = doctor._outcome("gemm", "torch", lambda: doctor._gemm("torch", "cpu"))
    assert not outcome.works
    assert outcome.code == "wrong"


@pytest.mark.parametrize("factor", [1.15, 0.85, 1.03])
def test_a_product_that_is_too_large_or_too_small_is_no_capability(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong scale: a factor of 1.15 leaves 16.5 dB, which e5m2's own rounding leaves too."""
    real = doctor.scaled_mm
    monkeypatch.setattr(doctor, "scaled_mm", lambda a, b, backend: real(a, b, backend=backend) * factor)
    assert doctor._outcome("gemm", "torch", lambda: doctor._gemm("torch", "cpu")).code == "wrong"


def test_a_layer_whose_gradient_is_too_large_is_no_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor.Float8Linear.from_float

    def scaled(linear: torch.nn.Linear, config: str) -> Any:
        layer = real(linear, config=config)
        layer.weight.register_hook(lambda grad: grad * 1.15)
        return layer

    monkeypatch.setattr(doctor.Float8Linear, "from_float", scaled)
    assert doctor._outcome("recipe", "rowwise", lambda: doctor._recipe("rowwise", "cpu")).code == "wrong"


SIDES = {"output": (32, 96), "grad_input": (32, 64), "grad_weight": (96, 64)}


@pytest.mark.parametrize("name", SIDES)
def test_a_layer_with_one_nan_is_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> torch.Tensor:
        product = fp8core.scaled_mm(*args, **kwargs)
        if product.shape in (SIDES[name], SIDES[name][::-1]):
            product[0, 0] = torch.nan
        return product

    assert doctor._outcome("recipe", "rowwise", lambda: doctor._recipe("rowwise", "cpu")).works
    monkeypatch.setattr("fp8core.plain_linear.scaled_mm", broken)
    assert doctor._outcome("recipe", "rowwise", lambda: doctor._recipe("rowwise", "cpu")).code == "wrong"


@pytest.mark.parametrize("name", ["rowwise", "nvfp4"])
def test_a_layer_that_does_not_run_in_fp8_is_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its result is even better: the proof finds that, and of an emulated recipe too many decibels."""
    assert doctor._outcome("recipe", name, lambda: doctor._recipe(name, "cpu")).works
    monkeypatch.setattr(doctor.Float8Linear, "from_float", lambda linear, config: linear)
    assert doctor._outcome("recipe", name, lambda: doctor._recipe(name, "cpu")).code == "wrong"


def test_kernels_may_round_otherwise_and_no_more() -> None:
    """By hand: a norm's last bit and its amax may differ, a wrong one of 40 rows may not; a cast may differ in no code."""
    compare, y = kernel_checks.compare, torch.randn(40, 64)
    nearly, wrong = y * (1 + 2.0**-20), y.clone()
    wrong[7] *= -1
    assert compare("rms_norm_amax", (y, y.amax()), (nearly, nearly.amax())) == ""
    assert compare("rms_norm_amax", (wrong, y.amax()), (y, y.amax()))
    codes = y.to(torch.float8_e4m3fn)
    other = codes.view(torch.uint8).clone()
    other[0, 0] ^= 1
    assert compare("cast", (codes,), (codes,)) == ""
    assert compare("cast", (other.view(codes.dtype),), (codes,)).startswith("1 of 2560 ")
    assert compare("cast", (codes, codes), (codes,))


@pytest.mark.parametrize("name", ops.OPERATORS)
def test_every_operator_can_be_called_by_its_schema(name: str) -> None:
    """Where no kernel runs it is compared with itself: a new argument of unknown meaning raises here."""
    assert kernel_checks.fault(name, 64, 256, "cpu") == ""


@pytest.fixture
def kernels_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compared as on a GPU that has them, in small sizes, on this CPU."""
    monkeypatch.setattr(doctor, "kernels_missing", lambda device, instead: None)
    monkeypatch.setattr(kernel_checks, "compile_all", lambda end: (True, "nothing to compile"))
    monkeypatch.setattr(kernel_checks, "ROWS", 32)
    monkeypatch.setattr(kernel_checks, "COLUMNS", 256)


def kernels(seconds: float = 600.0) -> dict[str, ProbeResult]:
    own = [each for each in doctor._probes("cpu", seconds) if each[0] == "kernel"]
    return {each[1]: doctor._outcome(*each) for each in own}


@pytest.mark.usefixtures("kernels_here")
def test_a_wrong_kernel_is_found_and_is_exit_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(x: torch.Tensor, *rest: Any) -> Any:
        codes, *others = reference.cast(x, *rest)
        codes.view(torch.uint8)[3, 5] ^= 1
        return codes, *others

    assert {found.code for found in kernels().values()} == {""}
    monkeypatch.setitem(ops.OPERATORS, "cast", broken)
    found = kernels()
    assert {name: each.code for name, each in found.items() if each.code} == {"cast": "wrong"}
    assert found["cast"].faulty
    assert "kernel cast" in " ".join(conclusion("cuda", [*found.values(), ProbeResult("gemm", "torch", "")]))
    monkeypatch.setattr(
        doctor, "_probes", lambda *_: [("kernel", "cast", lambda: doctor._kernel("cast", "cpu", 1e12))]
    )
    assert main(["device=cpu"]) == 1


@pytest.mark.usefixtures("kernels_here")
def test_a_kernel_that_is_not_reached_in_time_is_not_called_right() -> None:
    found = kernels(0.0)
    assert {each.code for each in found.values()} == {"unchecked"}
    assert f"{len(ops.OPERATORS)} not checked" in doctor.checked([*found.values()])


@pytest.mark.usefixtures("kernels_here")
@pytest.mark.parametrize(("is_whole", "code"), [(True, ""), (False, "unchecked")])
def test_kernels_of_which_some_were_not_compiled_are_no_yes(
    is_whole: bool, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_checks, "compile_all", lambda end: (is_whole, "some launches"))
    (found,) = [
        doctor._outcome(*each) for each in doctor._probes("cpu") if each[:2] == ("compile", "kernels")
    ]
    assert found.code == code


def tried(peer: Peer) -> ProbeResult:
    return doctor._outcome("peer", "p", partial(doctor._peer, peer, "cpu"))


def test_a_peer_none_of_whose_recipes_runs_here_is_missing() -> None:
    """One that lacks some of them, or whose cast is there, works, and names those."""
    there = replace(doctor.PEERS["scaled_mm"], version=lambda: "1")
    some = replace(there, unfit=lambda recipe, device: "too old" if recipe == "rowwise" else None)
    none = replace(there, unfit=lambda recipe, device: "too old")
    cast = replace(none, cast=lambda x, dtype, _: (x.to(dtype), torch.ones(())))
    found = [tried(peer) for peer in (some, none, cast)]
    assert [each.code for each in found] == ["", "missing", ""]
    assert all("too old" in each.detail for each in found)


@pytest.mark.parametrize("part", ["linear", "gemm", "cast", "unfit"])
def test_a_peer_that_cannot_be_imported_is_not_called_usable(part: str) -> None:
    """Oracle: a module that is not there, imported by one part of an adapter alone."""
    peer = replace(doctor.PEERS["scaled_mm"], gemm=None, version=lambda: "1")
    peer = replace(peer, **{part: lambda *_: imported("no_such_module", "it>=2")})
    found = tried(peer)
    assert found.code == "missing"
    assert "pip install 'it>=2'" in found.detail


def test_a_peer_of_which_nothing_was_tried_is_not_called_usable() -> None:
    assert tried(replace(doctor.PEERS["scaled_mm"], gemm=None)).code == "missing"


@pytest.mark.parametrize("name", ["scaled_mm", "torchao"])
def test_products_and_casts_of_a_peer_are_held_against_float64(name: str) -> None:
    """Oracle: the same peer with a result that is 15 % too large."""
    peer = doctor.PEERS[name]
    if peer.missing("cpu"):
        pytest.skip(f"{name} is not installed")
    assert tried(peer).code == ""
    if peer.gemm:
        product = peer.gemm
        wrong = replace(peer, gemm=lambda *given: product(*given) * 1.15)
    else:
        assert peer.cast
        cast = peer.cast
        wrong = replace(peer, cast=lambda *given: (cast(*given)[0], cast(*given)[1] * 1.15))
    assert tried(wrong).code == "wrong"


def test_a_peer_is_asked_for_a_layer_as_sweeps_ask_it() -> None:
    """Without a bias, which nanochat's layer does not take."""
    found = doctor._outcome("peer", "p", partial(doctor._peer, doctor.PEERS["nanochat_style"], "cpu"))
    assert (found.code, found.works) == ("", True)


def test_a_granularity_that_is_refused_is_named_beside_one_that_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = doctor.scaled_mm

    def no_rowwise(a: Any, b: Any, backend: str) -> torch.Tensor:
        if a.scale_inv.dim():
            raise RuntimeError("Invalid scaling\nconfiguration.")
        return real(a, b, backend=backend)

    monkeypatch.setattr(doctor, "scaled_mm", no_rowwise)
    seen = doctor._gemm("torch", "cpu")
    assert seen.startswith("tensorwise ")
    assert seen.endswith("rowwise refused: Invalid scaling configuration.")


def test_compile_says_what_is_missing_and_compares_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "compile_unavailable", lambda device: "needs a C++ compiler")
    with pytest.raises(Unavailable, match=r"needs a C\+\+ compiler"):
        doctor._compile("cpu")
    monkeypatch.setattr(doctor, "compile_unavailable", lambda device: None)
    monkeypatch.setattr(doctor, "fresh_compile", lambda fn: torch.neg)
    with pytest.raises(Unavailable, match="gives another result than the eager one"):
        doctor._compile("cpu")


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """doctor's monitor and fingerprint as on an H200."""
    nvml = FakeNvml()
    facts = {
        "gpu": "NVIDIA H200",
        "gpu_memory_gib": 139.8,
        "gpu_capability": "9.0",
        "power_limit_w": 700.0,
        "driver": "580.159.03",
        "cuda": "13.0",
        "hip": None,
        "torch": "2.11.0",
        "triton": "3.6.0",
        "python": "3.12.3",
    }
    monkeypatch.setattr(environment, "monitor_for", lambda device: GpuMonitor(uuid=nvml.UUID, nvml=nvml))
    monkeypatch.setattr(environment, "fingerprint", lambda device: facts)
    return nvml


def test_the_gpu_lines(fake_gpu: FakeNvml) -> None:
    assert doctor._nvml() == "SM 1980.0 MHz, 612.345 W of 700.0 W"
    assert doctor._peak() == "H200 SXM: bf16 989 TFLOP/s, fp8 1979 TFLOP/s, 4.8 TB/s (dense)"
    assert doctor._device("cuda") == (
        "NVIDIA H200, 139.8 GiB, capability 9.0, 700 W, driver 580.159.03, CUDA 13.0; "
        "torch 2.11.0, triton 3.6.0, Python 3.12.3"
    )
    areas = [(area, name) for area, name, _ in doctor._probes("cuda")]
    assert ("device", "NVML") in areas
    assert ("device", "peak table") in areas


@pytest.mark.usefixtures("eager", "no_peers")
def test_the_command_prints_and_succeeds_where_something_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["device=cpu"]) == 0
    out = capsys.readouterr().out
    for word in ("What this machine can do on cpu", "rowwise_with_gw_hp", "e4m3fn", "ghost", "no"):
        assert word in out
    assert "sweep=quick" in out
    assert main(["device=cpu", "json=true"]) == 0
    found = json.loads(capsys.readouterr().out)
    missing = [each["name"] for each in found["findings"] if not each["works"]]
    assert found["device"] == "cpu"
    assert {"ghost", "triton", "mxfp8"} <= set(missing)
    assert f"{len(found['findings']) - len(missing)} of {len(found['findings'])} work" in out


@pytest.mark.parametrize(
    ("device", "backends", "answers"),
    [
        ("cpu", ("torch",), "not how fast"),
        ("cuda", ("reference",), "no FP8"),
        ("cuda", ("torch", "reference"), "faster here"),
        ("cuda", (), "no FP8"),
    ],
)
def test_the_last_line_claims_no_more_than_what_ran(
    device: str, backends: tuple[str, ...], answers: str
) -> None:
    findings = [ProbeResult("gemm", name, "", "" if name in backends else "missing") for name in BACKENDS]
    assert answers in " ".join(conclusion(device, findings))


@pytest.mark.parametrize(("is_fp8", "answers"), [(False, "no FP8"), (True, "faster here")])
def test_a_backend_from_outside_is_judged_by_its_record(
    monkeypatch: pytest.MonkeyPatch, is_fp8: bool, answers: str
) -> None:
    backend = copy.copy(BACKENDS["reference"])
    backend.is_fp8 = is_fp8
    monkeypatch.setitem(BACKENDS, "somebodys", backend)
    assert answers in " ".join(conclusion("cuda", [ProbeResult("gemm", "somebodys", "28 dB")]))
