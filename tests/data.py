"""Data that tests read from files beside them, which have headings: `== a heading`."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest


def text_of(file: str, heading: str) -> str:
    return Path(__file__).with_name(file).read_text().partition(f"== {heading}\n")[2].partition("\n== ")[0].strip()


def lines_of(file: str, heading: str) -> list[str]:
    return [line for line in text_of(file, heading).splitlines() if line]


def pairs(file: str, heading: str) -> list[tuple[str, str]]:
    return [(given, found) for given, _, found in (line.partition(" => ") for line in lines_of(file, heading))]


refusals = partial(pairs, "wrong_input.txt")
"""What is wrong, and parts of the error, with " ... " between them."""
expectations = partial(pairs, "expected.txt")


def assert_refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        call()
    assert has_words(str(error.value), words), f"{error.value!r} instead of {words!r}"


def has_words(error: str, words: str) -> bool:
    """Whether the parts of `words` are in the error, in their order."""
    return re.search(".*".join(map(re.escape, words.split(" ... "))), error, re.DOTALL) is not None
