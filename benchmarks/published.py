"""The simulator against figures that others measured and published: `published.csv`, one row for each figure.

python benchmarks/published.py  # predictions and errors into results/what-hardware-says*.csv, and the picture

Classes: A, the source gives all inputs; B, inputs are inferred or read off plots; C, inputs were fitted to these very
rows, so they validate nothing. Throughputs are fitted, too: `OVERHEAD` is the one number chosen by them.

F, I and W are milliseconds of a rank for one microbatch, or any unit. No torch is needed.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from published_jobs import block_milliseconds, write_table

from zbpipe import CostModel, generate, simulate
from zbpipe.costs.model import Transport
from zbpipe.planner.engine import fastest
from zbpipe.schedule.registry import resolve
from zbpipe.simulator.memory import peak_bytes
from zbpipe.simulator.timeline import Timeline

HERE = Path(__file__).parent
ROWS = HERE / "published.csv"
RESULTS = HERE / "results" / "what-hardware-says.csv"
PICTURE = HERE.parent / "docs" / "pictures" / "published.svg"

OVERHEAD = 1.0
"""Milliseconds of an op besides its computation, in Megatron on A100: fitted to the throughputs of table 4."""
_MEGATRONS = ("Zero Bubble", "Megatron-LM", "PipeOffload")
"""Sources whose interleaved schedule is Megatron's, with a blocking message in each F and B."""
_RUN_AHEAD = ("Zero Bubble", "V schedules")
"""Sources whose ranks begin the next step when they are done."""


@dataclass(frozen=True)
class Row:
    """A published figure and its inputs."""

    id: str
    kind: str
    """Its class: A, B or C."""
    source: str
    table: str
    model: str
    hardware: str
    p: int
    m: int
    v: int
    microbatch: int
    seq: int
    schedule: str
    f: float
    i: float
    w: float
    comm: float
    metric: str
    """bubble (share of a rank's span), ratio (throughput over 1F1B), activations (memory over 1F1B), memory (GB),
    throughput (samples per second and GPU), or F, I, W (milliseconds of `v` blocks by the estimate's rates)."""
    published: float
    note: str

    @property
    def group(self) -> str:
        return ", ".join(filter(None, (self.source.split(",")[0], self.table, self.metric)))

    @property
    def is_fitted(self) -> bool:
        """Whether an input was fitted to this row."""
        return self.kind == "C" or self.metric == "throughput"

    def starts(self, names: Sequence[str]) -> bool:
        return self.source.startswith(tuple(names))


@dataclass(frozen=True)
class Model:
    """A GPT of the Zero Bubble paper, table 3."""

    layers: int
    heads: int
    width: int

    def activations(self, tokens: int, seq: int) -> float:
        """Bytes that a layer keeps after F: sb(34h + 5as), as in Korthikanti et al. (2205.05198)."""
        return tokens * (34.0 * self.width + 5 * self.heads * seq)

    def freed_by_i(self, seq: int) -> float:
        """I frees all but 32sbh: the Zero Bubble paper, section 2."""
        return 1 - 32 * self.width / self.activations(1, seq)


MODELS = {
    "GPT 1.5B": Model(22, 24, 2304),
    "GPT 6.2B": Model(30, 32, 4096),
    "GPT 14.6B": Model(46, 40, 5120),
    "GPT 28.3B": Model(62, 48, 6144),
}
_PARAMETER = 18
"""Bytes of a parameter: bfloat16 weight, float32 gradient, weight and both moments."""
_VOCABULARY = 50257


def read_rows() -> list[Row]:
    """All rows. Missing numbers are 0; v is 1 where it is not given."""
    with ROWS.open(newline="") as lines:
        return [_row(each) for each in csv.DictReader(lines)]


def _row(cells: dict[str, str]) -> Row:
    values: dict[str, Any] = {**cells, "kind": cells["class"]}
    del values["class"]
    values |= {name: int(cells[name] or name == "v") for name in ("p", "m", "v", "microbatch", "seq")}
    values |= {name: float(cells[name] or 0) for name in ("f", "i", "w", "comm", "published")}
    return Row(**values)


def predict(row: Row) -> float:
    """The simulator's figure for this row."""
    match row.metric:
        case "bubble":
            return 1 - row.m * (row.f + row.i + row.w) / _timeline(row, row.schedule).longest_rank_span
        case "ratio":
            # With few microbatches the paper takes the better one of its two schedules.
            names = ("ZB1P", "ZB2P") if row.table == "table 12" else (row.schedule,)
            return _seconds(row, "1F1B") / min(_seconds(row, each) for each in names)
        case "activations":
            return max(_timeline(row, row.schedule).peak_activations) / max(_timeline(row, "1F1B").peak_activations)
        case "memory":
            return _gigabytes(row)
        case "F" | "I" | "W":
            how, *options = row.schedule.split()
            return row.v * block_milliseconds(row.model, row.hardware, row.seq, how, frozenset(options))[row.metric]
        case "throughput":
            return 1000 * row.m * row.microbatch / row.p / _seconds(row, row.schedule, OVERHEAD)
    raise ValueError(f"unknown metric {row.metric!r}")


