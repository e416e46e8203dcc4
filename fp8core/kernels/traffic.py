"""Bytes that each operator moves for an element of its input: the quantity that decides FP8's worth.

Counted are the reads and writes of whole tensors, and scales that are stored. Not counted are single numbers
and what a cache answers: the amax that every program reads, a row's maxima between two passes. A test counts the
loads and stores that the kernels really issue in the interpreter and holds this table to them; on a GPU the
hardware's counters do.

Source of the limits: the closed form of break-even (docs/numerics.md); one 16-bit read, one 8-bit write for
each layout, and one more read where the scale needs the whole tensor first.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one operator moves.

    Attributes:
        read: times that a high-precision tensor of the input's size is read.
        codes: FP8 tensors of the input's size written.
        written: times that a high-precision one is written.
        scales: bytes of scales written for an element, for large matrices.
    """

    read: int
    codes: int = 0
    written: int = 0
    scales: float = 0.0

    def bytes_per_element(self, itemsize: int) -> float:
        """With high-precision elements of that many bytes."""
        return itemsize * (self.read + self.written) + self.codes + self.scales


TRAFFIC: dict[str, Traffic] = {
    "amax": Traffic(1),
    "amax_rows_cols": Traffic(1),
    "cast": Traffic(1, 1),
    "cast_both": Traffic(1, 2),
    "cast_delayed": Traffic(1, 1),
    "cast_delayed_both": Traffic(1, 2),
    "cast_rowwise": Traffic(1, 1),
    "cast_rowwise_both": Traffic(2, 2),
    "cast_1x128": Traffic(1, 1, scales=4 / 128),
    "cast_1x128_both": Traffic(1, 2, scales=2 * 4 / 128),
    "cast_128x128_both": Traffic(1, 2, scales=4 / 128**2),
    "cast_mx": Traffic(1, 1, scales=1 / 32),
    "cast_mx_both": Traffic(1, 2, scales=2 / 32),
    "rms_norm": Traffic(1, written=1),
    "rms_norm_amax": Traffic(1, written=1),
    "rms_norm_backward": Traffic(2, written=1),
    "add_rms_norm": Traffic(2, written=2),
    "add_rms_norm_amax": Traffic(2, written=2),
    "add_rms_norm_backward": Traffic(3, written=1),
    "swiglu": Traffic(2, written=1),
    "swiglu_amax": Traffic(2, written=1),
    "swiglu_backward": Traffic(3, written=2),
}
