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
        written: times that one is written.
        codes: FP8 tensors of the input's size written.
        scales: bytes of scales written for an element, for large matrices.
    """

    read: int
    written: int = 0
    codes: int = 0
    scales: float = 0.0

    def bytes_per_element(self, itemsize: int) -> float:
        """With high-precision elements of that many bytes."""
        return itemsize * (self.read + self.written) + self.codes + self.scales


TRAFFIC: dict[str, Traffic] = {
    "amax": Traffic(read=1),
    "amax_rows_cols": Traffic(read=1),
    "cast": Traffic(read=1, codes=1),
    "cast_both": Traffic(read=1, codes=2),
    "cast_delayed": Traffic(read=1, codes=1),
    "cast_delayed_both": Traffic(read=1, codes=2),
    "cast_rowwise": Traffic(read=1, codes=1),
    "cast_rowwise_both": Traffic(read=2, codes=2),
    "cast_1x128": Traffic(read=1, codes=1, scales=4 / 128),
    "cast_1x128_both": Traffic(read=1, codes=2, scales=2 * 4 / 128),
    "cast_128x128_both": Traffic(read=1, codes=2, scales=4 / 128**2),
    "cast_mx": Traffic(read=1, codes=1, scales=1 / 32),
    "cast_mx_both": Traffic(read=1, codes=2, scales=2 / 32),
    "rms_norm": Traffic(read=1, written=1),
    "rms_norm_amax": Traffic(read=1, written=1),
    "rms_norm_backward": Traffic(read=2, written=1),
    "add_rms_norm": Traffic(read=2, written=2),
    "add_rms_norm_amax": Traffic(read=2, written=2),
    "add_rms_norm_backward": Traffic(read=3, written=1),
    "swiglu": Traffic(read=2, written=1),
    "swiglu_amax": Traffic(read=2, written=1),
    "swiglu_backward": Traffic(read=3, written=2),
}

# A cast of a tensor from nothing, as the operators that it takes.
SCHEMES: dict[str, tuple[str, ...]] = {
    "tensorwise": ("amax", "cast"),
    "tensorwise both": ("amax", "cast_both"),
    "tensorwise both, producer has the amax": ("cast_both",),
    "delayed": ("cast_delayed",),
    "delayed both": ("cast_delayed_both",),
    "rowwise": ("cast_rowwise",),
    "rowwise both": ("cast_rowwise_both",),
    "1x128": ("cast_1x128",),
    "1x128 both": ("cast_1x128_both",),
    "128x128 both": ("cast_128x128_both",),
    "mx": ("cast_mx",),
    "mx both": ("cast_mx_both",),
}


def bytes_per_element(scheme: str, itemsize: int = 2) -> float:
    """Bytes moved for each element by a scheme of `SCHEMES` or an operator of `TRAFFIC`.

    >>> bytes_per_element("tensorwise both")  # amax 2, read 2, codes 1, transposed codes 1
    6.0

    Args:
        scheme: a key of either table.
        itemsize: bytes of a high-precision element, 2 for bfloat16.

    Raises:
        ValueError: unknown; the message lists the known names.
    """
    operators = SCHEMES.get(scheme, (scheme,))
    if any(name not in TRAFFIC for name in operators):
        raise ValueError(f"unknown scheme {scheme!r}; known: {', '.join([*SCHEMES, *TRAFFIC])}")
    return float(sum(TRAFFIC[name].bytes_per_element(itemsize) for name in operators))
