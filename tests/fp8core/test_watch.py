"""fp8core.watch: figures of casts. Oracle: numpy and ml_dtypes on the tensors that hooks of the test saw, in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from mixtures import Mixture
from recipes import FP8, on_cpu
from torch import nn

import fp8core
from fp8core import RECIPES, CastRecord, Float8Linear, PrecisionSchedule, convert_to_float8_training
from fp8core.observers import WATCHED
from fp8core.proof.cast_stats import CAST, CODES_ONLY, HIGH_PRECISION, NOT_SEEN
from fp8core.proof.sampled_places import SampledPlaces

ALL = 1 << 30  # samples: each element
DIM = {  # (operand, GEMM) -> the dimension that it contracts: docs of fp8core.recipe
    ("input", "output"): 1,
    ("input", "grad_weight"): 0,
    ("weight", "output"): 1,
    ("weight", "grad_input"): 0,
    ("grad_output", "grad_input"): 1,
    ("grad_output", "grad_weight"): 0,
}
FORMAT = {
    "float8_e4m3fn": (ml_dtypes.float8_e4m3fn, 448.0, 464.0),
    "float8_e5m2": (ml_dtypes.float8_e5m2, 57344.0, 61440.0),
}


class Tensors:
    """What reached each layer, by hooks of the test; one list a (layer, role)."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: dict[tuple[str, str], list[np.ndarray]] = {}
        for name, layer in model.named_modules():
            if isinstance(layer, Float8Linear):
                layer.register_forward_hook(self._hook(name))

    def _hook(self, name: str) -> Any:
        def keep(role: str, x: torch.Tensor) -> None:
            matrix = x.detach().float().reshape(-1, x.shape[-1]).clone().numpy()
            self.seen.setdefault((name, role), []).append(matrix)

        def hook(layer: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
            if output.requires_grad:
                keep("input", args[0])
                keep("weight", layer.linear_weight)
                output.register_hook(lambda gradient: keep("grad_output", gradient))

        return hook


def blocks(granularity: str, dim: int) -> tuple[int, int]:
    """(rows, columns) that share a scale; 0: all."""
    along, across = {
        "tensorwise": (0, 0),
        "rowwise": (0, 1),
        "1x128": (128, 1),
        "128x128": (128, 128),
        "1x32": (32, 1),
    }[granularity]
    return (across, along) if dim == 1 else (along, across)


def scales(
    x: np.ndarray, record: CastRecord, dim: int, largest: float, pow2: bool, amax: float | None
) -> np.ndarray:
    """float64, one an element."""
    rows, columns = (
        size or length for size, length in zip(blocks(record.granularity, dim), x.shape, strict=True)
    )
    result = np.empty(x.shape)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            top = float(np.abs(x[i : i + rows, j : j + columns]).max()) if amax is None else amax
            if record.granularity == "1x32":
                scale = 2.0 ** -(math.ceil(math.log2(top / largest)) if top else -127)
            else:
                scale = float(np.float32(largest / max(top, 1e-12)))
                scale = 2.0 ** math.floor(math.log2(scale)) if pow2 else scale
            result[i : i + rows, j : j + columns] = scale
    return result


def expected(
    tensors: list[np.ndarray], record: CastRecord, pow2: bool, amax: float | None = None
) -> dict[str, float]:
    """The figures of a record, for all calls together."""
    dtype, largest, overflow = FORMAT[record.dtype]
    clipped = zeroed = nonzero = count = 0
    signal = noise = 0.0
    smallest, most = math.inf, 0.0
    for x in tensors:
        scale = scales(x, record, DIM[record.operand, record.gemms[0]], largest, pow2, amax)
        codes = np.clip((x * scale.astype(np.float32)), -largest, largest).astype(dtype).astype(np.float64)
        wide = x.astype(np.float64)
        back = codes * (1 / scale).astype(np.float32).astype(np.float64)
        clipped += int((np.abs(wide * scale) > overflow).sum())
        zeroed += int(((codes == 0) & (x != 0)).sum())
        nonzero, count = nonzero + int((x != 0).sum()), count + x.size
        signal, noise = signal + float((wide**2).sum()), noise + float(((wide - back) ** 2).sum())
        smallest, most = min(smallest, scale.min()), max(most, scale.max())
    return {
        "amax": max(float(np.abs(x).max()) for x in tensors),
        "scale": smallest,
        "largest_scale": most,
        "saturated_share": clipped / count,
        "underflow_share": zeroed / nonzero,
        "sqnr_db": 10 * math.log10(signal / noise),
        "elements": count,
    }


def compare(record: CastRecord, want: dict[str, float]) -> None:
    for name, value in want.items():
        assert getattr(record, name) == pytest.approx(value, rel=1e-6), (record, name)


def model(recipe: str | fp8core.Recipe, *, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(256, 160), nn.GELU(), nn.Linear(160, 192)).to(dtype)
    return convert_to_float8_training(layers, config=on_cpu(recipe) if isinstance(recipe, str) else recipe)


def batch(rows: int = 160, columns: int = 256, seed: int = 1, spread: float = 4.0) -> torch.Tensor:
    """Values over many binades, so that some underflow."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    return (x * torch.exp(spread * torch.randn(rows, columns, generator=generator))).requires_grad_()


def loss_of(y: torch.Tensor) -> torch.Tensor:
    """A gradient of many binades."""
    weight = torch.exp(4 * torch.randn(y.shape, generator=torch.Generator().manual_seed(2)))
    return (y.float() * weight).sum()


def seen(
    layers: nn.Module, x: Any, operand: str = "", layer: str = "0", loss: Any = loss_of, **options: Any
) -> list[CastRecord]:
    """Records of one watched step, or those of one operand of one layer."""
    with fp8core.watch(layers, every=1, **options) as watcher:
        loss(layers(x)).backward()
        fp8core.update_scales(layers)
        watcher.step()
        assert not watcher.problem
    return [r for r in watcher.latest if not operand or (r.layer, r.operand) == (layer, operand)]


@pytest.fixture(autouse=True)
def nothing_is_left_on() -> Iterator[None]:
    yield
    assert not WATCHED


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [
        *((name, torch.float32) for name in FP8 if name not in ("delayed", "static")),
        ("rowwise", torch.bfloat16),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_figures_are_those_of_the_tensors_that_were_cast(recipe: str, dtype: torch.dtype) -> None:
    layers = model(recipe, dtype=dtype)
    tensors = Tensors(layers)
    records: list[CastRecord] = []
    assert seen(layers, batch().to(dtype), to=records.append, samples=ALL) == records
    parts = {(r.layer, r.operand, gemm) for r in records for gemm in r.gemms}
    assert parts == {
        (layer, operand, gemm) for layer in ("0", "2") for operand, gemm in DIM
    }  # each GEMM's operand, once
    assert sum(len(r.gemms) for r in records) == len(parts)
    for record in records:
        gemm = RECIPES[recipe].gemms[record.gemms[0]]
        is_a = (record.operand, record.gemms[0]) in (
            ("input", "output"),
            ("grad_output", "grad_input"),
            ("grad_output", "grad_weight"),
        )
        cast = gemm.a if is_a else gemm.b
        if cast is None:
            assert record.status == HIGH_PRECISION
            assert record.saturated_share is record.underflow_share is record.sqnr_db is record.scale is None
            continue
        assert (record.status, record.granularity) == (CAST, cast.granularity)
        assert record.dtype == f"float8_{cast.format.name}"
        assert record.sampled == record.elements
        compare(record, expected(tensors.seen[record.layer, record.operand], record, cast.power_of_two))
    assert any(r.underflow_share for r in records)


def test_delayed_scaling_shows_what_its_stale_scale_clips() -> None:
    """The scale is that of the largest earlier amax; a batch four times as large saturates."""
    layers = model("delayed")
    tensors = Tensors(layers)
    for seed in (1, 2):
        loss_of(layers(batch(seed=seed, spread=0.5))).backward()
        fp8core.update_scales(layers)
    earlier = {key: max(float(np.abs(x).max()) for x in seen) for key, seen in tensors.seen.items()}
    tensors.seen.clear()
    records = seen(layers, 4 * batch(seed=3, spread=0.5), samples=ALL)
    for record in records:
        key = record.layer, record.operand
        assert record.scaling == "delayed"
        compare(record, expected(tensors.seen[key], record, False, earlier[key]))
    first = next(r for r in records if (r.layer, r.operand) == ("0", "input"))
    assert first.saturated_share is not None
    assert 0 < first.saturated_share < 0.5


def test_one_clipped_element_is_never_a_share_of_zero() -> None:
    """A sample that misses the only clipped element: the amax has seen it."""
    layers = convert_to_float8_training(
        nn.Sequential(nn.Linear(256, 256, bias=False)), config=on_cpu("delayed")
    )
    x = torch.ones(256, 256)
    layers(x.requires_grad_()).sum().backward()
    fp8core.update_scales(layers)
    x = torch.ones(256, 256)
    x[7, 9] = 100.0
    (record,) = seen(layers, x.requires_grad_(), "input", samples=16)
    assert (record.amax, record.saturated_share) == (100.0, 1 / x.numel())
    assert record.sampled <= 16


@pytest.mark.parametrize("pattern", ["columns", "rows", "diagonal", "blocks"])
@pytest.mark.parametrize("shape", [(512, 256), (528, 320), (1008, 96), (2048, 1024)], ids=str)
def test_a_sample_estimates_the_shares_of_all(shape: tuple[int, int], pattern: str) -> None:
    """Oracle: the share by construction. A stride in step with the pattern would see all of what underflows, or none."""
    rows, columns = shape
    row, column = torch.arange(rows)[:, None], torch.arange(columns)
    small = {
        "columns": (column % 2 == 0).expand(shape),
        "rows": (row % 2 == 0).expand(shape),
        "diagonal": (row % columns != column).expand(shape),
        "blocks": ((row // 32 + column // 32) % 2 == 0).expand(shape),
    }[pattern]
    layers = convert_to_float8_training(nn.Sequential(nn.Linear(columns, 16)), config=on_cpu("tensorwise"))
    x = torch.where(small, 1e-9, 1.0) * torch.randn(shape).sign()
    (record,) = seen(layers, x.requires_grad_(), "input", samples=4096)
    exact = float(small.float().mean())
    assert 1000 < record.sampled <= 4096
    assert record.elements == x.numel()
    assert record.underflow_share == pytest.approx(
        exact, abs=max(4 * math.sqrt(exact * (1 - exact) / record.sampled), 0.01)
    )


def test_places_are_drawn_once_for_a_shape() -> None:
    places = SampledPlaces(4)
    first, again = (places.of(torch.Size((8, 2)), torch.device("cpu")) for _ in range(2))
    assert first is again


@pytest.mark.parametrize(("samples", "nonfinite"), [(ALL, 2), (8, 1)])
def test_values_that_are_not_finite_are_counted_and_hide_nothing(samples: int, nonfinite: int) -> None:
    """A sample that misses both still counts one: the amax has seen it."""
    layers = model("tensorwise")
    x = batch().detach()
    x[3, 5], x[4, 6] = torch.nan, torch.inf
    records = seen(layers, x.requires_grad_(), samples=samples)
    record, weight = (
        next(r for r in records if (r.layer, r.operand) == ("0", operand)) for operand in ("input", "weight")
    )
    assert (record.nonfinite, record.amax, record.sqnr_db, record.saturated_share) == (
        nonfinite,
        None,
        None,
        None,
    )
    assert weight.nonfinite == 0
    assert weight.sqnr_db is not None


def test_layers_that_a_schedule_holds_in_high_precision_are_not_cast() -> None:
    layers = model("tensorwise")
    schedule = PrecisionSchedule.parse("keep_bf16@0,keep_bf16@2:grad_weight")
    schedule.apply(layers, 0, 10)
    records = seen(layers, batch())
    of_first = [r for r in records if r.layer == "0"]
    assert {r.operand for r in of_first} == {"input", "weight", "grad_output"}
    for record in of_first:
        assert record.status == HIGH_PRECISION
        assert record.saturated_share is record.sqnr_db is record.underflow_share is None
    status = {(r.operand, g): r.status for r in records if r.layer == "2" for g in r.gemms}
    assert status == {key: HIGH_PRECISION if key[1] == "grad_weight" else CAST for key in DIM}


def test_a_layer_without_a_backward_pass_is_not_seen() -> None:
    layers = model("tensorwise")
    layers[0].requires_grad_(False)
    records = seen(layers, batch().detach())
    assert {(r.layer, r.status) for r in records} == {("0", NOT_SEEN), ("2", CAST)}
    assert all(r.amax is None and r.elements == 0 for r in records if r.layer == "0")


@pytest.mark.parametrize("codes_alone", [False, True])
def test_a_shared_cast_is_compared_with_its_tensor_and_codes_alone_with_nothing(codes_alone: bool) -> None:
    layers = model("rowwise")
    x: Any = fp8core.cast_input(batch(), layers[0])
    if codes_alone:
        layers[0].weight.requires_grad_(False)  # of codes for one GEMM there is no other
        x = fp8core.quantize(batch().detach(), "e4m3fn", "rowwise", power_of_two=True).requires_grad_()
    records = seen(layers, x, "input", samples=ALL)
    assert records
    for record in records:
        if codes_alone:
            assert (record.status, record.amax, record.sqnr_db, record.saturated_share) == (
                CODES_ONLY,
                None,
                None,
                None,
            )
        else:
            compare(record, expected([x.hp.detach().numpy()], record, True))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_experts_are_named_by_their_weights(recipe: str) -> None:
    """Each expert's weight is a matrix of its own to the oracle; tokens are those of all experts together."""
    torch.manual_seed(0)
    mixture = fp8core.convert_experts_to_float8(Mixture(), config=on_cpu(recipe))
    x = torch.randn(96, 32, requires_grad=True)
    records = seen(mixture, x, loss=lambda y: y.square().sum(), samples=ALL)
    names = ("gate", "up", "down")
    assert {(r.layer, r.operand, g) for r in records for g in r.gemms} == {
        (f"experts.{name}", *key) for name in names for key in DIM
    }
    for record in records:
        weight = getattr(mixture.experts, record.layer.removeprefix("experts."))
        if record.operand == "weight":
            compare(record, expected(list(weight.detach().numpy()), record, recipe == "rowwise"))
        assert record.status == CAST
        assert record.sqnr_db > 20
