"""The playground: its page, the answers of simulator and planner, and the server for this machine only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from zbpipe.costs.job import MemoryLimit, memory_of_1f1b
from zbpipe.costs.model import ROUNDING, CostModel
from zbpipe.costs.numbers import MOST, is_amount
from zbpipe.costs.transformer import LLAMA_3_8B, Checkpointing, typical_costs, typical_times
from zbpipe.planner.plan import plan
from zbpipe.schedule.ir import Placement
from zbpipe.schedule.registry import USUAL_STAGES, schedules
from zbpipe.simulator.simulation import simulate
from zbpipe.simulator.timeline import Timeline
from zbpipe.views.html import drawing, fill, pack
from zbpipe.views.report import record

MOST_RANKS, MOST_MICROBATCHES, MOST_STAGES = 64, 512, 8
_MOST_CELLS = 2**13
"""Largest number of ranks times microbatches, for an immediate answer."""
PLAN_BUDGET = 2e6
"""Number of ops that a search may time: about a second."""


@dataclass(frozen=True)
class Setting:
    ranks: int
    microbatches: int
    stages: int
    """Stages per rank, for schedules that support any number."""
    f: float
    """Times of F, I and W of one microbatch on a rank, and of a message."""
    i: float
    w: float
    comm: float
    checkpointing: Checkpointing
    limit: float | None
    """Memory relative to that of 1F1B's worst rank."""

    def __post_init__(self) -> None:
        for name, most in (("ranks", MOST_RANKS), ("microbatches", MOST_MICROBATCHES), ("stages", MOST_STAGES)):
            if not 1 <= (value := getattr(self, name)) <= most:
                raise ValueError(f"{name} = {value} has to be from 1 to {most}")
        if self.ranks * self.microbatches > _MOST_CELLS:
            raise ValueError(
                f"{self.ranks} ranks with {self.microbatches} microbatches are too many for an immediate answer: keep"
                f" their product at most {_MOST_CELLS}, or use `zbpipe plan`"
            )
        if not all(map(is_amount, (*self.times, self.comm))) or max(self.times) < 1 / MOST:
            raise ValueError(
                f"times = {self.times}, comm = {self.comm}: give numbers from zero to {MOST:g}, a time above zero"
            )
        if self.limit is not None and not (is_amount(self.limit) and self.limit > 0):
            raise ValueError(f"limit = {self.limit} has to be above zero (1 is the memory of 1F1B), or empty")

    @classmethod
    def parse(cls, asked: Mapping[str, str]) -> Setting:
        """The setting from text by name. ValueError for missing and unknown names, and for invalid numbers."""
        names = [field.name for field in fields(cls)]
        if missing := [name for name in names if name not in asked]:
            raise ValueError(f"{', '.join(missing)} is missing")
        if unknown := [name for name in asked if name not in names]:
            raise ValueError(f"{', '.join(unknown)} is unknown")

        def read(name: str, text: str) -> Any:
            if name == "checkpointing":
                return Checkpointing.parse(text)
            is_whole = name in ("ranks", "microbatches", "stages")
            try:
                return int(text) if is_whole else None if name == "limit" and not text else float(text)
            except ValueError:
                raise ValueError(f"{name} = {text!r} is not a {'whole ' * is_whole}number") from None

        return cls(**{name: read(name, text) for name, text in asked.items()})

    def texts(self) -> dict[str, str]:
        values = {name: "" if value is None else value for name, value in vars(self).items()}
        return {name: value if isinstance(value, str) else f"{value:.6g}" for name, value in values.items()}

    def costs(self, placement: Placement) -> CostModel:
        return typical_costs(placement, self.checkpointing, times=self.times, comm=self.comm)

    @property
    def times(self) -> tuple[float, float, float]:
        return self.f, self.i, self.w

    @property
    def memory_limit(self) -> MemoryLimit | None:
        return None if self.limit is None else MemoryLimit.parse(f"{self.limit!r}x")

    @property
    def options(self) -> str:
        costs = ",".join(f"{time:.6g}" for time in self.times)
        return (
            f"-p {self.ranks} -m {self.microbatches} --costs {costs} --comm {self.comm:.6g}"
            f" --checkpointing {self.checkpointing}"
        )


def answer_simulation(setting: Setting, name: str) -> dict[str, Any]:
    """A named schedule under these costs: its figures, its picture, and the command for it."""
    algorithm = schedules().get(name.lower())
    if algorithm is None:
        # `resolve` would accept the path of a file, and a page on the network must not read files.
        raise ValueError(
            f"{name!r} is not a schedule; there are {', '.join(each.name for each in schedules().values())}"
        )
    stages = setting.stages if algorithm.any_stages_per_rank else None
    costs = setting.costs(algorithm.place(setting.ranks, stages))
    limit = setting.memory_limit if "memory_limit" in algorithm.keywords else None
    how: dict[str, Any] = {"stages_per_rank": stages, "costs": costs, "memory_limit": limit}
    schedule = algorithm.make(setting.ranks, setting.microbatches, **how)
    chosen = f" --stages-per-rank {stages}" if stages else ""
    command = f"zbpipe simulate {algorithm.name} {setting.options}{chosen}{_limit_option(limit)}"
    return _answer(simulate(schedule, costs), setting, algorithm.name, command)


