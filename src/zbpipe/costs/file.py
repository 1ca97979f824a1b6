"""Cost files: `JobCosts` as TOML or JSON. docs/costs-file.md describes the format."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any

from zbpipe.costs.job import JobCosts, MemoryLimit
from zbpipe.costs.layers import MOST_LAYERS, Layer, LayerCosts
from zbpipe.costs.model import COLUMNS, OF_DATA_PARALLELISM, CostModel, Link
from zbpipe.schedule.ir import COMPUTATIONS, OpKind, Placement, require_whole
from zbpipe.schedule.user_code import read_text

_NUMBERED = re.compile("(.*[^0-9]|)([0-9]+)")
_OF_LINK = ("latency", "bandwidth")
_Table = dict[str, Any]


def require_ending(path: str | Path) -> None:
    if not isinstance(path, (str, Path)):
        raise TypeError(f"a cost file is named by its path, got {path!r}")
    if Path(path).suffix not in (".toml", ".json"):
        raise ValueError(f"cost file {str(path)!r} has to end in .toml or .json")


def load_costs(path: str | Path) -> JobCosts:
    """Read a cost file, TOML or JSON, by its suffix (.toml or .json).

        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> text = "[stages]\\nf = [1, 1]\\ni = [1, 1]\\nw = [1, 1]\\nactivations = [2e9, 1e9]"
        >>> _ = Path(folder.name, "costs.toml").write_text(text)
        >>> load_costs(f"{folder.name}/costs.toml").costs.activations
        (2000000000.0, 1000000000.0)

    Raises ValueError for a file that cannot be read, and for invalid keys and values. The message names them.
    """
    data = read_data(path)
    try:
        return from_data(data)
    except ValueError as error:
        raise ValueError(f"cost file {str(path)!r}: {error}") from None


def read_data(path: str | Path) -> Any:
    require_ending(path)
    path = Path(path)
    kind = path.suffix[1:].upper()
    try:
        text = read_text(path)
        return tomllib.loads(text) if kind == "TOML" else json.loads(text)
    except OSError as error:
        raise ValueError(f"cost file {str(path)!r} cannot be read: {error.strerror}") from None
    except RecursionError:
        raise ValueError(f"cost file {str(path)!r} is nested too deeply: it needs only tables of lists") from None
    except ValueError as error:
        raise ValueError(f"cost file {str(path)!r} is not valid {kind}: {error}") from None


def dump_costs(costs: JobCosts | CostModel | LayerCosts, path: str | Path) -> None:
    """Write a cost file, TOML or JSON, by its suffix (.toml or .json). `load_costs` reads it back as an equal object.

        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> job = JobCosts(CostModel.uniform(Placement.v(2)), Placement.v(2), memory_limit=2.5)
        >>> dump_costs(job, f"{folder.name}/costs.json")
        >>> load_costs(f"{folder.name}/costs.json") == job
        True

    Raises OSError if the file cannot be written.
    """
    require_ending(path)
    data = to_data(costs if isinstance(costs, JobCosts) else JobCosts(costs))
    text = _toml(data) if Path(path).suffix == ".toml" else json.dumps(data, indent=2) + "\n"
    Path(path).write_bytes(text.encode())  # encoded first: a name that UTF-8 has no bytes for keeps the old file


_NUMBERS = ("freed_by_i", "message_bytes", "overhead", "attention", "sizes", "of_size", "fill_waits")
"""Keys with the values of the fields of that name."""
_BY_KIND = {"working": COMPUTATIONS, "waits": (OpKind.F, OpKind.I)}
"""Tables with a key for each of these kinds of ops."""
_JOB = ("memory_limit", "transport")


def from_data(data: Any) -> JobCosts:
    """Costs from the tables of a file, as dictionaries. The classes that they fill check the numbers."""
    keys = (*_NUMBERS, *_JOB, *_BY_KIND, "link", "links", "host")
    table = table_of(data, "", optional=(*keys, "stages", "layers"))
    if ("stages" in table) == ("layers" in table):
        more = ", not both" if "layers" in table else ""
        raise ValueError(f"it needs either a table [stages] or tables [[layers]]{more}")
    job, shared = ({name: table[name] for name in names if name in table} for names in (_JOB, _NUMBERS))
    try:
        for way in [way for way in ("link", "host") if way in table]:
            shared[way] = Link(**table_of(table[way], f"[{way}]", optional=_OF_LINK))
        for name, kinds in _BY_KIND.items():
            numbers = table_of(table.get(name, {}), f"[{name}]", optional=tuple(map(str, kinds)))
            shared[name] = {OpKind(kind): each for kind, each in numbers.items()}
        shared["links"] = _links(rows_of(table.get("links", []), "links"))
        if "layers" in table:
            layers = (Layer(**each) for _, each in layer_tables(table["layers"], COLUMNS, OF_DATA_PARALLELISM))
            # One more than allowed raises the error later: `count` can be any number.
            return JobCosts(LayerCosts(tuple(islice(layers, MOST_LAYERS + 1)), **shared), **job)
        stages = table_of(table["stages"], "[stages]", required=COLUMNS, optional=("rank_of", *OF_DATA_PARALLELISM))
        placement = Placement(stages.pop("rank_of")) if "rank_of" in stages else None
        return JobCosts(CostModel(**stages, **shared), placement, **job)
    except TypeError as error:
        raise ValueError(str(error)) from None


def to_data(job: JobCosts) -> _Table:
    """The tables of the file, as dictionaries. Values equal to their default are omitted."""
    costs, limit = job.costs, MemoryLimit.parse(job.memory_limit)
    data: _Table = {name: value for name in _NUMBERS if (value := getattr(costs, name)) and value != "off"}
    if limit is not None:
        data["memory_limit"] = limit.written
    if job.transport is not None:
        data["transport"] = str(job.transport)
    if link := _link_data(costs.link):
        data["link"] = link
    if costs.host is not None:  # a link that takes no time is valid
        data["host"] = _link_data(costs.host)
    for name in _BY_KIND:
        if by_kind := getattr(costs, name):
            data[name] = {str(kind): numbers for kind, numbers in by_kind.items()}
    if costs.links:
        data["links"] = [{"from": ends[0], "to": ends[1], **_link_data(link)} for ends, link in costs.links.items()]
    if isinstance(costs, LayerCosts):
        data["layers"] = [{"modules": layer.modules, **_columns(layer)} for layer in costs.layers]
    else:
        data["stages"] = ({"rank_of": job.placement.rank_of} if job.placement else {}) | _columns(costs)
    return data


def table_of(data: Any, name: str, *, required: Sequence[str] = (), optional: Sequence[str] = ()) -> _Table:
    """A copy of a table of the file. ValueError for missing required keys and unknown ones."""
    if not isinstance(data, dict):
        raise ValueError(f"{name or 'the file'} has to be a table of keys and values, got {data!r}")
    known = (*optional, *required)
    for key, value in data.items():
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise ValueError(f"{name} {key} = {value!r}: unknown key; {hint}".lstrip())
    for key in required:
        if key not in data:
            raise ValueError(f"{name} {key} is missing; it needs {', '.join(required)}")
    return dict(data)


def rows_of(rows: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The tables of a list, each with a name for messages."""
    if not isinstance(rows, list):
        raise ValueError(f"{name} = {rows!r}: expected a list of tables, in TOML [[{name}]]")
    return ((f"[[{name}]] number {number}", row) for number, row in enumerate(rows, start=1))


