"""What messages wait for, and when receives are posted, by the names that users write."""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class _Named(StrEnum):
    """Names that users write."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """The one called `text`, with spaces, dashes or underscores between the words.

            >>> Transport.parse("one-queue") is Transport.ONE_QUEUE
            True

        Raises:
            TypeError: `text` is no text.
            ValueError: there is no such name.
        """
        if not isinstance(text, str):
            raise TypeError(f"{cls.__name__.lower()}={text!r} is no text: use one of {_list_names(cls)}")
        try:
            return cls(text.lower().replace("-", " ").replace("_", " "))
        except ValueError:
            raise ValueError(f"{cls.__name__.lower()}={text!r} is unknown: use one of {_list_names(cls)}") from None


def _list_names(words: type[StrEnum]) -> str:
    return ", ".join(repr(each.value) for each in words)


class Transport(_Named):
    """What messages of a rank wait for, besides the computations that make them.

    >>> Transport.ONE_QUEUE == "one queue"
    True
    """

    IDEAL = "ideal"
    """Nothing: each leaves as soon as it is made."""
    ONE_QUEUE = "one queue"
    """All messages of a rank go one after the other, each from when both ends have come to it, as NCCL and RCCL send
    those of one process group."""
    QUEUE_PER_PEER = "queue per peer"
    """The same for the messages between two ranks, as with a process group for each edge of the pipeline."""
    SHARED = "shared with compute"
    """One queue, with the computations in it: a message that waits delays its rank. The worst case where
    streams share the hardware's queues, as they may on AMD's GPUs."""


class Receives(_Named):
    """When a rank posts its receives.

    >>> Receives.parse("Late") is Receives.LATE
    True
    """

    EARLY = "early"
    """As torch does: where the other rank sends, if all computations take the same time."""
    LATE = "late"
    """Before the computation that needs the message, or the next message of the rank."""
    TIMED = "timed"
    """Before the computation during which the message starts, by a simulation."""
    NEAREST = "nearest"
    """Between the two computations that are nearest to that, so that the rank does not wait for it for long."""