def answer_plan(setting: Setting) -> dict[str, Any]:
    """The best schedule found within the limit, and a bound for all schedules."""
    limit, size = setting.memory_limit, (setting.ranks, setting.microbatches)
    found = plan(*size, partial(Setting.costs, setting), memory_limit=limit, budget=PLAN_BUDGET)
    command = f"zbpipe plan {setting.options}{_limit_option(limit)} --budget {PLAN_BUDGET:.6g} -o plan.csv"
    answer = _answer(found.timeline, setting, f"planned ({found.placement}, by {found.found_by})", command)
    return answer | {"lower_bound": found.lower_bound, "gap": found.gap}


def _limit_option(limit: MemoryLimit | None) -> str:
    return "" if limit is None else f" --memory-limit {limit.amount:.6g}x"


def _answer(timeline: Timeline, setting: Setting, title: str, command: str) -> dict[str, Any]:
    figures = record(timeline, memory_of_1f1b(setting.costs, setting.ranks, setting.microbatches))
    memory = figures["memory_to_1f1b"]
    return {
        "title": title,
        "makespan": figures["makespan"],
        "bubble": figures["bubble"],
        "memory_to_1f1b": memory,
        "fits": setting.limit is None or memory is None or memory <= setting.limit * (1 + ROUNDING),
        "lower_bound": figures["lower_bound"],
        "gap": max(figures["makespan"] / figures["lower_bound"] - 1, 0.0),
        "command": command,
        "csv": timeline.schedule.to_csv(),
        "drawing": drawing(timeline),
    }


def presets() -> dict[str, Setting]:
    """Times of a transformer, and equal ones, by name. The page opens with the first."""
    found = {}
    for how in (Checkpointing.SELECTIVE, Checkpointing.NONE, Checkpointing.FULL):
        f, i, w = typical_times(how)
        sizes = 8, 32, USUAL_STAGES
        found[f"typical transformer, {how} checkpointing"] = Setting(*sizes, f, round(i, 3), w, 0.02, how, 1.1)
    equal = Setting(4, 8, USUAL_STAGES, 1.0, 1.0, 1.0, 0.0, Checkpointing.NONE, None)
    return found | {"equal times, as in the papers": equal}


ADDRESS = "127.0.0.1"
_TIMES = [round(0.1 * n, 1) for n in range(1, 41)]
_STOPS: dict[str, list[Any]] = {
    "ranks": [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, MOST_RANKS],
    "microbatches": [*range(1, 17), *range(18, 33, 2), *range(36, 65, 4), 80, 96, 128, 192, 256, 384, 512],
    "stages": [1, 2, 3, 4, 6, 8],
    "f": _TIMES,
    "i": _TIMES,
    "w": [0, *_TIMES],
    "comm": [0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1],
    "checkpointing": list(Checkpointing),
    "limit": ["", 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.5, 2, 3],
}


def server(port: int = 0) -> ThreadingHTTPServer:
    """A server on this machine's loopback address, to be started by `serve_forever`. Port 0 selects a free one."""
    return ThreadingHTTPServer((ADDRESS, port), _Handler)


# Users move sliders back and forth. A few hundred answers take some megabytes.
_simulated, _planned = lru_cache(maxsize=256)(answer_simulation), lru_cache(maxsize=64)(answer_plan)


def answer(path: str, query: str) -> tuple[int, str, str]:
    if path == "/":
        return 200, "text/html; charset=utf-8", _page()
    if path not in ("/schedule", "/plan"):
        return _json(404, {"error": f"there is no {path} here: open /"})
    asked = dict(parse_qsl(query, keep_blank_values=True))
    try:
        name = asked.pop("name", "")
        setting = Setting.parse(asked)
        return _json(200, _planned(setting) if path == "/plan" else _simulated(setting, name))
    except ValueError as error:
        return _json(400, {"error": str(error)})


def _page() -> str:
    data = {
        "stops": _STOPS,
        "presets": {name: setting.texts() for name, setting in presets().items()},
        "names": sorted((each.name for each in schedules().values()), key=str.lower),
        # The page uses it to change the time of I with the checkpointing.
        "recomputed": {how: round(LLAMA_3_8B.recomputed(how), 3) for how in Checkpointing},
    }
    return fill("playground.html", data=pack(data))


def _json(status: int, body: dict[str, Any]) -> tuple[int, str, str]:
    return status, "application/json", json.dumps(body)


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        # A page from another site may resolve its own name to this address. Host then contains that name.
        if (self.headers.get("Host") or "").rsplit(":", 1)[0] not in (ADDRESS, "localhost"):
            self._send(*_json(403, {"error": f"this server answers only at {ADDRESS} and localhost"}))
            return
        parts = urlsplit(self.path)
        self._send(*answer(parts.path, parts.query))

    def _send(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because the terminal belongs to the user."""