def _links(rows: Iterator[tuple[str, Any]]) -> Mapping[tuple[int, int], Link]:
    links: dict[tuple[int, int], Link] = {}
    for name, row in rows:
        table = table_of(row, name, required=("from", "to"), optional=_OF_LINK)
        ends = table.pop("from"), table.pop("to")
        for end in ends:
            if type(end) is not int or end < 0:
                raise ValueError(f"{name} from = {ends[0]!r}, to = {ends[1]!r}: expected two ranks, 0 or larger")
        if ends in links:
            raise ValueError(f"{name} from = {ends[0]}, to = {ends[1]}: this link is already given")
        links[ends] = Link(**table)
    return links


def _link_data(link: Link) -> dict[str, float]:
    latency = {"latency": link.latency} if link.latency else {}
    return latency | ({"bandwidth": link.bandwidth} if isfinite(link.bandwidth) else {})


def _columns(costs: CostModel | Layer) -> _Table:
    optional = {name: value for name in OF_DATA_PARALLELISM if (value := getattr(costs, name))}
    return {name: getattr(costs, name) for name in COLUMNS} | optional


def layer_tables(data: Any, columns: Sequence[str], optional: Sequence[str]) -> Iterator[tuple[str, _Table]]:
    for name, row in rows_of(data, "layers"):
        table = table_of(row, name, required=("modules", *columns), optional=(*optional, "count"))
        yield from ((name, each) for each in _repeat_counted(table, name))


def _repeat_counted(row: _Table, name: str) -> Iterator[_Table]:
    """The table of a layer, or `count` tables with consecutive numbers at the end of the module's name."""
    modules, count = row["modules"], row.pop("count", None)
    if count is None:
        return iter((row,))
    require_whole(1, **{f"{name} count": count})
    only = modules[0] if isinstance(modules, list) and len(modules) == 1 else None
    match = _NUMBERED.fullmatch(only) if isinstance(only, str) else None
    if match is None:
        raise ValueError(
            f"{name} modules = {modules!r}: expected one name that ends in a number, for example ['layers.0'], because"
            f" count = {count} increments that number"
        )
    first = int(match[2])
    return (row | {"modules": [f"{match[1]}{number}"]} for number in range(first, first + count))


def _toml(data: Mapping[str, Any]) -> str:
    """TOML text. Python's library only reads TOML. Values look the same in TOML and JSON."""

    def line(pair: tuple[str, Any]) -> str:
        text = json.dumps(pair[1], ensure_ascii=False).replace("\x7f", "\\u007f")  # the one that JSON may leave
        return f"{pair[0]} = {text}"

    lines = []
    for key, value in data.items():
        if isinstance(value, dict):
            lines += ["", f"[{key}]", *map(line, value.items())]
        elif isinstance(value, list):
            lines += [text for row in value for text in ("", f"[[{key}]]", *map(line, row.items()))]
        else:
            lines.append(line((key, value)))
    return "\n".join(lines).lstrip() + "\n"
