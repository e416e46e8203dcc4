"""Whether Triton's interpreter works with the NumPy that is here, for tests that start one."""

from __future__ import annotations

import inspect
import warnings

import numpy as np
from triton.runtime import interpreter

CANNOT_LOOP = "this Triton's interpreter needs NumPy < 2.4; install either anew"


def interpreter_cannot_loop() -> bool:
    """Triton 3.6's interpreter makes an integer of an array of one element, which NumPy 2.4 refuses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            int(np.ones(1))  # the question is whether it raises
        except TypeError:
            return "int(self.handle.data))" in inspect.getsource(interpreter)
    return False
