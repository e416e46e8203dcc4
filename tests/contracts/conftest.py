"""Runs that several contract tests look at, each measured once."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import CAST, HERE, QUICKLY, TRAIN, Ended, run, with_model


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Two cases of one arm, by worker processes, as a user runs them."""
    return run(tmp_path_factory.mktemp("measured"), *CAST, *QUICKLY)


@pytest.fixture(scope="session")
def measured_again(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The same cases once more, in one process, with other words for the folders."""
    folder = tmp_path_factory.mktemp("again")
    return run(
        folder, *CAST, *QUICKLY, HERE, "results_dir=kept/rows", "reports_dir=kept/pages", "seed=7", "rounds=3"
    )


@pytest.fixture(scope="session")
def partly_failed(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Training steps of a user's model: one case runs, one fails."""
    return run(with_model(tmp_path_factory.mktemp("failed")), *TRAIN, HERE)


@pytest.fixture(scope="session")
def partly_skipped(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A product with an arm that a CPU lacks."""
    words = ["sweep=gemm", "axes.role=output", "axes.M=16", "axes.K=32", "axes.N=16", "device=cpu"]
    arms = "arms=[bf16_eager,tensorwise_eager,tensorwise_fast_eager]"
    return run(tmp_path_factory.mktemp("skipped"), *words, arms, *QUICKLY, HERE)


@pytest.fixture(scope="session")
def published() -> Path:
    """The committed runs."""
    return Path(__file__).parents[2] / "results" / "published"
