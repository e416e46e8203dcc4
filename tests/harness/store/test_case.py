"""Oracle: hashlib over hand-written canonical JSON, and set algebra over the product of axes."""

from __future__ import annotations

import hashlib
import pickle

import pytest

from harness.store.case import Case, expand


def test_case_id_is_the_hash_of_canonical_json() -> None:
    case = Case.of("gemm", {"N": 3, "K": 2, "M": 1}, seed=7)
    written_out = '{"axes":{"K":2,"M":1,"N":3},"seed":7,"suite":"gemm"}'
    assert case.case_id == hashlib.sha256(written_out.encode()).hexdigest()[:12]


def test_equal_points_are_equal_whatever_the_order_of_their_axes() -> None:
    one, two = Case.of("s", {"a": 1, "b": "x"}), Case.of("s", {"b": "x", "a": 1})
    assert one == two
    assert hash(one) == hash(two)


@pytest.mark.parametrize("change", [{"suite": "t"}, {"axes": {"a": 2}}, {"seed": 1}])
def test_anything_that_changes_the_case_changes_its_id(change: dict[str, object]) -> None:
    base: dict[str, object] = {"suite": "s", "axes": {"a": 1}, "seed": 0}
    assert Case.of(**base).case_id != Case.of(**{**base, **change}).case_id


def test_expand_is_the_product_of_points_and_axes_in_reading_order() -> None:
    cases = expand("s", {"x": [1, 2], "y": ["p", "q"]}, points=[{"M": 8}, {"M": 16}])
    assert [(c["M"], c["x"], c["y"]) for c in cases] == [
        (m, x, y) for m in (8, 16) for x in (1, 2) for y in ("p", "q")
    ]


def test_expand_keeps_a_repeated_shape_once() -> None:
    assert len(expand("s", {"x": [1, 1]}, points=[{"M": 8}, {"M": 8}])) == 1


def test_an_unknown_axis_names_the_known_ones() -> None:
    with pytest.raises(KeyError, match=r"no axis 'Q'.*'M'"):
        Case.of("s", {"M": 1})["Q"]


@pytest.mark.parametrize("value", ["3", 3.0, True, None])
def test_integer_refuses_what_does_not_count(value: object) -> None:
    with pytest.raises(TypeError, match="must be an integer"):
        Case.of("s", {"M": value}).integer("M")


def test_a_number_may_be_whole_and_a_text_is_no_number() -> None:
    case = Case.of("s", {"lr": 1e-3, "n": 2, "model": "nano", "on": True})
    assert (case.number("lr"), case.number("n"), case.text("model")) == (1e-3, 2.0, "nano")
    for axis in ("model", "on"):
        with pytest.raises(TypeError, match="must be a number"):
            case.number(axis)
    with pytest.raises(TypeError, match="must be a text"):
        case.text("n")


def test_where_a_file_lies_is_no_part_of_what_a_case_is() -> None:
    """Oracle: the id without the axis. The path is there to be read, in another process too."""
    plain = Case.of("train", {"data": "bytes"})
    here = Case.of("train", {"data": "bytes", "data_path": "/a/text"})
    assert plain.case_id == here.case_id == Case.of("train", {"data": "bytes", "data_path": "/b"}).case_id
    assert here.axes_json == '{"data":"bytes"}'
    assert str(here) == "train[data=bytes]"
    assert pickle.loads(pickle.dumps(here)).text("data_path") == "/a/text"
