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
        """
        names = f"use one of {cls.names()}"
        if not isinstance(text, str):
            raise TypeError(f"{cls.__name__.lower()}={text!r} is no text: {names}")
        try:
            return cls(text.lower().replace("-", " ").replace("_", " "))
        except ValueError:
            raise ValueError(f"{cls.__name__.lower()}={text!r} is unknown: {names}") from None

    @classmethod
    def names(cls) -> str:
        """All names, as users write them on a command line."""
        return ", ".join(repr(each.value.replace(" ", "-")) for each in cls)


class Transport(_Named):
    """What messages of a rank wait for, besides the computations that make them."""

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
    """When a rank posts its receives."""

    EARLY = "early"
    """As torch does: where the other rank sends, if all computations take the same time."""
    LATE = "late"
    """Before the computation that needs the message, or the next message of the rank."""
    TIMED = "timed"
    """Before the computation during which the message starts, by a simulation."""
    NEAREST = "nearest"
    """Between the two computations that are nearest to that, so that the rank does not wait for it for long."""
    RENDEZVOUS = "rendezvous"
    """Between computations, where both ranks are free first, by a simulation in which each message holds up both."""
