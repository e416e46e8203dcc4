"""A census of a proved step: of each operand of each GEMM, what was asked for and what the GEMM received.

    print(fp8core.census(proof))

Formats, scales and accumulation are read from the operators that ran, and what ran in high precision from the count of
the step's products. "nearest even" and no transform are said only of operands whose codes equal an independent cast.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from fp8core.proof.audit import as_table
from fp8core.proof.cast_stats import READS
from fp8core.proof.flops.count import FOUR_BITS, FP8_DTYPES
from fp8core.recipe import GEMMS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from fp8core.proof.flops import Matmul
    from fp8core.proof.verify.proof import Proof
    from fp8core.proof.verify.records import LayerProof

HIGH_PRECISION = "high precision"
DID_NOT_RUN = "did not run"
NOT_KNOWN = "not known"  # of experts in high precision
_RAN = ("ran in FP8", "ran in four bits", "ran in high precision")


class CensusFinding(NamedTuple):
    """What a census has against a layer.

    Attributes:
        code: "ran in FP8" or "ran in four bits", of what must not; "ran in high precision", of what must run in FP8; "no such
            layer".
        layer: its name, or the pattern that matched none.
        gemms: that are concerned.
    """

    code: str
    layer: str
    gemms: tuple[str, ...] = ()


@dataclass(frozen=True)
class CensusRow:
    """One operand of one GEMM, or one GEMM that did not receive codes.

    Attributes:
        layer, gemm, role: whose.
        asked: the cast of the recipe ("e4m3_rowwise_pow2"), or "high precision".
        format: dtype of what the GEMM received; "did not run", or "not known".
        granularity, rounding, transform: of the cast; "" in high precision.
        accumulate: "fast", all of K in the FP8 unit; "promoted", moved to float32 every 128; "float32"; "".
        backend: that multiplied; "".
    """

    layer: str
    gemm: str
    role: str
    asked: str
    format: str
    granularity: str = ""
    rounding: str = ""
    transform: str = ""
    accumulate: str = ""
    backend: str = ""

    @property
    def is_fp8(self) -> bool:
        """The GEMM received codes of 8 bits."""
        return self.format.startswith("float8")

    @property
    def ran(self) -> str:
        """How, as `CensusFinding.code` has it."""
        return _RAN[0] if self.is_fp8 else _RAN[1] if self.format.startswith("float4") else _RAN[2]


@dataclass(frozen=True)
class Census:
    """What `census` found; `str()` is a table.

    Attributes:
        rows: by layer, GEMM and role.
        findings: layers that ran in another precision than the recipe, or the names given, asked for.
    """

    rows: tuple[CensusRow, ...]
    findings: tuple[CensusFinding, ...]

    def __str__(self) -> str:
        lines = as_table(
            [tuple(CensusRow.__dataclass_fields__), *(tuple(vars(row).values()) for row in self.rows)]
        )
        lines += [f"{code}: {layer} {', '.join(gemms)}".rstrip() for code, layer, gemms in self.findings]
        return "\n".join(lines)


def census(proof: Proof, *, high_precision: Iterable[str] = (), fp8: Iterable[str] = ()) -> Census:
    """What each operand of each GEMM of a step was, from its proof.

    Args:
        proof: of `verify`, whatever its verdict.
        high_precision: names of layers, or patterns such as "layers.0.*", none of whose GEMMs may run in FP8, whatever
            their recipes say.
        fp8: the same of layers all of whose GEMMs that run must.
    """
    layers = [*proof.layers, *proof.experts]
    owners: dict[str, list[Matmul]] = {}
    for row in proof.matmuls.of_model:
        owners.setdefault(row.owner, []).append(row)
    rows: list[CensusRow] = []
    for layer in layers:
        rows += _rows(layer, owners.get(f"{layer.fqn}.weight" if layer.fqn else "weight", []))
    findings: list[CensusFinding] = []
    pinned = dict.fromkeys(high_precision, False) | dict.fromkeys(fp8, True)
    for layer in layers:
        wanted = [in_fp8 for name, in_fp8 in pinned.items() if fnmatchcase(layer.fqn, name)]
        own = [row for row in rows if row.layer == layer.fqn and row.format not in (DID_NOT_RUN, NOT_KNOWN)]
        at_fault: dict[str, list[str]] = {code: [] for code in _RAN}
        for operand in own:
            is_right = [operand.ran == _RAN[0 if in_fp8 else -1] for in_fp8 in wanted]
            if not all(is_right or [(operand.asked != HIGH_PRECISION) is (operand.ran != _RAN[-1])]):
                at_fault[operand.ran].append(operand.gemm)
        findings += [
            CensusFinding(code, layer.fqn, tuple(dict.fromkeys(gemms)))
            for code, gemms in at_fault.items()
            if gemms
        ]
    for name in pinned:
        if not any(fnmatchcase(layer.fqn, name) for layer in layers):
            findings.append(CensusFinding("no such layer", name))
    return Census(tuple(rows), tuple(findings))


def _rows(layer: LayerProof, products: list[Matmul]) -> Iterator[CensusRow]:
    def named(forward: bool) -> list[str]:
        """Dtypes of products whose codes, if any, no GEMM of a converted layer received."""
        dtypes = {p.dtype for p in products if (p.phase == "forward") is forward}
        dtypes -= {*FP8_DTYPES, FOUR_BITS} if layer.gemms else set()
        spelled = {FOUR_BITS: "float4_e2m1fn_x2", **{dtype: f"float8_{dtype}" for dtype in FP8_DTYPES}}
        return sorted(spelled.get(dtype, dtype) for dtype in dtypes)

    high = {forward: named(forward) for forward in (True, False)}
    none = NOT_KNOWN if layer.of_experts else DID_NOT_RUN
    of_backward = [name for name in GEMMS[1:] if layer.gemms and not layer.gemms[name].received]
    for name in GEMMS:
        gemm, roles = layer.gemms.get(name), [role for role, _ in READS[name]]
        received = {} if gemm is None else gemm.received
        asked = dict(zip(roles, (HIGH_PRECISION,) * 2 if gemm is None else gemm.asked, strict=True))
        for role, seen in received.items():
            exact = gemm is not None and gemm.operands > 0 and not layer.faults
            sure = ("nearest even", "none") if exact else ("not compared", "not compared")
            dtype, granularity, sums, backend = (
                " and ".join(dict.fromkeys(each)) for each in zip(*seen, strict=True)
            )
            yield CensusRow(layer.fqn, name, role, asked[role], dtype, granularity, *sure, sums, backend)
        # A backward product in high precision is one of those that received no codes
        dtypes = high[name == "output"] if name == "output" or not of_backward or name in of_backward else []
        for dtype in dtypes or [none] * (not received):
            for role in roles:
                yield CensusRow(layer.fqn, name, role, asked[role], dtype)
