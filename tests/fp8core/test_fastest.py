"""fastest: who multiplies, by rules and by fake clocks; what is kept of it. In programs: test_fastest_in_programs.py.

The oracle of every choice is the table of times that the test made up.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from fake_clock import NAMES, SMALL, Clock, operands
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8core import BACKENDS, E4M3FN, E5M2
from fp8core.gemm import FASTEST, fastest
from fp8core.gemm.fastest import Fastest, Product
from fp8core.kernels import tuning
from fp8core.kernels.tuning import MARGIN, ROUNDS, race

pytestmark = pytest.mark.usefixtures("cache")

# The race


@pytest.mark.parametrize("count", [2, 3])
def test_the_fastest_wins_and_a_tie_goes_to_the_default(count: int) -> None:
    """Oracle: the smallest time, where it is more than the margin below the default's; all times of a grid."""
    for times in itertools.product((0.5, 0.97, 0.979, 0.981, 1.0, 1.2), repeat=count):
        order: list[int] = []

        def time_ms(
            run: Callable[[], Any], times: tuple[float, ...] = times, order: list[int] = order
        ) -> float:
            order.append(run())
            return times[order[-1]]

        won = race([lambda i=i: i for i in range(count)], time_ms)
        assert times[won] == min(times) if min(times) < (1 - MARGIN) * times[0] else won == 0, times
        there = [*range(count)]
        assert order == [i for number in range(ROUNDS) for i in (there if number % 2 == 0 else there[::-1])]


# What is measured, kept and found again


@pytest.mark.parametrize("times", [{"torch": 2.0, "triton": 1.0}, {"torch": 1.0, "triton": 2.0}], ids=str)
def test_it_is_measured_once_and_kept(times: dict[str, float], cache: Path) -> None:
    """Oracle: the times. Sizes of one bucket and a new process measure nothing; the product is the chosen one's."""
    winner = min(times, key=times.__getitem__)
    clock = Clock(**times)
    choosing = clock.choosing()
    given = operands(64)
    assert torch.equal(choosing.matmul(*given), BACKENDS[winner].matmul(*given))
    assert clock.timed == 2 * ROUNDS
    assert clock.ran[:2] == list(NAMES)  # a call before the clock starts: it compiles and tunes
    assert list(json.loads(cache.read_text()).values()) == [winner]
    for later, M in ((choosing, 64), (choosing, 63), (clock.choosing(), 64)):
        clock.ran.clear()
        later.matmul(*operands(M))
        assert clock.ran == [winner]
    assert clock.timed == 2 * ROUNDS


def test_the_key_names_all_that_the_time_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: each change makes a new key, except of sizes within a bucket."""
    base = SMALL._replace(M=4096, K=4096, N=4096)
    changes: dict[str, Any] = {
        "M": 4097, "K": 4097, "N": 4097, "a_dtype": E5M2.dtype, "b_dtype": E5M2.dtype, "granularity": "tensorwise",
        "out_dtype": torch.float32, "use_fast_accum": True, "device": torch.device("meta"),
    }  # fmt: skip
    assert list(changes) == list(Product._fields)
    keys = {fastest._key(base), *(fastest._key(base._replace(**{n: v})) for n, v in changes.items())}
    for module, attribute, value in (
        (torch, "__version__", "9.9"),
        (torch.version, "cuda", "9.9"),
        (triton, "__version__", "9.9"),
        (tuning, "sources", lambda: "other kernels"),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(module, attribute, value)
            keys.add(fastest._key(base))
    assert len(keys) == 1 + len(changes) + 4
    assert fastest._key(base._replace(M=4090, K=4000)) == fastest._key(base)


# Where only one can run it, or nobody

REFUSALS = ("", "shape_reason", "device_reason")


@pytest.mark.parametrize(("of_torch", "of_triton"), [*itertools.product(REFUSALS, repeat=2)])
def test_rules_come_before_the_clock(of_torch: str, of_triton: str) -> None:
    """Oracle: who is left; with nobody left what both say. Each kind of rule of each, the clock for whom it refuses."""
    changed: dict[str, Any] = {
        name: {rule: lambda *_, name=name: f"{name} refuses"} if rule else {}
        for name, rule in zip(NAMES, (of_torch, of_triton), strict=True)
    }
    clock = Clock(torch=2.0 if of_triton else 1.0, triton=2.0 if of_torch else 3.0)
    choosing = clock.choosing(**changed)
    if of_torch and of_triton:
        with pytest.raises(ValueError, match="torch: torch refuses; triton: triton refuses"):
            choosing.matmul(*operands())
    else:
        assert choosing.choice(*operands()) == ("triton" if of_torch else "torch")
        assert bool(clock.timed) == (not of_torch and not of_triton)


def test_the_rules_of_the_real_ones() -> None:
    """Oracle: by hand: what the sizes, formats, scales and results of cuBLAS's kernel leave to ours, and neither takes."""
    entry = BACKENDS["fastest"]
    for arguments in (
        (17, 100, 10, E4M3FN, E4M3FN),
        (16, 16, 16, E5M2, E5M2),
        (16, 16, 16, E4M3FN, E4M3FN, "1x128"),
    ):
        assert entry.shape_reason(*arguments) is None
    assert entry.shape_reason(16, 16, 16, E4M3FN, E4M3FN, "rowwise", torch.float32) is None
    # Ours takes any size, but has no kernel for fnuz
    assert "K=100" in str(entry.shape_reason(16, 100, 16, "e4m3fnuz", "e4m3fnuz"))
    assert "1x32" in str(entry.granularity_reason("cpu", "1x32"))
    assert "device type 'mps'" in str(entry.device_reason("mps", E4M3FN, E4M3FN))
    # Where "torch" rounds, so does "triton": no dtype depends on who was faster
    assert entry.bf16_only == {"rowwise"}
    for size, ran in (((17, 100, 10), "triton"), ((16, 32, 16), "torch")):
        assert FASTEST.choice(*operands(*size)) == ran


