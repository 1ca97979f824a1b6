"""Data that tests read from files beside them, which have headings: `== a heading`."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest


def text_of(file: str, heading: str) -> str:
    return Path(__file__).with_name(file).read_text().partition(f"== {heading}\n")[2].partition("\n== ")[0].strip()


def lines_of(file: str, heading: str) -> list[str]:
    return [line for line in text_of(file, heading).splitlines() if line]


def refusals(heading: str) -> list[tuple[str, str]]:
    """Lines of wrong_input.txt: what is wrong, and parts of the error, with " ... " between them."""
    return [
        (given, words) for given, _, words in (line.partition(" => ") for line in lines_of("wrong_input.txt", heading))
    ]


def assert_refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        call()
    assert has_words(str(error.value), words), f"{error.value!r} instead of {words!r}"


def has_words(error: str, words: str) -> bool:
    """Whether the parts of `words` are in the error, in their order."""
    return re.search(".*".join(map(re.escape, words.split(" ... "))), error, re.DOTALL) is not None
