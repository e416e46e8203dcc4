"""`python -m harness kernel`: oracle: what each kernel's source says it moves, converts and repeats."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from harness.__main__ import main
from harness.advise.meter import build

FILE = str(Path(__file__).with_name("kernels_to_meter.py"))
CAST = ("x_ptr=*bf16", "y_ptr=*fp8e4nv")


def facts(capsys: pytest.CaptureFixture[str], name: str, *words: str) -> dict[str, Any]:
    assert main(["kernel", f"{FILE}:{name}", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def error(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["kernel", *words]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_a_copy_moves_each_element_twice(capsys: pytest.CaptureFixture[str]) -> None:
    """16-byte accesses of 1024 float32 by 128 threads: two loads and two stores a thread."""
    found = facts(
        capsys,
        "copy_kernel",
        "x_ptr=*fp32",
        "y_ptr=*fp32",
        "n=i32:16777216",
        "grid=16384",
        "elements=16777216",
    )
    assert found["code_bytes"] == 8
    assert found["loads"] == found["stores"] == {"16": 1.0}
    assert found["in_flight"] == found["ctas_per_sm"] * 128 * 32
    assert 0.9 < found["share"]["H200"] < 1


def test_loops_run_as_often_as_the_arguments_say(capsys: pytest.CaptureFixture[str]) -> None:
    """rows / programs x columns / BLOCK loads of BLOCK numbers, and a store a row: 4 + 4 * BLOCK / columns bytes."""
    words = (
        "x_ptr=*fp32",
        "y_ptr=*fp32",
        "rows=i32:64",
        "columns=i32:1024",
        "BLOCK=256",
        "num_warps=2",
        "grid=16",
    )
    found = facts(capsys, "nested_kernel", *words, "elements=65536")
    assert found["code_bytes"] == 5
    assert not found["doubts"]


def test_conversions_and_text(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*CAST, "BLOCK=1024", "grid=1024", "elements=1048576")
    assert facts(capsys, "cast_kernel", *words)["conversions"] == 1
    assert main(["kernel", f"{FILE}:cast_kernel", *words]) == 0
    assert "no GPU has run it" in capsys.readouterr().out


def test_a_loop_over_data_predicts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    found = facts(
        capsys, "data_kernel", "count_ptr=*i32", "y_ptr=*fp32", "BLOCK=256", "grid=132", "elements=33792"
    )
    assert found["share"] == {}
    assert "depends on data" in found["doubts"][0]


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernel", "--help"]) == 0
    assert "num_stages" in capsys.readouterr().out
    assert main(["--help"]) == 0
    assert "harness kernel FILE.py:NAME" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nothing.py:kernel",), "nothing.py: no such file"),
        (("copy_kernel",), "expected FILE.py:NAME"),
        ((f"{FILE}:nothing",), "there is no such name; kernels there: copy_kernel"),
        ((f"{FILE}:not_a_kernel",), "it is a function"),
        ((f"{FILE}:copy_kernel", "x_ptr=*fp33"), "unknown type of x_ptr"),
        ((f"{FILE}:copy_kernel", "x_ptr=*fp32"), "y_ptr is missing: give its type"),
        ((f"{FILE}:cast_kernel", *CAST), "BLOCK is a tl.constexpr: give its value"),
        ((f"{FILE}:cast_kernel", *CAST, "BLOCK=large"), "BLOCK=large: expected a number"),
        ((f"{FILE}:cast_kernel", *CAST, "BLOK=1"), "unknown parameter 'BLOK' (nearest: BLOCK)"),
        ((f"{FILE}:cast_kernel", *CAST, "BLOCK=64", "BLOCK=64"), "BLOCK is given twice"),
        ((f"{FILE}:cast_kernel", *CAST, "BLOCK=64", "arch=sm_42"), "unknown arch 'sm_42'"),
        ((f"{FILE}:cast_kernel", *CAST, "BLOCK=64", "num_warps=3"), "num_warps=3: expected a power of two"),
        ((f"{FILE}:cast_kernel", *CAST, "BLOCK=64", "grid=0"), "grid=0: expected an integer of at least 1"),
        ((f"{FILE}:cast_kernel", *CAST, "BLOCK"), "expected NAME=VALUE"),
        (
            (f"{FILE}:cast_kernel", *CAST, "BLOCK=64", "arch=sm_80"),
            "fp8e4nv not supported in this architecture",
        ),
        ((f"{FILE}:broken_kernel", "x_ptr=*fp32", "BLOCK=16"), "undefined_name is not defined"),
    ],
)
def test_bad_requests(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in error(capsys, *words)


def test_a_file_that_cannot_be_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.py").write_text("import no_such_module_anywhere\n")
    assert "cannot be imported: ModuleNotFoundError" in error(capsys, f"{tmp_path / 'bad.py'}:kernel")


def test_a_triton_without_tools(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("triton.__file__", str(tmp_path / "__init__.py"))
    assert "cuobjdump is not in" in error(capsys, f"{FILE}:cast_kernel", *CAST, "BLOCK=64")
    assert build.ARGUMENTS_AT[9] == 0x210


@pytest.mark.parametrize("text", ["import triton\n", "x = 1\n"], ids=["imports it", "does not"])
def test_without_triton_the_command_says_how_to_get_it(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The wheel alone has none on a machine without a GPU; the file at hand cannot help it."""
    monkeypatch.setitem(sys.modules, "triton", None)
    file = tmp_path / "mine.py"
    file.write_text(text)
    assert main(["kernel", f"{file}:double"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "Triton is not installed: pip install 'fp8-harness[interpreter]'" in line