def _seconds(row: Row, schedule: str, overhead: float = 0.0) -> float:
    """Time of a step in the row's unit."""
    is_interleaved = schedule.startswith("Interleaved")
    blocks = is_interleaved and row.starts(_MEGATRONS) and not overhead
    timeline = _timeline(row, schedule, overhead, Transport.BLOCKING if blocks else Transport.IDEAL)
    ahead = row.starts(_RUN_AHEAD) and "synchronous" not in row.note and schedule not in ("1F1B", "Interleaved1F1B")
    return timeline.longest_rank_span if ahead else timeline.makespan


def _timeline(row: Row, schedule: str, overhead: float = 0.0, transport: Transport = Transport.IDEAL) -> Timeline:
    model = MODELS.get(row.model)
    freed = model.freed_by_i(row.seq) if model else 0.0
    stages = row.v if schedule == row.schedule else 1
    return _run(schedule, (row.p, row.m, stages), (row.f, row.i, row.w, row.comm), freed, overhead, transport)


@cache
def _run(
    name: str,
    size: tuple[int, int, int],
    times: tuple[float, float, float, float],
    freed: float,
    overhead: float,
    transport: Transport,
) -> Timeline:
    p, m, v = size
    f, i, w, comm = times
    costs = CostModel.uniform(resolve(name).place(p, v), f, i, w, comm=comm, freed_by_i=freed, overhead=overhead)
    return simulate(generate(name, p, m, stages_per_rank=v, costs=costs), costs, transport=transport)


def _gigabytes(row: Row) -> float:
    """Peak memory of the worst rank in 1e9 bytes. Embedding and head take the place of a layer each."""
    model, tokens = MODELS[row.model], row.seq * row.microbatch
    placement = resolve(row.schedule).place(row.p, row.v)
    last, each = placement.num_stages - 1, (model.layers + 2) // placement.num_stages
    layers = [each - (stage in (0, last)) for stage in range(last + 1)]
    ones = (1.0,) * (last + 1)
    costs = CostModel(
        ones,
        ones,
        tuple(0.7 for _ in ones),
        tuple(count * model.activations(tokens, row.seq) for count in layers),
        freed_by_i=model.freed_by_i(row.seq),
        message_bytes=2.0 * tokens * model.width,
    )
    # The schedule is that of equal stages, as in the paper.
    even = CostModel.uniform(placement, 1, 1, 0.7, comm=0.04, freed_by_i=model.freed_by_i(row.seq))
    schedule = generate(row.schedule, row.p, row.m, stages_per_rank=row.v, costs=even)
    parameters = placement.sum_by_rank(
        [
            12.0 * model.width**2 * count + (stage in (0, last)) * _VOCABULARY * model.width
            for stage, count in enumerate(layers)
        ]
    )
    peaks = peak_bytes(simulate(schedule, costs))
    return max(peak + _PARAMETER * count for peak, count in zip(peaks, parameters, strict=True)) / 1e9


def error(row: Row, predicted: float) -> float:
    """Predicted against published: a difference for bubbles, relative for all others."""
    return predicted - row.published if row.metric == "bubble" else predicted / row.published - 1


def summary(found: Iterable[tuple[Row, float]]) -> list[list[str]]:
    """The errors by source, table and metric, and where schedules of Megatron and of the paper differ, by schedule. In
    percentage points for bubbles, else in percent."""
    by_group: dict[tuple[str, str, bool], list[float]] = {}
    for row, predicted in found:
        name = f"{row.group} ({row.schedule})" if row.group.endswith("table 4, ratio") else row.group
        by_group.setdefault((name, row.kind, row.is_fitted), []).append(100 * error(row, predicted))
    lines = []
    for (name, kind, fitted), errors in by_group.items():
        mean, worst = fmean(map(abs, errors)), max(errors, key=abs)
        shown = [f"{mean:.1f} %", f"{worst:+.1f} %"]
        if name.endswith("bubble"):
            shown = [f"{mean:.2f} points", f"{worst:+.2f}"]
        lines.append([name, kind, str(len(errors)), *shown, "fitted" if fitted else ""])
    return lines


_LOW, _HIGH, _SIZE, _LEFT, _TOP = 0.84, 1.56, 460, 56, 12
"""Range of both axes, their pixels, and the margins."""


