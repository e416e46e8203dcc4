"""What is read from the machine code of one launch, and predicted from it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fp8core.kernels.occupancy import programs_per_processor
from harness.advise.meter import model, pipes, sass, walk
from harness.advise.meter.build import ARGUMENTS_AT, Built

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.advise.meter.launches import Launch

SAMPLED_PROGRAMS = 5  # spread evenly over the grid: the first and the last ones differ most


@dataclass(frozen=True)
class Facts:
    """What the machine code of one launch shows. Read without a GPU; only `share` is a prediction.

    Attributes:
        triton: version of the compiler.
        registers: of a thread.
        stack: bytes of a thread's stack: above 0 where registers spill.
        shared: bytes of a program's shared memory.
        ctas_per_sm: programs that an SM runs at a time.
        programs: of the grid.
        waves: programs / (CTAs per SM * SMs).
        per_element: instructions that all threads execute / elements.
        alu_per_element: of these, on the units that do integers, logic and packing conversions.
        conversions: elements converted to FP8 / elements.
        in_flight: most bytes that an SM has requested of global memory before it waits for them.
        waits: of a program for global memory.
        loads, stores: share of the bytes moved by accesses of so many bytes of a thread.
        code_bytes: read and written per element according to the code, masks taken as on.
        matrix: the matrix instruction, "" for none. Where there is one, counts of executed instructions are 0: no product
            is walked.
        busiest: the unit of the SM that is busy longest.
        share: of the copy bandwidth, by GPU; empty where the kernel multiplies matrices or nothing can be said.
        doubts: reasons why a figure is a bound, for people.
    """

    triton: str
    registers: int
    stack: int
    shared: int
    ctas_per_sm: int
    programs: int
    waves: float
    per_element: float
    alu_per_element: float
    conversions: float
    in_flight: int
    waits: float
    loads: dict[int, float]
    stores: dict[int, float]
    code_bytes: float
    matrix: str
    busiest: str
    share: dict[str, float]
    doubts: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data, from which `from_json` makes the same facts."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Facts:
        """The facts that `to_json` wrote."""
        widths = {name: {int(w): part for w, part in data[name].items()} for name in ("loads", "stores")}
        return Facts(**{**data, **widths, "doubts": tuple(data["doubts"])})


def read(
    built: Built, launch: Launch, capability: int = 90, processors: int = model.H200.processors
) -> Facts:
    """The facts of a launch.

    Args:
        built: its kernel, compiled for `capability`.
        launch: the arguments and the grid.
        capability: 10 * major + minor of the compute capability.
        processors: SMs of the GPU, for waves.

    Raises:
        UnreadableCodeError: the machine code cannot be followed.
    """
    code = sass.parse(built.sass)
    words, doubts = argument_words(built, launch, capability)
    warps = int(launch.options["num_warps"])
    matrix = sorted({i.opcode for i in code if pipes.is_matrix(i.opcode)})
    resident = programs_per_processor(built.registers, warps, built.shared, capability)
    grid = launch.grid
    if launch.walks:
        grid = (min(grid[0], max(1, resident) * processors), 1, 1)
    # A product is bound by its matrix units, which nothing here models: only what stands in the code is read.
    picked = [] if matrix else _spread(grid)
    walked = [walk.Walk(code, words, at, grid, 32 * warps, capability).run() for at in picked]
    programs = math.prod(grid)
    share_of_one = 1 / max(1, len(walked))
    opcodes: Counter[str] = sum((w.opcodes for w in walked), Counter())
    widths = {i.opcode: i.access_bytes for i in code}
    cycles = pipes.cycles(opcodes, widths)
    busiest = max(cycles, key=lambda unit: cycles[unit]) if walked else ""
    total = 32 * warps * programs * share_of_one  # times a count of `walked`: of all threads of the launch
    loaded: Counter[int] = sum((w.loaded for w in walked), Counter())
    stored: Counter[int] = sum((w.stored for w in walked), Counter())
    moved = (loaded.total() + stored.total()) * total
    waits = sum(w.waits for w in walked) * share_of_one
    doubts += _doubts(walked)
    bytes_moved = launch.bytes_moved or moved
    share: dict[str, float] = {}
    if walked and not doubts and bytes_moved and resident:
        busy = cycles[busiest] * share_of_one * warps / pipes.PARTITIONS
        work = model.Work(bytes_moved / programs, busy, waits, resident, programs)
        share = {gpu.name: model.share_of_copy(work, gpu) for gpu in model.GPUS}
    converted = 2 * sum(
        n for op, n in opcodes.items() if op.startswith("F2FP") and ("E4M3" in op or "E5M2" in op)
    )
    return Facts(
        triton=built.triton,
        registers=built.registers,
        stack=max(built.stack, built.local),
        shared=built.shared,
        ctas_per_sm=resident,
        programs=programs,
        waves=programs / (max(1, resident) * processors),
        per_element=sum(opcodes.values()) * total / launch.elements,
        alu_per_element=cycles["alu"] / 2 * total / launch.elements,
        conversions=converted * total / launch.elements,
        in_flight=max((w.in_flight for w in walked), default=0) * 32 * warps * resident,
        waits=waits,
        loads=_shares(loaded),
        stores=_shares(stored),
        code_bytes=moved / launch.elements,
        matrix=" ".join(matrix),
        busiest=busiest,
        share=share,
        doubts=tuple(doubts),
    )


def argument_words(built: Built, launch: Launch, capability: int) -> tuple[dict[int, int], list[str]]:
    """(arguments as 32-bit words by offset in constant bank 0, doubts)."""
    base = ARGUMENTS_AT.get(capability // 10)
    if base is None:
        return {}, [f"where sm_{capability} keeps arguments is not known"]
    values: list[int | None] = []
    for number, argument in enumerate(launch.arguments):
        if isinstance(argument, dict):  # a descriptor: itself, then its sizes and strides
            values += [None, *argument["shape"], *argument["strides"]]
        elif isinstance(argument, str):
            values.append(0x7F00_0000_0000 + (number << 36))
        elif isinstance(argument, float):
            values.append(None)
        else:
            values.append(int(argument))
    places = built.places(base)
    if len(places) < len(values):
        return {}, [f"the code takes {len(places)} parameters, the launch gives {len(values)}"]
    words: dict[int, int] = {}
    for (at, size), value in zip(places, values, strict=False):
        for i in range(0, size if value is not None else 0, 4):
            words[at + i] = int(value or 0) >> (8 * i) & 0xFFFF_FFFF
    return words, []


def _spread(grid: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    x, y, z = grid
    total = x * y * z
    count = min(SAMPLED_PROGRAMS, total)
    picked = sorted({round(i * (total - 1) / max(1, count - 1)) for i in range(count)})
    return [(i % x, i // x % y, i // (x * y)) for i in picked]


def _shares(moved: Counter[int]) -> dict[int, float]:
    total = sum(moved.values())
    return {size: count / total for size, count in sorted(moved.items(), reverse=True)}


def _doubts(walked: Sequence[walk.Executed]) -> list[str]:
    ends = {address: why for w in walked for address, why in w.open_loops.items()}
    return [
        f"the loop that ends at {address:#x} depends on {'data' if why == 'load' else why}: its instructions are counted once"
        for address, why in sorted(ends.items())
    ]
