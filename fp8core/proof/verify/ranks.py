"""Verdicts of all ranks on one call of `verify`.

Each rank writes its verdict, also where its step raised, and waits for the others'. One that does not answer in time is
named. Calls are numbered, so all ranks must call `verify` equally often. A rank that waits in vain says so in its own
place, where the late rank finds it instead of a verdict. A rank that skips a call within the timeout is not seen: the
group's own count of operations cannot tell it, since stages of a pipeline count different numbers of sends.
"""

from __future__ import annotations

from fp8core.distributed.messages import Messages

RANK_TIMEOUT_S = 300.0
GRADIENT = "gradient of "  # before a parameter's name


class Ranks(Messages):
    """One call of `verify` among those of all ranks."""

    def __init__(self) -> None:
        super().__init__("fp8core/verify")
        self.verdict = ""
        self.weights: dict[str, tuple[tuple[int, ...], int]] = {}
        self.alike: set[str] = set()
        self.gradients: set[str] = set()  # that differ

    def answer(self, verdict: str) -> None:
        """Writes this rank's verdict: "" for none against it, else a line; and the checksums of its weights."""
        self.verdict = verdict
        self.publish(str(self.rank), [verdict, self.weights])

    def problems(self, timeout_s: float) -> list[str]:
        """What the other ranks have against it, and which did not answer."""
        found: list[str] = []
        silent: list[int] = []
        self.alike = set(self.weights)
        for rank in range(self.size):
            if rank == self.rank:
                continue
            # Whoever is silent is waited for once
            heard = self.heard(str(rank), timeout_s if not silent else 0.1)
            verdict, weights = ("", {}) if heard is None else heard
            if heard is None:
                silent.append(rank)
            elif verdict:
                found.append(f"rank {rank}: {verdict}")
            unlike = [
                name
                for name, (sharers, value) in self.weights.items()
                if rank in sharers and weights.get(name) != [[*sharers], value]
            ]
            self.alike.difference_update(unlike)
            other = [name for name in unlike if name in weights]
            self.gradients.update(name for name in other if name.startswith(GRADIENT))
            if other := [name for name in other if not name.startswith(GRADIENT)]:
                found.append(
                    f"rank {rank} computed with another weight, bias or norm: {len(other)}, the first is {other[0]}"
                )
        if silent:
            missing = ", ".join(map(str, silent))
            late = f"ended this call without rank {missing}; all ranks must call verify equally often"
            self.answer("; ".join(filter(None, (self.verdict, late))))
            found.append(f"rank {missing} did not answer within {timeout_s:g} s")
        return found
