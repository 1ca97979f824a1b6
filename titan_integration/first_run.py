"""The first hour on a machine with GPUs: `titan_integration/first_run.sh` runs it.

It runs jobs of `run_train.sh`, one after the other, all from one seed checkpoint, and compares what they log. It writes
the report again after each job, so that there is one whatever happens later.
"""

from __future__ import annotations

import argparse
import json
import os
import platform as machine
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from zbpipe.frameworks.titan.versions import find_installed
from zbpipe.runtime.verify import on_device
from zbpipe.schedule.registry import resolve

SCRIPT = Path(__file__).with_name("run_train.sh")
COMPARED = 5
"""Steps in which losses and gradient norms have to agree; later, differences by rounding grow."""
TOLERANCES = {"loss": 1e-3, "grad_norm": 2e-2}
"""Relative. bfloat16 was seen to differ by 3e-4 in the loss after a few steps."""
MEMORY_ERROR, MEMORY_BESIDE = 0.25, 4.0
"""How far the GiB of a rank may be from the calculation: a share of it, and buffers that it leaves out."""
LAST_LINES = 25


class Step(NamedTuple):
    """What TorchTitan logs of a step on one rank."""

    number: int
    loss: float
    """-1 if the rank has neither the last stage nor its loss."""
    grad_norm: float
    memory: float
    """GiB reserved at the peak; 0 on the CPU."""
    tps: float
    """Tokens per second and GPU."""


