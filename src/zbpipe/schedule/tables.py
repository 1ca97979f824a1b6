"""The reader of CSV tables: a row per rank, a cell per action, in both formats of torch's `_dump_csv`.

    0F0,0SEND_F0,,(0F1;3B0)OVERLAP_F_B,0W0

It also reads spaces around cells, lower case, and `None` for a bubble.
"""

from __future__ import annotations

import csv
import re
import reprlib

COMPUTATIONS = ("F", "I", "W", "B")
COPIES = ("OF", "RF", "OI", "RI")
MESSAGES = ("SEND_F", "SEND_B", "RECV_F", "RECV_B", "WAIT_SEND_F", "WAIT_SEND_B")
SHARDING = ("UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD")
"""Actions of a whole stage, without a microbatch."""

Cell = tuple[int, str, int]
"""Stage, kind, and microbatch (-1 where the action has none)."""

_NUMBER = "[0-9]{1,15}"
"""A stage or a microbatch. Longer numbers are mistakes."""
_KINDS = "|".join((*COMPUTATIONS, *COPIES, *MESSAGES))
_ACTION = re.compile(rf"({_NUMBER})(?:({'|'.join(SHARDING)})|({_KINDS})({_NUMBER}))", re.IGNORECASE | re.ASCII)
_MORE = "a table may also have torch's sends, receives, unshards and OVERLAP_F_B, and empty cells"
_OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B", re.IGNORECASE | re.ASCII)


def read(table: str) -> list[list[Cell]]:
    """The actions of each rank, in order. An overlapped pair becomes its two parts, one after the other.

        >>> read("0UNSHARD,,(0F1;0B0)OVERLAP_F_B")
        [[(0, 'UNSHARD', -1), (0, 'F', 1), (0, 'B', 0)]]
        >>> read("0F0, 0b0, None")
        [[(0, 'F', 0), (0, 'B', 0)]]

    ValueError if the text is not CSV, or a cell is not an action.
    """
    rows: list[list[Cell]] = []
    for rank, row in enumerate(cells(table)):
        rows.append([])
        for column, cell in enumerate(row):
            overlapped = _OVERLAPPED.fullmatch(cell.strip())
            for part in map(str.strip, overlapped[1].split(";") if overlapped else [cell]):
                if part.lower() in ("", "none"):
                    continue
                action = parse_action(part)
                if action is None:
                    at = f"row {rank + 1} (rank {rank}), column {column + 1}"
                    raise ValueError(f"{at}: {no_op(part)}; {_MORE}")
                rows[rank].append(action)
    return rows


def cells(table: str) -> list[list[str]]:
    """The cells of a CSV table, row by row, also with a byte order mark and other line ends."""
    if not isinstance(table, str):
        raise TypeError(
            f"a table is the text of a CSV file, got {reprlib.repr(table)}: zbpipe.generate takes the path of a file"
        )
    if "," not in table and "(" not in table and (separator := re.search(r"[;\t]|(?<=\w) +(?=\w)", table)):
        raise ValueError(f"{separator[0]!r} separates the cells of the table: save it with commas")
    try:
        return [row for row in csv.reader(table.removeprefix("\ufeff").splitlines()) if row]
    except csv.Error as error:
        raise ValueError(f"the table is not valid CSV: {error}") from None


def parse_action(text: str) -> Cell | None:
    """One action: stage, kind, microbatch (-1 if it has none). None if the text is not an action.

    >>> parse_action("3SEND_F0"), parse_action("3X0")
    ((3, 'SEND_F', 0), None)
    """
    match = _ACTION.fullmatch(text)
    if match is None:
        return None
    stage, sharding, kind, microbatch = match.groups()
    return int(stage), (sharding or kind).upper(), -1 if sharding else int(microbatch)


def no_op(text: object) -> str:
    """The error for a cell that should be an op."""
    return (
        f"{reprlib.repr(text)} is not an op: expected stage, one of F, I, W, B (or of the copies OF, RF, OI, RI), and"
        " microbatch, for example 3F0"
    )
