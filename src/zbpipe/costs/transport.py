"""Transports of messages and times of receives, and how users name these and other choices."""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class Named(StrEnum):
    @classmethod
    def parse(cls, text: str) -> Self:
        """The member called `text`, with spaces, dashes or underscores between the words.

        >>> Transport.parse("one-queue") is Transport.ONE_QUEUE
        True
        """
        names = f"use one of {cls.names()}"
        if not isinstance(text, str):
            raise TypeError(f"{cls.__name__.lower()}={text!r} is not a string: {names}")
        try:
            return cls(text.lower().replace("-", " ").replace("_", " "))
        except ValueError:
            raise ValueError(f"{cls.__name__.lower()}={text!r} is unknown: {names}") from None

    @classmethod
    def names(cls) -> str:
        return ", ".join(repr(each.value.replace(" ", "-")) for each in cls)


class Transport(Named):
    """Dependencies of a rank's messages, besides the computations that produce them."""

    IDEAL = "ideal"
    """Nothing: each message leaves as soon as it is computed."""
    ONE_QUEUE = "one queue"
    """All messages of a rank go one after the other, each when both ends have reached it, as with NCCL and RCCL."""
    QUEUE_PER_PEER = "queue per peer"
    """One queue for the messages between two ranks, as with a communicator or a process group for each pair."""
    SHARED = "shared with compute"
    """One queue that includes the computations: a message that waits delays its rank, as where drivers and variables
    make streams share the hardware's queues."""
    BLOCKING = "blocking"
    """An op ends when its message has arrived, as in Megatron's interleaved schedules without overlap."""

    @property
    def has_queues(self) -> bool:
        """Whether it makes a difference when a rank posts its receives."""
        return self not in (Transport.IDEAL, Transport.BLOCKING)


class Receives(Named):
    """When a rank posts its receives."""

    EARLY = "early"
    """As in torch: where the other rank sends, if all computations take the same time."""
    LATE = "late"
    """Before the computation that needs the message, or before the next message of the rank."""
    TIMED = "timed"
    """Before the computation during which the message starts, according to a simulation."""
    NEAREST = "nearest"
    """Between the two computations nearest to that start, so that the rank does not wait long."""
    RENDEZVOUS = "rendezvous"
    """Between computations, where both ranks are free first. The simulation lets each message block both ranks."""
