"""Reads text files from users, which may come from Excel or be far too large."""

from pathlib import Path

_MOST_BYTES = 2**25
"""Far more than any table or cost file has. A device file may never end."""


def read_text(path: str | Path) -> str:
    """The UTF-8 text of a file, without the byte order mark that Excel writes.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not UTF-8 text, or has more than 32 MiB.
    """
    with Path(path).open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES >> 20} MiB, too much for a schedule or for costs")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text: byte {error.start} is {data[error.start]:#04x}") from None
