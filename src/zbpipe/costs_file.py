"""Measured costs in a file, as TOML or JSON. docs/costs-file.md describes it."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from itertools import chain, groupby, islice
from math import inf, isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any

from zbpipe.costs import CostModel, Link, require_amounts, shares_within
from zbpipe.files import read_text
from zbpipe.ir import Placement
from zbpipe.layer_costs import MOST_LAYERS, Layer, LayerCosts
from zbpipe.transport import Transport

_TIMES = ("f", "i", "w", "activations")
_NUMBERED = re.compile("(.*[^0-9]|)([0-9]+)")


@dataclass(frozen=True)
class JobCosts:
    """What a cost file says.

    Raises:
        ValueError: a placement with another number of stages than the costs, or beside costs of layers; limits for
            another number of ranks than the placement has, or limits that are negative or not finite.
    """

    costs: CostModel | LayerCosts
    """Of the stages, or of the layers from which stages are cut."""
    placement: Placement | None = None
    """Where the stages are, if the costs are those of one placement only."""
    memory_bytes: float | tuple[float, ...] | None = None
    """What a rank, or each of them, can hold of activations, in the unit of `activations`."""
    transport: Transport | None = None
    """What messages wait for; None where that is not known."""

    def __post_init__(self) -> None:
        memory = self.memory_bytes if isinstance(self.memory_bytes, tuple) else (self.memory_bytes,)
        require_amounts("a job", memory_bytes=(limit for limit in memory if limit is not None))
        if self.placement is None:
            return
        if not isinstance(self.costs, CostModel):
            raise ValueError(f"rank_of = {list(self.placement.rank_of)} places stages, but the costs are of layers")
        if self.placement.num_stages != self.costs.num_stages:
            raise ValueError(
                f"rank_of = {list(self.placement.rank_of)} places {self.placement.num_stages} stages, but the costs"
                f" are of {self.costs.num_stages}"
            )
        self.require_ranks(self.placement.num_ranks)

    def require_ranks(self, ranks: int) -> None:
        """Refuse limits for another number of ranks, and links to ranks that there are not.

        Raises:
            ValueError: what does not fit to `ranks` pipeline ranks.
        """
        if self.placement is not None and self.placement.num_ranks != ranks:
            raise ValueError(
                f"rank_of = {list(self.placement.rank_of)} is for {self.placement.num_ranks} ranks, but the job has"
                f" {ranks}"
            )
        if isinstance(self.memory_bytes, tuple) and len(self.memory_bytes) != ranks:
            raise ValueError(
                f"memory_bytes = {list(self.memory_bytes)} has to be one number, or one for each of the {ranks} ranks"
            )
        for sender, receiver in self.costs.links:
            if max(sender, receiver) >= ranks:
                raise ValueError(f"links has one from {sender} to {receiver}, but the ranks are 0 to {ranks - 1}")

    @property
    def memory_limit(self) -> Callable[[Placement, CostModel], tuple[float, ...]] | None:
        """`memory_bytes` as `zbpipe.plan` takes it."""
        return None if self.memory_bytes is None else partial(shares_within, self.memory_bytes)


def require_ending(path: str | Path) -> None:
    """Refuse a cost file that is neither TOML nor JSON by its name.

    Raises:
        ValueError: another ending than .toml or .json.
    """
    if Path(path).suffix not in (".toml", ".json"):
        raise ValueError(f"cost file {str(path)!r} has to end in .toml or .json")


def load(path: str | Path) -> JobCosts:
    """Read a cost file, by its ending TOML (.toml) or JSON (.json).

    Raises:
        ValueError: the file cannot be read or is neither, or something in it is unknown, missing, of the wrong type
            or of the wrong length; the message names file, key and value.
    """
    path = Path(path)
    require_ending(path)
    try:
        text = read_text(path)
        data = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise ValueError(f"cost file {str(path)!r} cannot be read: {error.strerror}") from None
    except RecursionError:
        raise ValueError(f"cost file {str(path)!r} nests its values too deep: it needs tables of lists only") from None
    except ValueError as error:
        raise ValueError(f"cost file {str(path)!r} is no {path.suffix[1:].upper()}: {error}") from None
    try:
        return from_data(data)
    except ValueError as error:
        raise ValueError(f"cost file {str(path)!r}: {error}") from None


def dump(job: JobCosts, path: str | Path) -> None:
    """Write a cost file, by its ending TOML (.toml) or JSON (.json), that `load` reads as equal.

    Raises:
        ValueError: another ending.
    """
    path = Path(path)
    require_ending(path)
    data = to_data(job)
    path.write_text(_toml(data) if path.suffix == ".toml" else json.dumps(data, indent=2) + "\n", encoding="utf-8")


def from_data(data: Any) -> JobCosts:
    """What the file's tables, as dictionaries, mean.

    Raises:
        ValueError: as `load`.
    """
    table = _Table(data)
    memory = table.take("memory_bytes", "a number of bytes, or a list with one per rank", _number_or_numbers, None)
    shared = {
        "freed_by_i": table.take("freed_by_i", "a number up to 1, or a list with one for each stage", _shares, 0.0),
        "message_bytes": table.take("message_bytes", "a number from zero on", _number, 0.0),
        "link": _link(table.table("link")),
        "links": _links(table.tables("links")),
    }
    transport = table.take("transport", "one of " + ", ".join(map(repr, map(str, Transport))), _transport, None)
    stages, layers = table.table("stages"), table.tables("layers")
    table.close()
    if bool(stages.data) == bool(layers):
        raise ValueError("it needs either a table [stages] or tables [[layers]]" + (", not both" if layers else ""))
    if layers and isinstance(shared["freed_by_i"], tuple):
        raise ValueError(
            f"freed_by_i = {list(shared['freed_by_i'])} has a number for each stage, but the costs are of layers: give"
            " one number"
        )
    if layers:
        # One more than there may be is enough to be refused: `count` can be any number.
        some = islice(chain.from_iterable(map(_layers, layers)), MOST_LAYERS + 1)
        return JobCosts(LayerCosts(tuple(some), **shared), None, memory, transport)
    rank_of = stages.take("rank_of", "a list with the rank of each stage", _whole_numbers, None)
    columns = [stages.take(name, "a list with a number from zero on for each stage", _numbers) for name in _TIMES]
    stages.close()
    for name, column in zip(_TIMES, columns, strict=True):
        if len(column) != len(columns[0]):
            raise ValueError(
                f"[stages] {name} has {len(column)} numbers, but f has {len(columns[0])}: give one a stage"
            )
    return JobCosts(CostModel(*columns, **shared), Placement(rank_of) if rank_of else None, memory, transport)


def to_data(job: JobCosts) -> dict[str, Any]:
    """The tables of the file, as dictionaries; what has its default is left out."""
    costs = job.costs
    data: dict[str, Any] = {}
    if costs.freed_by_i:
        data["freed_by_i"] = list(costs.freed_by_i) if isinstance(costs.freed_by_i, tuple) else costs.freed_by_i
    if costs.message_bytes:
        data["message_bytes"] = costs.message_bytes
    if job.memory_bytes is not None:
        data["memory_bytes"] = list(job.memory_bytes) if isinstance(job.memory_bytes, tuple) else job.memory_bytes
    if job.transport is not None:
        data["transport"] = str(job.transport)
    if link := _link_data(costs.link):
        data["link"] = link
    if costs.links:
        data["links"] = [
            {"from": sender, "to": receiver, **_link_data(link)} for (sender, receiver), link in costs.links.items()
        ]
    if isinstance(costs, CostModel):
        placed = {"rank_of": list(job.placement.rank_of)} if job.placement else {}
        data["stages"] = {**placed, **{name: list(getattr(costs, name)) for name in _TIMES}}
    else:
        data["layers"] = [_run_data(run) for run in _runs(costs.layers)]
    return data


_REQUIRED = object()


class _Table:
    """A table of the file, out of which every key is taken once; what is left is a mistake."""

    def __init__(self, data: Any, name: str = "") -> None:
        if not isinstance(data, dict):
            raise ValueError(f"{name or 'the file'} has to be a table of keys and values, got {data!r}")
        self.data = dict(data)
        self.name = name
        self.known: list[str] = []

    def take(self, key: str, expected: str, read: Any, default: Any = _REQUIRED) -> Any:
        """The value of `key`, by `read`, which returns None for one that is not as `expected`."""
        self.known.append(key)
        if key not in self.data:
            if default is _REQUIRED:
                raise ValueError(f"{self._at(key)} is missing: expected {expected}")
            return default
        value = self.data.pop(key)
        taken = read(value)
        if taken is None:
            raise ValueError(f"{self._at(key)} = {value!r}: expected {expected}")
        return taken

    def table(self, key: str) -> _Table:
        """The table under `key`; an empty one if there is none."""
        self.known.append(key)
        return _Table(self.data.pop(key, {}), f"[{key}]")

    def tables(self, key: str) -> list[_Table]:
        """The list of tables under `key`."""
        self.known.append(key)
        rows = self.data.pop(key, [])
        if not isinstance(rows, list):
            raise ValueError(f"{key} = {rows!r}: expected a list of tables, in TOML [[{key}]]")
        return [_Table(row, f"[[{key}]] number {number}") for number, row in enumerate(rows, start=1)]

    def close(self) -> None:
        """Refuse keys that nobody asked for."""
        for key, value in self.data.items():
            near = get_close_matches(key, self.known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(self.known)}"
            raise ValueError(f"{self._at(key)} = {value!r}: unknown key; {hint}")

    def _at(self, key: str) -> str:
        return f"{self.name} {key}".strip()


def _number(value: Any) -> float | None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    try:
        return float(value) if isfinite(value) and value >= 0 else None
    except OverflowError:  # a whole number with hundreds of digits
        return None


def _positive(value: Any) -> float | None:
    return _number(value) or None


def _share(value: Any) -> float | None:
    kept = _number(1 - value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    return None if kept is None else float(value)


def _shares(value: Any) -> float | tuple[float, ...] | None:
    shares = tuple(map(_share, value)) if isinstance(value, list) and value else (None,)
    return (None if None in shares else shares) if isinstance(value, list) else _share(value)  # type: ignore[return-value]


def _numbers(value: Any) -> tuple[float, ...] | None:
    numbers = tuple(map(_number, value)) if isinstance(value, list) and value else (None,)
    return None if None in numbers else numbers  # type: ignore[return-value]


def _number_or_numbers(value: Any) -> float | tuple[float, ...] | None:
    return _numbers(value) if isinstance(value, list) else _number(value)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _count(value: Any) -> int | None:
    return _whole(value) or None


def _whole_numbers(value: Any) -> tuple[int, ...] | None:
    numbers = tuple(map(_whole, value)) if isinstance(value, list) and value else (None,)
    return None if None in numbers else numbers  # type: ignore[return-value]


def _transport(value: Any) -> Transport | None:
    try:
        return Transport.parse(value) if isinstance(value, str) else None
    except ValueError:
        return None


def _names(value: Any) -> tuple[str, ...] | None:
    fits = isinstance(value, list) and value and all(isinstance(name, str) for name in value)
    return tuple(value) if fits else None


def _link(table: _Table) -> Link:
    latency = table.take("latency", "seconds, a number from zero on", _number, 0.0)
    bandwidth = table.take("bandwidth", "bytes per second, a number above zero", _positive, inf)
    table.close()
    return Link(latency, bandwidth)


def _links(tables: Iterable[_Table]) -> Mapping[tuple[int, int], Link]:
    links: dict[tuple[int, int], Link] = {}
    for table in tables:
        sender, receiver = (table.take(key, "a rank, from 0 on", _whole) for key in ("from", "to"))
        if (sender, receiver) in links:
            raise ValueError(f"{table.name} from = {sender}, to = {receiver}: this link is there already")
        links[sender, receiver] = _link(table)
    return MappingProxyType(links)


def _link_data(link: Link) -> dict[str, float]:
    """What differs from a link that takes no time."""
    latency = {"latency": link.latency} if link.latency else {}
    return latency | ({"bandwidth": link.bandwidth} if isfinite(link.bandwidth) else {})


def _layers(table: _Table) -> Iterable[Layer]:
    """A layer, or `count` of them with the number in their name counted up."""
    modules = table.take("modules", "a list of names, for example ['norm', 'lm_head']", _names)
    count = table.take("count", "a whole number from 1 on", _count, None)
    numbers = [table.take(name, "a number from zero on", _number) for name in _TIMES]
    table.close()
    if count is None:
        return [Layer(modules, *numbers)]
    match = _NUMBERED.fullmatch(modules[0]) if len(modules) == 1 else None
    if match is None:
        raise ValueError(
            f"{table.name} modules = {list(modules)!r}: expected one name that ends in a number, for example"
            f" ['layers.0'], because count = {count} counts it up"
        )
    first = int(match[2])
    return (Layer((f"{match[1]}{number}",), *numbers) for number in range(first, first + count))


def _runs(layers: Sequence[Layer]) -> list[list[Layer]]:
    """Layers in a row that a single table can tell: alike but for the number that their name counts up."""

    def alike(numbered: tuple[int, Layer]) -> object:
        position, layer = numbered
        match = _NUMBERED.fullmatch(layer.modules[0]) if len(layer.modules) == 1 else None
        # What is written otherwise than counted, like layers.01, stands alone.
        if match is None or match[2] != str(int(match[2])):
            return position
        return replace(layer, modules=(match[1],)), int(match[2]) - position

    return [[layer for _, layer in run] for _, run in groupby(enumerate(layers), key=alike)]


def _run_data(run: Sequence[Layer]) -> dict[str, Any]:
    count = {"count": len(run)} if len(run) > 1 else {}
    return {"modules": list(run[0].modules), **count, **{name: getattr(run[0], name) for name in _TIMES}}


def _toml(data: Mapping[str, Any]) -> str:
    """Numbers, strings and lists first, then tables, then lists of tables, as `to_data` has them."""
    lines = []
    for key, value in data.items():
        if isinstance(value, dict):
            lines += ["", f"[{key}]", *map(_line, value.items())]
        elif isinstance(value, list) and isinstance(value[0], dict):
            lines += [line for row in value for line in ("", f"[[{key}]]", *map(_line, row.items()))]
        else:
            lines.append(_line((key, value)))
    return "\n".join(lines).lstrip() + "\n"


def _line(pair: tuple[str, Any]) -> str:
    # Of what stands in the file, JSON's and TOML's notations agree.
    return f"{pair[0]} = {json.dumps(pair[1], ensure_ascii=False)}"
