"""The corpora by name: their bytes, their checks, what they say of a bad file; and batches, pure functions of their arguments."""

from __future__ import annotations

import hashlib
import io
import urllib.error
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.__main__ import main
from harness.store.errors import UsageError
from harness.training import data
from harness.training.data import corpus, corpus_info, shakespeare, stdlib, stdlib_files
from harness.training.data.corpus import Corpus, split


def test_only_the_distributions_own_files(tmp_path: Path) -> None:
    """Oracle: a folder made by hand."""
    for name in (
        "os.py",
        "json/decoder.py",
        "json/tests/test_x.py",
        "site-packages/os.py",
        "mine.py",
        "os.txt",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    assert stdlib_files(tmp_path) == ["json/decoder.py", "os.py"]
    assert bytes(stdlib(tmp_path).train) == b"json/decoder.pyos.py"[:18]
    with pytest.raises(UsageError, match=r"no Python sources in .*; take data=bytes"):
        stdlib(tmp_path / "site-packages" / "none")


def test_shakespeare_that_is_another_text(tmp_path: Path) -> None:
    path = tmp_path / "input.txt"
    path.write_text("To be, or not to be\n")
    with pytest.raises(UsageError, match=r"20 bytes with sha256 .*, expected 86c4e6aa.*take data=bytes"):
        corpus("shakespeare", path)


class TestDownload:
    """The cache and the public address; no test touches the network."""

    @pytest.fixture(autouse=True)
    def _own_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def answer(self, monkeypatch: pytest.MonkeyPatch, text: bytes | OSError) -> list[str]:
        """What the address will say; returns the addresses that are asked."""
        asked = []

        def urlopen(address: str, timeout: float) -> Any:
            asked.append(address)
            assert timeout > 0
            if isinstance(text, OSError):
                raise text
            return io.BytesIO(text)

        monkeypatch.setattr("urllib.request.urlopen", urlopen)
        return asked

    def test_a_run_without_its_text_ends_before_it_starts(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        asked = self.answer(monkeypatch, urllib.error.URLError("no network"))
        monkeypatch.chdir(tmp_path)
        assert main(["sweep=nanogpt_char", "device=cpu", "isolate=false"]) == 2
        assert asked == [shakespeare.ADDRESS]
        assert "cannot be downloaded" in capsys.readouterr().err
        assert not list(tmp_path.glob("results/**/*.parquet"))

    @pytest.mark.parametrize("writable", [True, False])
    def test_a_text_is_asked_for_once_where_it_can_be_kept(
        self, writable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Oracle: nanoGPT's prepare.py: places in the sorted characters; of a text whose hash is pinned here."""
        text = "to be, or not to be\n" * 10
        monkeypatch.setattr(shakespeare, "SHA256", hashlib.sha256(text.encode()).hexdigest())
        asked = self.answer(monkeypatch, text.encode())
        if not writable:
            (tmp_path / "cache").write_text("a file where the folder should be")
        found = shakespeare.load()
        ids = [sorted(set(text)).index(character) for character in text]
        assert [*found.train, *found.heldout] == ids
        assert (found.vocab_size, len(found.heldout)) == (len(set(text)), 20)
        if writable:
            assert shakespeare.load().train.tolist() == found.train.tolist()
            (kept,) = shakespeare.cache_folder().iterdir()  # nothing half-written
            assert shakespeare.load(kept).vocab_size == found.vocab_size
        assert asked == [shakespeare.ADDRESS]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (urllib.error.URLError("unknown name"), r"cannot be downloaded .*give a copy by data_path=FILE"),
            (b"<html>404</html>", "is not nanoGPT's text: 16 bytes"),
        ],
    )
    def test_what_is_no_text_is_refused_and_not_kept(
        self, text: Any, message: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.answer(monkeypatch, text)
        with pytest.raises(UsageError, match=message):
            shakespeare.load()
        assert not shakespeare.cache_folder().exists()


def write(path: Path, ids: list[int]) -> Path:
    np.array(ids, dtype="<u2").tofile(path)
    return path


def test_bin_file(tmp_path: Path) -> None:
    """Oracle: the ids that were written; memory-mapped; sha256 of the file."""
    path = write(tmp_path / "tokens.bin", [*range(100), *range(50200, 50257)])
    found = corpus("bin", path, vocab_size=50257)
    assert isinstance(found.train.base, np.memmap)
    assert [*found.train, *found.heldout] == [*range(100), *range(50200, 50257)]
    assert len(found.train) == 141
    assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert found.batch(0, 0, 2, 8)[0].max() < 50257


def test_bin_folder(tmp_path: Path) -> None:
    """Oracle: nanoGPT's layout: train.bin and val.bin as they are."""
    write(tmp_path / "train.bin", [1, 2, 3])
    write(tmp_path / "val.bin", [4, 5])
    found = corpus("bin", tmp_path, vocab_size=6)
    assert (found.train.tolist(), found.heldout.tolist()) == ([1, 2, 3], [4, 5])


def test_bin_checks_every_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: one id beyond the vocabulary, at each place of a file that is read in pieces of 4."""
    monkeypatch.setattr(data, "_PIECE", 4)
    for place in range(11):
        ids = [0] * 11
        ids[place] = 7
        path = write(tmp_path / f"{place}.bin", ids)
        with pytest.raises(UsageError, match=f"holds token id 7 at position {place}; the vocabulary has 7"):
            corpus("bin", path, vocab_size=7)
        assert corpus("bin", path, vocab_size=8).vocab_size == 8


def test_random_tokens_are_of_the_whole_vocabulary() -> None:
    """By hand: of a million draws below 128,256 each part of the vocabulary has its share; the same at every reading."""
    found = corpus("random", vocab_size=128_256)
    assert found.vocab_size == 128_256
    assert found.train.dtype == np.dtype(np.uint32)
    assert np.histogram(found.train, 4, (0, 128_256))[0] == pytest.approx(len(found.train) / 4, rel=0.01)
    (tokens, targets), again = found.batch(3, 0, 2, 16), corpus_info("random", vocab_size=128_256)
    assert tokens[:, 1:].equal(targets[:, :-1])
    assert again.sha256 == found.sha256 != corpus("random", vocab_size=7).sha256


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("stdlb",), r"unknown data 'stdlb' \(nearest: stdlib\)"),
        (("bytes",), "data=bytes needs a file: data_path=FILE"),
        (("bin",), "data=bin needs a file"),
        (("random",), "needs the size of its vocabulary"),
        (("random", __file__, 7), "takes no path"),
        (("bin", __file__), "needs the size of its vocabulary"),
        (("stdlib", __file__), "takes no path"),
        (("shakespeare", "/nowhere/input.txt"), "no file /nowhere/input.txt"),
        (("bytes", "{folder}"), "cannot read"),
        (("bin", "{folder}", 7), "val.bin"),
        (("bin", "{folder}/empty", 7), "has 0 bytes"),
        (("bin", "{folder}/odd", 7), "has 3 bytes; expected uint16"),
    ],
)
def test_refusals(arguments: tuple[Any, ...], message: str, tmp_path: Path) -> None:
    write(tmp_path / "train.bin", [1])
    (tmp_path / "empty").touch()
    (tmp_path / "odd").write_bytes(b"abc")
    given = [str(each).format(folder=tmp_path) if isinstance(each, str) else each for each in arguments]
    with pytest.raises(UsageError, match=message):
        corpus(*given)


def counting(length: int = 1000) -> Corpus:
    """Token i is i, so a window shows where it was cut."""
    return split("counting", length, "", np.arange(length, dtype=np.uint16))


def test_windows_and_targets() -> None:
    """Oracle: the text itself: a window counts up by one and its targets are one further on."""
    corpus = counting()
    x, y = corpus.batch(7, 3, 64, 16)
    assert x.shape == y.shape == (64, 16)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal(y, x + 1)
    assert torch.equal(x, x[:, :1] + torch.arange(16))
    assert y.max() < 900  # the last tenth is held out
    assert x.is_contiguous()
    assert y.is_contiguous()


def test_known_places() -> None:
    """Oracle: numpy's Philox with the key (seed, step), drawn here anew; a stored number guards against a change of
    numpy's stream."""
    places = np.random.Generator(np.random.Philox(key=[2, 11])).integers(0, 900 - 16, 4)
    assert counting().batch(11, 2, 4, 16)[0][:, 0].tolist() == places.tolist() == [779, 266, 600, 359]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: counting(10).batch(0, 0, 1, 9), "training part has 9 tokens, a window needs 9 and a target; .* seq=8 at most"),
        (lambda: counting(0).batch(0, 0, 1, 4), "the training part has 0 tokens"),
        (lambda: counting(100).heldout_batches(1, 1, 16), "data=counting: the held-out part has 10 tokens"),
    ],
)  # fmt: skip
def test_what_has_no_batch_is_refused(call: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call()
