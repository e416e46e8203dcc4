"""Suite `example_transpose`: what a transposed copy of FP8 codes costs, beside a plain copy of as many bytes.

The oracle is numpy's transposition of the same bytes; the timed result must equal it bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from harness.store.case import Arm
from harness.suites.common import generator, refuse_shapes, with_defaults
from harness.timing.workload import ArmInfo, Axis, Numerics, Unsupported, Workload, arm_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.store.case import Case, Scalar

COPY, TRANSPOSE = "example_copy", "example_transposed"
AXES: Mapping[str, Axis] = {"rows": Axis("rows", default=256), "columns": Axis("columns", default=256)}
ARMS: Mapping[str, ArmInfo] = arm_table(
    {
        Arm(variant=COPY): ArmInfo("codes copied as they lie"),
        Arm(variant=TRANSPOSE): ArmInfo("codes copied into their transpose", baseline=COPY),
    }
)


def points(
    shapes: Sequence[str], axes: Mapping[str, Sequence[Scalar]], model: Any
) -> list[dict[str, Scalar]]:
    """No linked axes; what the sweep leaves open has its default."""
    refuse_shapes("example_transpose", shapes, "sizes by axes.rows and axes.columns")
    return with_defaults([{}], axes, AXES)


def unsupported(case: Case, arm: str, device: str) -> Unsupported | None:
    """Every device copies bytes; else `Unsupported("device", why)`, and the arm is a skipped row."""
    return None


def work(case: Case) -> float:
    """Bytes, by which cases are ranked."""
    return 2.0 * case.integer("rows") * case.integer("columns")


def build(case: Case, arm: str, device: str) -> Workload:
    """Draws the codes from the case's seed and returns what is timed, what checks it, and the bytes that it moves."""
    shape = case.integer("rows"), case.integer("columns")
    codes = torch.randn(shape, generator=generator(device, case.seed, 0), device=device).to(
        torch.float8_e4m3fn
    )

    def run() -> torch.Tensor:
        return codes.clone() if arm == COPY else codes.t().contiguous()

    def check() -> Numerics:
        source = codes.cpu().view(torch.uint8).numpy()
        wanted = source if arm == COPY else np.ascontiguousarray(source.T)
        wrong = float((run().cpu().view(torch.uint8).numpy() != wanted).sum())
        reason = f"{wrong:.0f} codes differ from numpy's copy; 0 expected" if wrong else ""
        return Numerics({"mismatches": wrong}, ok=not wrong, reason=reason)

    return Workload(
        run=run,
        check=check,
        bytes_moved=work(case),
        resolved={"timed": ARMS[arm].doc, "backend": "torch"},
    )
