"""False assurances: each planted situation gets no positive word, its twin without the planted thing gets it.

Oracle: the situations themselves, each of which differs from its twin by one switch. The page is the same list.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import page
import pytest
from situations import SITUATIONS, Place, Situation


@pytest.mark.parametrize("case", SITUATIONS, ids=lambda case: case.name)
def test_no_positive_word_where_it_would_be_false(
    case: Situation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = []
    for planted in (True, False):
        folder = tmp_path / ("planted" if planted else "twin")
        folder.mkdir()
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            patch.chdir(folder)
            answers.append(case.run(Place(folder, patch, capsys), planted))
        capsys.readouterr()
    assert case.instead != case.positive
    assert answers == [case.instead, case.positive]


def test_there_are_forty_over_all_commands() -> None:
    assert len(SITUATIONS) >= 40
    assert len({case.name for case in SITUATIONS}) == len(SITUATIONS)
    assert len({case.command for case in SITUATIONS}) >= 15


def test_the_page_is_that_of_the_situations() -> None:
    assert page.PATH.read_text(encoding="utf-8") == page.text()
    assert page.LIST.read_text(encoding="utf-8") == page.listed()