@pytest.mark.parametrize("refuses", [("torch",), ("triton",), NAMES], ids=str)
def test_what_the_device_refuses_is_left_out_with_a_warning_and_not_stored(
    refuses: tuple[str, ...], cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Oracle: who does not raise; a refusal may be temporary, so the next process tries again."""

    def refused(*_: object) -> torch.Tensor:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")

    clock = Clock(torch=1.0, triton=1.0)
    choosing = clock.choosing(**{name: {"matmul": refused} for name in refuses})
    if refuses == NAMES:
        with pytest.raises(
            RuntimeError,
            match=r"torch: CUBLAS.*; triton: CUBLAS",
        ):
            choosing.matmul(*operands())
    else:
        (other,) = set(NAMES) - set(refuses)
        assert choosing.choice(*operands()) == choosing.choice(*operands()) == other
        (warning,) = caplog.messages
        assert f"{refuses[0]}: CUBLAS_STATUS_NOT_SUPPORTED" in warning
    assert not clock.timed
    assert not cache.exists()


# Where nothing can be measured


def test_a_cpu_is_not_timed(cache: Path) -> None:
    clock = Clock()
    clock.choosing(measures=False).matmul(*operands())
    assert clock.ran == ["torch"]
    assert not cache.exists()


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fastest], str]:
    """Settles a product of CPU tensors as one on a GPU, by what would run there."""
    monkeypatch.setattr(tuning, "off", lambda: False)
    monkeypatch.setattr(tuning, "capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")

    def settle(choosing: Fastest) -> str:
        product = SMALL._replace(device=torch.device("cuda"))
        return choosing._cached(product) or choosing._choose(product, operands())

    return settle


ANYWHERE: dict[str, Any] = {name: {"device_reason": lambda *_: None} for name in NAMES}


@pytest.mark.parametrize("why", ["off", "capturing", "deterministic"])
def test_where_measuring_is_forbidden_the_default_multiplies(
    why: str, as_on_a_gpu: Callable[[Fastest], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: "torch", and after a measured run what that found; but a user who forbids the choice is obeyed."""
    clock = Clock(torch=2.0, triton=1.0)
    monkeypatch.setattr(tuning, "cuda_ms", lambda run, **_: clock(run))
    forbidden, name = (
        (torch, "are_deterministic_algorithms_enabled") if why == "deterministic" else (tuning, why)
    )
    choosing, found = clock.choosing(measures=False, **ANYWHERE), []
    for forbid in (True, False, True):
        with monkeypatch.context() as forbids:
            if forbid:
                forbids.setattr(forbidden, name, lambda: True)
            found.append(as_on_a_gpu(choosing))
    assert found == ["torch", "triton", "triton" if why == "capturing" else "torch"]


def test_shapes_without_data_are_not_timed() -> None:
    """Fake tensors of a tracer: the clock would measure nothing."""
    clock = Clock(torch=2.0, triton=1.0)
    with FakeTensorMode() as mode:
        given = [mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for t in operands()]
        assert clock.choosing().choice(*given) == "torch"
    assert not clock.ran
