"""What a Hugging Face `config.json` says of a model's matrices, without weights: names, shapes, how many.

Through `transformers` on "meta" where it is installed (`hugging_face_meta`); else from the fields, for the model types of
`hugging_face_types`, under the names that transformers gives. Of a model with pictures it is the part for text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.store.errors import UsageError, one_line, unknown

if TYPE_CHECKING:
    from collections.abc import Mapping

FILE = "config.json"
LINEAR, ROUTER, EXPERTS = "linear", "router", "experts"
_SHARED = ({"q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa"}, {"gate_proj", "up_proj"})
_MOST = 2**40  # of a size


@dataclass(frozen=True, slots=True)
class Part:
    """A matrix that multiplies.

    Attributes:
        name: as transformers names it.
        K, N: input and output features.
        kind: "linear"; "router", which picks experts and stays in high precision; "experts", of which each token uses some.
        count: experts of this shape; else 1.
    """

    name: str
    K: int
    N: int
    kind: str = LINEAR
    count: int = 1

    @property
    def elements(self) -> int:
        """Weights of all its matrices."""
        return self.K * self.N * self.count

    @property
    def reads(self) -> str:
        """The same for parts that read one tensor."""
        before, _, word = self.name.rpartition(".")
        group = next((str(i) for i, words in enumerate(_SHARED) if word in words), word)
        return f"{before}.{group}"


@dataclass(frozen=True, slots=True)
class HfModel:
    """A model of a `config.json`.

    Attributes:
        name: the path that was given.
        parts: in the order of use.
        parameters: all weights.
        blocks: repeated ones.
        top_k: experts that each token uses; 0 without experts.
        max_seq: longest sequence; None where the file doesn't say.
    """

    name: str
    parts: tuple[Part, ...]
    parameters: int
    blocks: int
    top_k: int = 0
    max_seq: int | None = None


class Fields:
    """Fields of a `config.json`; one that is missing or no size is named."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where
        self.model_type = str(values.get("model_type", ""))

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number from 1.

        Raises:
            UsageError: it is missing and has no default, or it is none.
        """
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise UsageError(f"{self.where}: a {self.model_type} needs the field {key!r}, and it is missing")
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
            raise UsageError(f"{self.where}: {key}={value!r}; expected a whole number from 1")
        return value

    def count(self, key: str, default: int) -> int:
        """A whole number from 0."""
        return 0 if self.values.get(key, default) in (0, None) else self.size(key)

    def flag(self, key: str, default: bool) -> bool:
        """True or false.

        Raises:
            UsageError: anything else.
        """
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise UsageError(f"{self.where}: {key}={value!r}; expected true or false")
        return value

    def indices(self, key: str) -> frozenset[int]:
        """A list of blocks; none where it is missing."""
        value = self.values.get(key) or []
        if not isinstance(value, list) or not all(isinstance(index, int) for index in value):
            raise UsageError(f"{self.where}: {key}={value!r}; expected a list of whole numbers")
        return frozenset(value)


def is_config(text: str) -> bool:
    """Whether a person means a file or folder, and no name of a model."""
    return not text.lstrip().startswith("{") and (
        text.endswith(".json") or "/" in text or (Path(text) / FILE).is_file()
    )


def read(text: str) -> HfModel:
    """The model of a `config.json`, or of the folder that holds one.

    Raises:
        UsageError: no such file, no JSON mapping, an unknown `model_type`, or a field that is missing or no size.
    """
    from harness.training.models.hugging_face_meta import installed, parts_of
    from harness.training.models.hugging_face_types import TYPES

    fields = _fields(text)
    if installed():
        try:
            return parts_of(fields, text)
        except Exception as error:  # transformers raises what it likes
            if fields.model_type not in TYPES:
                raise UsageError(
                    f"{fields.where}: transformers cannot build it: {one_line(error)}"
                ) from error
    if fields.model_type not in TYPES:
        raise unknown(f"model_type in {fields.where}:", fields.model_type, TYPES)
    return TYPES[fields.model_type](fields, text)


def _fields(text: str) -> Fields:
    path = Path(text)
    path = path / FILE if path.is_dir() else path
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"model={text}: cannot read {path}: {error.strerror}; expected a Hugging Face {FILE} or its folder"
        ) from error
    except ValueError as error:
        raise UsageError(f"model={text}: {path} is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(f"model={text}: {path} holds a {type(values).__name__}; expected a mapping")
    if isinstance(values.get("text_config"), dict):
        outer = {key: values[key] for key in ("tie_word_embeddings",) if key in values}
        values = {"model_type": f"{values.get('model_type', '')}_text", **outer, **values["text_config"]}
    return Fields(values, str(path))


def total(parts: tuple[Part, ...]) -> int:
    """Weights of all parts."""
    return sum(part.elements for part in parts)
