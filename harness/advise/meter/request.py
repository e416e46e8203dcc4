"""`python -m harness kernel FILE.py:NAME ...`: words of the command line -> a launch of somebody else's kernel."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.advise.meter.launches import Launch
from harness.store.errors import UsageError, unknown

if TYPE_CHECKING:
    from collections.abc import Sequence

TYPES = (
    "i1",
    "i8",
    "i16",
    "i32",
    "i64",
    "u1",
    "u8",
    "u16",
    "u32",
    "u64",
    "fp16",
    "bf16",
    "fp32",
    "fp64",
    "fp8e4nv",
    "fp8e5",
)
OPTIONS = {"num_warps": 4, "num_stages": 3, "num_ctas": 1}
ARCHS = (80, 86, 89, 90, 100, 120)


def load_kernel(word: str) -> Any:
    """The `triton.jit` function that FILE.py:NAME names.

    Raises:
        UsageError: no such file, it fails when it is imported, or NAME is not a function under `triton.jit`.
    """
    file, colon, name = word.rpartition(":")
    if not colon or not file or not name:
        raise UsageError(f"{word!r}: expected FILE.py:NAME, for example my_kernels.py:add_kernel")
    path = Path(file).expanduser()
    if not path.is_file():
        raise UsageError(f"{file}: no such file")
    module = _import(path)
    from triton.runtime.jit import JITFunction

    kernels = [n for n, value in vars(module).items() if isinstance(value, JITFunction)]
    found = getattr(module, name, None)
    while found is not None and not isinstance(found, JITFunction) and hasattr(found, "fn"):
        found = found.fn  # triton.autotune and triton.heuristics wrap it
    if not isinstance(found, JITFunction):
        what = (
            "there is no such name"
            if not hasattr(module, name)
            else f"it is a {type(getattr(module, name)).__name__}"
        )
        offered = (
            f"; kernels there: {', '.join(kernels)}"
            if kernels
            else "; the file has no function under triton.jit"
        )
        raise UsageError(f"{name} in {file} is not a function under triton.jit: {what}{offered}")
    return found


def _import(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"metered_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.resolve().parent))  # what it imports from beside itself
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"{path} cannot be imported: {type(error).__name__}: {_one_line(error)}") from error
    finally:
        sys.path.pop(0)
    return module


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def launch_of_words(kernel: Any, words: Sequence[str]) -> tuple[Launch, int]:
    """(launch, compute capability) from NAME=TYPE, NAME=TYPE:VALUE, NAME=CONSTANT and option words.

    Raises:
        UsageError: a word that is not understood, or a parameter without one.
    """
    given = _pairs(words)
    arch = _arch(given.pop("arch", "sm_90"))
    elements = _positive("elements", given.pop("elements", ""))
    moved = _positive("bytes", given.pop("bytes", "0"), least=0)
    grid = _grid(given.pop("grid", ""))
    options: dict[str, Any] = {
        name: _positive(name, given.pop(name, str(default)))
        for name, default in OPTIONS.items()
        if name not in kernel.arg_names
    }
    if options["num_warps"] & (options["num_warps"] - 1):
        raise UsageError(f"num_warps={options['num_warps']}: expected a power of two")
    if "fp_fusion" not in kernel.arg_names:  # Triton 3.9 warns where its default, true, is not said
        options["enable_fp_fusion"] = _constant("fp_fusion", given.pop("fp_fusion", "true"))
    for name in given:
        if name not in kernel.arg_names:
            raise unknown(
                "parameter",
                name,
                [*kernel.arg_names, *OPTIONS, "grid", "elements", "bytes", "arch", "fp_fusion"],
            )
    return _launch(kernel, given, options, grid, elements, float(moved)), arch


def _launch(
    kernel: Any,
    given: dict[str, str],
    options: dict[str, Any],
    grid: tuple[int, int, int],
    elements: int,
    moved: float,
) -> Launch:
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    values: list[Any] = []
    aligned: list[int] = []
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name] = "constexpr"
            if name in given:
                constants[name] = _constant(name, given[name])
            elif parameter.has_default:
                constants[name] = parameter.default
            else:
                raise UsageError(f"{name} is a tl.constexpr: give its value, for example {name}=128")
            continue
        if name not in given:
            raise UsageError(
                f"{name} is missing: give its type, for example {name}=*bf16, or {name}=i32:4096 with a value"
            )
        kind, colon, value = given[name].partition(":")
        if kind.removeprefix("*") not in TYPES:
            raise unknown(f"type of {name}", kind, [f"*{TYPES[10]}", *TYPES])
        is_pointer = kind.startswith("*")
        number = None if is_pointer or not colon else _number(name, kind, value)
        if is_pointer and colon:  # *bf16:1 says how far its address is aligned
            number = _positive(f"{name}'s alignment", value)
        if not is_pointer and number == 1 and kind.startswith(("i", "u")):
            signature[name], constants[name] = "constexpr", 1
            continue
        signature[name] = kind
        values.append("pointer" if is_pointer else number if number is not None else "unknown")
        by_16 = (
            number is None or number % 16 == 0 if is_pointer else isinstance(number, int) and number % 16 == 0
        )
        if by_16:
            aligned.append(index)
    return Launch(
        kernel.fn.__module__, kernel.fn.__name__, signature, constants, tuple(aligned), tuple(values), options, grid,
        elements=elements, bytes_moved=moved,
    )  # fmt: skip


def _pairs(words: Sequence[str]) -> dict[str, str]:
    given: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier() or not value:
            raise UsageError(
                f"{word!r}: expected NAME=VALUE, for example x_ptr=*bf16, M=i32:4096 or BLOCK=128"
            )
        if name in given:
            raise UsageError(f"{name} is given twice")
        given[name] = value
    return given


def _arch(text: str) -> int:
    found = re.fullmatch(r"(?:sm_?)?(\d+)a?", text)
    if not found or int(found[1]) not in ARCHS:
        raise unknown("arch", text, [f"sm_{arch}" for arch in ARCHS])
    return int(found[1])


def _grid(text: str) -> tuple[int, int, int]:
    if not text:
        return 0, 1, 1
    sizes = text.split(",")
    if len(sizes) > 3:
        raise UsageError(f"grid={text}: expected up to three sizes, for example grid=528 or grid=64,32")
    x, y, z = ([_positive("grid", size) for size in sizes] + [1, 1])[:3]
    return x, y, z


def _positive(name: str, text: str, least: int = 1) -> int:
    if not text:
        return 0
    if not text.isdigit() or int(text) < least:
        raise UsageError(f"{name}={text}: expected an integer of at least {least}")
    return int(text)


def _number(name: str, kind: str, text: str) -> int | float:
    try:
        return float(text) if kind.startswith(("fp", "bf")) else int(text, 0)
    except ValueError:
        raise UsageError(f"{name}={kind}:{text}: {text!r} is not a number of type {kind}") from None


def _constant(name: str, text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    if text.startswith("tl."):
        import triton.language as tl

        found = getattr(tl, text[3:], None)
        if found is not None:
            return found
    raise UsageError(f"{name}={text}: expected a number, true, false, none, or a type such as tl.float32")