def draw(points: Sequence[tuple[Row, float]]) -> str:
    """Simulated against published speed-up over 1F1B, as SVG. On the diagonal both are equal; the band is 5 % wide."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_SIZE + _LEFT + 20} {_SIZE + 68}" role="img"'
    label = "Simulated against published throughput over 1F1B"
    parts = (*_axes(), *(_mark(*point) for point in points), *_legend())
    return "\n".join([f'{head} aria-label="{label}">', _STYLE, *parts, "</svg>\n"])


def _x(value: float) -> float:
    return _LEFT + (value - _LOW) / (_HIGH - _LOW) * _SIZE


def _y(value: float) -> float:
    return _TOP + _SIZE - (value - _LOW) / (_HIGH - _LOW) * _SIZE


def _axes() -> Iterator[str]:
    floor, end = _TOP + _SIZE, _LEFT + _SIZE
    band = (
        (_LOW, _LOW),
        (_LOW / 0.95, _LOW),
        (_HIGH, _HIGH * 0.95),
        (_HIGH, _HIGH),
        (_HIGH / 1.05, _HIGH),
        (_LOW, _LOW * 1.05),
    )
    corners = " ".join(f"{_x(one):.1f},{_y(other):.1f}" for one, other in band)
    yield f'<polygon class="band" points="{corners}"/>'
    yield f'<path class="line" d="M{_LEFT} {floor}L{end} {_TOP}M{_LEFT} {_TOP}V{floor}H{end}"/>'
    for tick in (0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5):
        yield f'<text x="{_x(tick):.1f}" y="{floor + 18}" text-anchor="middle">{tick:.1f}</text>'
        yield f'<text x="{_LEFT - 8}" y="{_y(tick) + 4:.1f}" text-anchor="end">{tick:.1f}</text>'
    yield f'<text x="{_LEFT + _SIZE / 2}" y="{floor + 40}" text-anchor="middle">published throughput over 1F1B</text>'
    yield f'<text x="{_LEFT + 10}" y="{_TOP + 16}">simulated throughput over 1F1B</text>'


def _mark(row: Row, predicted: float) -> str:
    where = f"{row.source}: {row.schedule}, {row.model}, p={row.p}, m={row.m}"
    tip = f"<title>{escape(where)}: published {row.published:.3f}, simulated {predicted:.3f}</title>"
    kind = "fitted" if row.is_fitted else row.kind
    return f'<circle class="{kind}" cx="{_x(row.published):.1f}" cy="{_y(predicted):.1f}" r="4">{tip}</circle>'


def _legend() -> Iterator[str]:
    words = {"A": "inputs published", "B": "inputs inferred", "fitted": "inputs fitted"}
    for place, (kind, meaning) in enumerate(words.items()):
        x, y = _x(1.33), _y(0.96) + 18 * place
        yield f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
        yield f'<text x="{x + 12:.1f}" y="{y + 4:.1f}">{meaning}</text>'


_STYLE = (
    "<style>text{font:13px sans-serif;fill:#333}.line{fill:none;stroke:#888}.band{fill:#8882}"
    ".A{fill:#0072b2}.B{fill:none;stroke:#d55e00;stroke-width:2}.fitted{fill:none;stroke:#999;stroke-width:1.5}"
    "@media (prefers-color-scheme:dark){text{fill:#ddd}.A{fill:#56b4e9}.B{stroke:#e69f00}}</style>"
)

_HEADS = ("id", "class", "source", "table", "schedule", "metric", "published", "predicted", "error", "fitted", "note")


def write_results(found: Iterable[tuple[Row, float]]) -> None:
    rows = [_HEADS]
    for row, predicted in found:
        names = (row.id, row.kind, row.source, row.table, row.schedule, row.metric)
        numbers = (f"{row.published:g}", f"{predicted:.5g}", f"{error(row, predicted):+.4f}")
        rows.append((*names, *numbers, "yes" if row.is_fitted else "", row.note))
    write_table(RESULTS, rows)


def main() -> None:
    import published_jobs
    from harness import markdown, parser

    parser(__doc__).parse_args()
    fastest()
    found = [(row, predict(row)) for row in read_rows()]
    write_results(found)
    PICTURE.write_text(draw([(row, each) for row, each in found if row.metric == "ratio"]))
    heads = ["source, table, figure", "class", "rows", "mean error", "worst", ""]
    print(markdown(heads, summary(found)))
    jobs = [(job, published_jobs.predict(job)) for job in published_jobs.read_jobs()]
    published_jobs.write_results(jobs)
    heads = ["jobs", "", "number", "bias", "mean error", "within the range"]
    print("\n" + markdown(heads, published_jobs.summary(jobs), left=2))


if __name__ == "__main__":
    main()
