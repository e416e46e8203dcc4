"""Tables of this project that are data: YAML and CSV files beside the modules that read them."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import yaml

# By libyaml, where it is built in: ten times as fast
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def beside(module: str, name: str) -> Any:
    """What a file says that lies beside a module, given by its `__file__`."""
    return yaml.load(Path(module).with_name(name).read_text(encoding="utf-8"), _LOADER)


def rows_beside(module: str, name: str) -> list[dict[str, str]]:
    """The rows of a CSV file that lies beside a module, by the names of its columns."""
    with Path(module).with_name(name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
