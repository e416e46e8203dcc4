"""Which half of the published figures a row belongs to: by a hash of its key, so that nobody chooses.

A key is what names a row before its figures are looked at: source, model, GPU and recipe. Rows that share all four fall into
the same half whatever else differs, so that no held-out row has a twin that was fitted. One third is held out.
"""

from __future__ import annotations

import hashlib

FITTED, HELD_OUT = "fitted", "held out"
_OF_256 = 86  # first bytes of the digest that are held out: a third


def half(source: str, model: str, gpu: str, recipe: str) -> str:
    """`FITTED` or `HELD_OUT`.

    >>> half("torchao docs, training workflow", "llama3_8b", "B200", "mxfp8")
    'held out'
    """
    digest = hashlib.sha256("|".join((source, model, gpu, recipe)).encode()).digest()
    return HELD_OUT if digest[0] < _OF_256 else FITTED
