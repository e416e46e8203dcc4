"""Oracle: hashlib over hand-written canonical JSON, and set algebra over the product of axes."""

from __future__ import annotations

import hashlib
import pickle

from harness.store.case import Case, expand


def test_case_id_is_the_hash_of_canonical_json() -> None:
    case = Case.of("gemm", {"N": 3, "K": 2, "M": 1}, seed=7)
    written_out = '{"axes":{"K":2,"M":1,"N":3},"seed":7,"suite":"gemm"}'
    assert case == Case.of("gemm", {"M": 1, "K": 2, "N": 3}, seed=7)
    assert case.case_id == hashlib.sha256(written_out.encode()).hexdigest()[:12]


def test_expand_is_the_product_of_points_and_axes_in_reading_order_each_once() -> None:
    cases = expand("s", {"x": [1, 2, 1], "y": ["p", "q"]}, points=[{"M": 8}, {"M": 16}, {"M": 8}])
    assert [(c["M"], c["x"], c["y"]) for c in cases] == [
        (m, x, y) for m in (8, 16) for x in (1, 2) for y in ("p", "q")
    ]


def test_where_a_file_lies_is_no_part_of_what_a_case_is() -> None:
    """Oracle: the id without the axis. The path is there to be read, in another process too."""
    plain = Case.of("train", {"data": "bytes"})
    here = Case.of("train", {"data": "bytes", "data_path": "/a/text"})
    assert plain.case_id == here.case_id == Case.of("train", {"data": "bytes", "data_path": "/b"}).case_id
    assert here.axes_json == '{"data":"bytes"}'
    assert str(here) == "train[data=bytes]"
    assert pickle.loads(pickle.dumps(here)).text("data_path") == "/a/text"