@dataclass(frozen=True)
class Job:
    """One run of `run_train.sh`."""

    schedule: str
    receives: str | None = None
    """`--zbpipe.receives`; None for the schedule's own choice."""
    per_edge: str | None = None
    """The value of torch's variable for it; None on the CPU, and with a torch that does not have it."""
    trace: Path | None = None

    def __str__(self) -> str:
        words = [f"{self.receives} receives" if self.receives else ""]
        words += [{None: "", "0": "one queue", "1": "a queue per edge"}[self.per_edge]]
        return ", ".join(filter(None, [self.schedule, *words]))


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    ranks: Mapping[int, Sequence[Step]]
    """By rank on this node."""
    words: str
    """What all ranks have logged."""
    complaint: str
    """Empty if it ended well."""

    @property
    def steps(self) -> Sequence[Step]:
        """The steps of a rank that has the loss."""
        return next((steps for steps in self.ranks.values() if any(step.loss > 0 for step in steps)), ())

    @property
    def tps(self) -> float:
        """The median of the second half, when nothing compiles any more."""
        return median([step.tps for step in self.steps[len(self.steps) // 2 :]] or [0.0])

    def said(self, pattern: str) -> str:
        """The first group of the last line that matches; "-" for none."""
        found: list[str] = re.findall(pattern, self.words)
        return found[-1] if found else "-"


_STEP = re.compile(r"step: +(\d+) +loss: +(\S+) +grad_norm: +(\S+) +memory: +(\S+)GiB\(\S+ +tps: +([\d,]+)")


def steps_in(log: str) -> list[Step]:
    """The steps in the log of one rank, which has no colours."""
    found = (match.groups() for match in _STEP.finditer(log))
    return [
        Step(int(n), float(loss), float(norm), float(gib), float(tps.replace(",", "")))
        for n, loss, norm, gib, tps in found
    ]


@dataclass
class Report:
    """The report so far."""

    file: Path
    lines: list[tuple[str, str, str]] = field(default_factory=list)
    """Verdict, what was checked, what was found."""
    tables: dict[str, list[Sequence[str]]] = field(default_factory=dict)
    """By title, rows with the head first."""
    texts: dict[str, str] = field(default_factory=dict)
    """By title, the output of a program."""

    def add(self, passed: bool | None, what: str, found: str) -> None:
        """Add a line, and print it. None for `passed` is information only."""
        verdict = {True: "pass", False: "**FAIL**", None: "-"}[passed]
        self.lines.append((verdict, what, found))
        print(f"{verdict.strip('*'):4}  {what}: {found}", flush=True)
        self.write()

    @property
    def failed(self) -> int:
        return sum(verdict == "**FAIL**" for verdict, _, _ in self.lines)

    def write(self) -> None:
        parts = ["# zbpipe's first run\n", _table([("", "what", "found"), *self.lines])]
        parts += [f"\n## {title}\n\n{_table(rows)}" for title, rows in self.tables.items() if len(rows) > 1]
        parts += [f"\n## {title}\n\n```\n{text.rstrip()}\n```" for title, text in self.texts.items()]
        self.file.write_text("\n".join(parts) + "\n")


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *rest = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rest))


def _relative(found: float, expected: float) -> float:
    return abs(found - expected) / max(abs(expected), 1e-12)


def differences(found: Sequence[Step], expected: Sequence[Step]) -> dict[str, float]:
    """The largest relative differences of losses and gradient norms, over the steps in which they have to agree."""
    pairs = list(zip(found[:COMPARED], expected[:COMPARED], strict=False))
    return {
        name: max((_relative(getattr(one, name), getattr(other, name)) for one, other in pairs), default=float("nan"))
        for name in TOLERANCES
    }


class FirstRun:
    """The whole run."""

    def __init__(self, arguments: argparse.Namespace, script: Path = SCRIPT) -> None:
        self.folder: Path = arguments.out.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.report = Report(self.folder / "report.md")
        self._arguments = arguments
        self._script = script
        self._titan_02 = find_installed().name.startswith("0.2")
        self._reference: tuple[Job, Outcome] | None = None
        """The first job that ended well, usually 1F1B."""
        self._best: dict[str, float] = {}
        """By schedule, tokens per second and GPU in its fastest way."""
        self._settings: dict[str, str] = {}
        self._variables: dict[str, str] = {}
        self._is_plain = False
        """Whether zbpipe's schedules leave out what failed here."""

    def run(self) -> int:
        """Run everything, one after the other; returns how many lines failed."""
        try:
            if self._environment():
                seed = self._seed()
                for job in self._jobs():
                    with self._going_on(str(job)):
                        self._job(job, seed)
                self._compare()
        except KeyboardInterrupt:
            self.report.add(False, "interrupted", "the rest was not tried")
        print(f"\n{self.report.failed} failed; the report is {self.report.file}: please send it to zbpipe's authors")
        return self.report.failed

    @contextmanager
    def _going_on(self, what: str) -> Iterator[None]:
        """An error within is a failed line, and the run continues."""
        try:
            yield
        except Exception as error:
            self.report.add(False, what, f"{type(error).__name__}: {error}")

    # What there is.

    def _environment(self) -> bool:
        report = self.report
        dry = subprocess.run(
            [str(self._script)], env=self._env({"DRY_RUN": "1"}), capture_output=True, text=True, check=False
        )
        *settings, command = dry.stdout.splitlines() or [""]
        report.add(dry.returncode == 0, "run_train.sh", dry.stderr.strip() or "starts")
        if dry.returncode:
            return False
        self._settings = dict(line.split("=", 1) for line in settings)
        self._platform, self._ranks = self._settings["PLATFORM"], int(command.split("--nproc-per-node ")[1].split()[0])
        if self._platform == "cpu":
            self._variables |= {"PLATFORM": "cpu"}
        report.add(None, "platform", f"{self._platform}, {self._ranks} processes; {machine.platform()}")
        packages = ", ".join(f"{name} {_version(name)}" for name in ("torch", "torchtitan", "zbpipe", "triton"))
        report.add(sys.version_info >= (3, 11), "versions", f"Python {machine.python_version()}, {packages}")
        if self._platform != "cpu":
            with self._going_on("GPUs"):
                self._gpus()
            self._try_parts()
        report.texts["Environment that run_train.sh sets"] = dry.stdout
        return True

    def _gpus(self) -> None:
        library = "RCCL" if torch.version.hip else "NCCL"
        number = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        toolkit = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        seen = torch.cuda.device_count()
        self.report.add(seen >= self._ranks, "GPUs", f"torch sees {seen}; {toolkit}, {library} {number}")
        for command in (
            "nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv",
            "nvidia-smi topo -m",
            "amd-smi static --asic --driver",
            "amd-smi topology",
            "rocm-smi --showproductname --showtopo",
        ):
            if shutil.which(command.split()[0]):
                with self._going_on(command):
                    said = subprocess.run(command.split(), capture_output=True, text=True, timeout=60, check=False)
                    self.report.texts[command] = said.stdout or said.stderr

    def _try_parts(self) -> None:
        """Try what GPUs run in another way than CPUs. If any of it fails, the jobs run without all of it."""
        for result in on_device.try_out("cuda"):
            self._is_plain |= result.failed
            self.report.add(not result.failed, result.what, result.found)
        if self._is_plain:
            self.report.add(None, "from here on", f"the jobs of zbpipe have {on_device.WAY_OUT}")

    # The jobs.

    def _jobs(self) -> Iterator[Job]:
        """1F1B first: the others are compared with it."""
        schedules, receives = self._arguments.schedules, self._arguments.receives
        has_edges = self._platform != "cpu" and on_device.HAS_GROUPS_PER_EDGE
        edges: Sequence[str | None] = ("0", "1") if has_edges else (None,)
        yield from (Job("1F1B", per_edge=edge) for edge in edges)
        trace: Path | None = self.folder / "trace.json"
        for schedule in schedules:
            if resolve(schedule).source == "torch":  # torch's classes post their own receives
                yield from (Job(schedule, per_edge=edge) for edge in edges)
                continue
            # On the CPU receives change nothing; one schedule shows that all ways run.
            ways = receives if self._platform != "cpu" or trace else receives[-1:]
            for edge, when in product(edges, ways):
                yield Job(schedule, when, edge, trace)
                trace = None

    def _seed(self) -> Path | None:
        folder = self.folder / "seed"
        alone = ("--parallelism.pipeline_parallel_degree", "1", "--parallelism.tensor_parallel_degree", "1")
        arguments = (*alone, "--checkpoint.enable", "--checkpoint.create_seed_checkpoint")
        complaint = self._start("seed", [*self._dump(folder), *arguments], {"NGPU": "1"}).complaint
        self._add_job("seed checkpoint", complaint, "made")
        return None if complaint else folder / "checkpoint" / "step-0"

    def _job(self, job: Job, seed: Path | None) -> None:
        name = re.sub(r"\W+", "-", str(job))
        steps = self._arguments.steps
        arguments = [
            *self._dump(self.folder / name),
            *("--training.steps", str(steps), "--metrics.log_freq", "1", "--metrics.disable_color_printing"),
            *("--parallelism.pipeline_parallel_schedule", job.schedule, "--debug.seed", "0"),
            *(("--zbpipe.receives", job.receives) if job.receives else ()),
            *(("--zbpipe.trace", str(job.trace)) if job.trace else ()),
            *(("--zbpipe.plain",) if self._is_plain and resolve(job.schedule).source == "zbpipe" else ()),
            *(("--checkpoint.enable", "--checkpoint.load_only") if seed else ()),
            *(("--checkpoint.initial_load_path", str(seed)) if seed else ()),
            *self._arguments.trainer,
        ]
        outcome = self._start(name, arguments, {on_device.PER_EDGE: job.per_edge} if job.per_edge else {})
        if not outcome.complaint and len(outcome.steps) < steps:
            outcome = replace(outcome, complaint=f"logged {len(outcome.steps)} of {steps} steps")
        receives = outcome.said(r"Messages: (\S+) receives, for")
        self._add_job(str(job), outcome.complaint, f"{steps} steps, {outcome.tps:,.0f} tokens/s per GPU")
        if not outcome.complaint:
            self._best[job.schedule] = max(self._best.get(job.schedule, 0.0), outcome.tps)
            self._agrees(job, outcome)
            self._speed(job, outcome, receives)
            self._memory(job, outcome)
        if job.trace and not outcome.complaint:
            self._trace(job.trace)

    def _dump(self, folder: Path) -> tuple[str, str]:
        return ("--job.dump_folder" if self._titan_02 else "--dump_folder", str(folder))

    def _env(self, more: Mapping[str, str]) -> dict[str, str]:
        on_cpu = self._variables.get("PLATFORM") == "cpu"
        config = os.environ.get("CONFIG") or ("llama3_debug" if on_cpu or not torch.cuda.is_available() else _ON_GPUS)
        return {**os.environ, "PYTHON": sys.executable, "CONFIG": config, **self._variables, **more}

    def _start(self, name: str, arguments: Sequence[str], variables: Mapping[str, str]) -> Outcome:
        """Run the script. Its output and that of the ranks are in the folder `logs`."""
        logs = self.folder / "logs" / name
        shutil.rmtree(logs, ignore_errors=True)
        logs.mkdir(parents=True)
        with (logs / "output.log").open("w") as output:
            process = subprocess.Popen(
                [str(self._script), *arguments],
                env=self._env({"LOG_DIR": str(logs), **variables}),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            with _ended(process):
                try:
                    code = process.wait(self._arguments.timeout)
                    complaint = f"exit code {code}" if code else ""
                except subprocess.TimeoutExpired:
                    complaint = f"not finished after {self._arguments.timeout:.0f} seconds"
        files = sorted(logs.rglob("std*.log"))
        ranks: dict[int, list[Step]] = {}
        for file in files:
            ranks.setdefault(int(file.parent.name), []).extend(steps_in(_text(file)))
        words = "\n".join(map(_text, (*files, logs / "output.log")))
        if complaint:
            errors = [line for line in words.splitlines() if re.search(r"(Error|refused): ", line)]
            self.report.texts[f"{name}: the end of its log"] = "\n".join(
                [*errors[:1], "...", *_text(logs / "output.log").splitlines()[-LAST_LINES:]]
            )
        return Outcome(ranks, words, complaint)

    def _add_job(self, what: str, complaint: str, found: str) -> None:
        self.report.add(not complaint, what, complaint or found)

    # What they show.

    def _agrees(self, job: Job, outcome: Outcome) -> None:
        if self._reference is None:
            self._reference = job, outcome
            return
        other, expected = self._reference
        found = differences(outcome.steps, expected.steps)
        agrees = all(found[name] <= tolerance for name, tolerance in TOLERANCES.items())
        compared = min(COMPARED, len(outcome.steps), len(expected.steps))
        words = " and ".join(f"{value:.1e} ({name})" for name, value in found.items())
        self.report.add(agrees, f"{job} against {other}", f"off by at most {words}, {compared} steps")

    def _speed(self, job: Job, outcome: Outcome, receives: str) -> None:
        head = ("schedule", "tokens/s per GPU", "s per step (simulated)", "bubble", "receives", "transport")
        rows = self.report.tables.setdefault("Speed", [head])
        transport = outcome.said(r"for the transport '([^']*)'")
        step = outcome.said(r"pipeline: .*? step: (\S+ \(simulated \S+\))").replace("s", "", 1)
        row = (str(job), f"{outcome.tps:,.0f}", step.replace("simulated ", ""), outcome.said(r"bubble: (\S+)"))
        rows.append((*row, receives, transport))

    def _memory(self, job: Job, outcome: Outcome) -> None:
        """Compare the GiB of each rank with what `zbpipe estimate` calculates."""
        measured = {rank: max(step.memory for step in steps) for rank, steps in outcome.ranks.items() if steps}
        if not any(gib > 0 for gib in measured.values()):
            return
        expected = self._expected_memory(job)
        if not expected:
            return
        rows = self.report.tables.setdefault("Memory", [("schedule", "rank", "GiB reserved", "GiB calculated")])
        ranks_each = max(1, self._ranks // len(expected))
        pairs = {rank: (gib, expected[min(rank // ranks_each, len(expected) - 1)]) for rank, gib in measured.items()}
        rows += [(str(job), str(rank), f"{gib:.1f}", f"{needed:.1f}") for rank, (gib, needed) in sorted(pairs.items())]
        rank, (gib, needed) = max(pairs.items(), key=lambda item: abs(item[1][0] - item[1][1]))
        fits = abs(gib - needed) <= MEMORY_ERROR * needed + MEMORY_BESIDE
        self.report.add(fits, f"{job}: memory", f"rank {rank} reserves {gib:.1f} GiB, calculated {needed:.1f}")

    def _expected_memory(self, job: Job) -> list[float]:
        """In GiB, by pipeline rank; empty for a config that `zbpipe estimate` cannot calculate."""
        dry = self._env({"DRY_RUN": "1"})
        command = subprocess.run([str(self._script)], env=dry, capture_output=True, text=True, check=False).stdout
        config = command.splitlines()[-1].split("zbpipe.titan.train ", 1)[-1].split()
        said = subprocess.run(
            [
                *(sys.executable, "-m", "zbpipe", "estimate", "--ranks", "--json", "--gpus", str(self._ranks), *config),
                *("--parallelism.pipeline_parallel_schedule", job.schedule, *self._arguments.trainer),
            ],
            env=dry | {"PYTHONPATH": self._settings.get("PYTHONPATH", "")},
            capture_output=True,
            text=True,
            check=False,
        )
        return [rank["total"] / 2**30 for rank in json.loads(said.stdout)["ranks"]] if said.returncode == 0 else []

    def _trace(self, file: Path) -> None:
        try:
            events: list[Any] = json.loads(file.read_text())["traceEvents"]
        except (OSError, ValueError, KeyError) as error:
            self.report.add(False, "trace", f"{type(error).__name__}: {error}")
        else:
            self.report.add(len(events) > 0, "trace", f"{len(events)} events in {file.name}, for ui.perfetto.dev")

    def _compare(self) -> None:
        """On GPUs each of zbpipe's schedules, at its best, has to beat 1F1B; on a CPU the ranks share cores."""
        usual = self._best.pop("1F1B", 0.0)
        for schedule, tps in self._best.items() if usual else ():
            shorter = 1 - usual / tps
            passed = None if self._platform == "cpu" else shorter > 0
            words = f"{abs(shorter):.1%} {'shorter' if shorter >= 0 else 'longer'} step than 1F1B"
            self.report.add(passed, f"{schedule} at its best", words)


_ON_GPUS = "llama3_8b_no_downloads"


@contextmanager
def _ended(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Afterwards `process` and its children have ended."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun passes it on to its ranks
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
        # A shell that is told to end leaves what it has started.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _text(file: Path) -> str:
    return file.read_text(errors="replace")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "-"


def _words(text: str) -> list[str]:
    return text.split(",")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    on_gpus = torch.cuda.is_available() and os.environ.get("PLATFORM") != "cpu"
    parser = argparse.ArgumentParser(prog="first_run.sh", allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("first_run"), help="folder for report, logs, seed and trace")
    parser.add_argument("--steps", type=int, default=20 if on_gpus else 3, help="of each job")
    parser.add_argument("--timeout", type=float, default=1800.0 if on_gpus else 300.0, help="seconds for each job")
    parser.add_argument("--schedules", type=_words, default=_words("Interleaved1F1B,ZBLoop,ZB"), help="besides 1F1B")
    # zbpipe chooses "nearest" or "rendezvous" for most schedules on AMD's GPUs; the latter nowhere else.
    ways = "early,late,timed,nearest,rendezvous" if torch.version.hip else "early,late,timed"
    parser.add_argument("--receives", type=_words, default=_words(ways), help="ways to try with each")
    parser.add_argument("trainer", nargs="*", help="after --: arguments for the trainer")
    return parser.parse_args(arguments)


def main() -> None:
    sys.exit(1 if FirstRun(parse(sys.argv[1:])).run() else 0)


if __name__ == "__main__":
    main()
