"""Tables of this project that are data: YAML files beside the modules that read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

# By libyaml, where it is built in: ten times as fast
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def beside(module: str, name: str) -> Any:
    """What a file says that lies beside a module, given by its `__file__`."""
    return yaml.load(Path(module).with_name(name).read_text(encoding="utf-8"), _LOADER)
