"""Faults that tests have to find: `python tests/mutants.py` puts each into a copy of the package, and runs its test.

A fault is one place in the code. It is caught if its test fails within a minute, where it passes without the fault.
`--part 3/10` takes a tenth of the faults; `--name` those whose description has this text. `--list` prints the table of
tests/README.md.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SECONDS = 60.0
"""Limit of a test, with the start of its process."""


class Mutant(NamedTuple):
    """A fault."""

    what: str
    file: str
    """Within the package."""
    old: str
    """In the file once."""
    new: str
    test: str
    """What pytest is given: a file of tests, with options."""


class Outcome(NamedTuple):
    """What the test said."""

    caught: bool
    words: str


COPIERS, BESIDE = "runtime/offload/copiers.py", "runtime/offload/beside.py"
PASSES, STEP, BACKUP = "simulator/passes.py", "runtime/optimizer/step.py", "runtime/optimizer/backup.py"
STAGE, PRODUCTS, LAST_W = "runtime/split/stage.py", "runtime/split/products.py", "runtime/split/last_w.py"

MUTANTS = (
    # Copies to the host.
    Mutant(
        "a copy out does not wait for the op that made its memory",
        COPIERS,
        "self._out.wait_stream(self._device.current_stream())",
        "pass",
        "test_twin.py",
    ),
    Mutant(
        "memory is freed while it is copied",
        COPIERS,
        "self._device.current_stream().wait_event(copy.event)\n        for storage",
        "for storage",
        "test_twin.py",
    ),
    Mutant(
        "a copy back does not wait for who had the memory",
        COPIERS,
        "self._back.wait_stream(self._device.current_stream())",
        "pass",
        "test_twin.py",
    ),
    Mutant(
        "an op does not wait for its copy",
        COPIERS,
        "self._device.current_stream().wait_event(copy.event)\n        copy.host",
        "copy.host",
        "test_twin.py",
    ),
    Mutant(
        "a copy back is waited for on the wrong stream",
        COPIERS,
        "copy.event = self._back.record_event()",
        "copy.event = self._out.record_event()",
        "test_twin.py",
    ),
    Mutant(
        "W begins before its copy is back",
        BESIDE,
        "self.copier.wait(self._copies.pop(_find_copied(reload)))",
        "self._copies.pop(_find_copied(reload))",
        "test_twin.py",
    ),
    Mutant(
        "memory is allocated again before it was freed",
        BESIDE,
        "            self._release(out)\n",
        "",
        "test_offload_runtime.py",
    ),
    Mutant(
        "the loss is taken for the end of F",
        BESIDE,
        "        if self._loss_comes(op):\n            return result\n",
        "",
        "test_offload_runtime.py -k to_the_bit",
    ),
    # Progress.
    Mutant(
        "an event is not recorded",
        "runtime/ranks/progress.py",
        "        self._events[place].record()\n",
        "",
        "test_twin.py -k behind",
    ),
    Mutant(
        "an event is used twice",
        "runtime/ranks/progress.py",
        "place = self.count % MOST",
        "place = self.count % (MOST // 2)",
        "test_twin.py -k behind",
    ),
    Mutant(
        "a computation is over with the one after it",
        "runtime/ranks/progress.py",
        "                return number\n",
        "                return number - 1\n",
        "test_twin.py -k behind",
    ),
    Mutant(
        "an op's time ends when it is launched",
        "runtime/measure/recording.py",
        "        end.synchronize()\n",
        "",
        "test_twin.py -k behind",
    ),
    # The split.
    Mutant(
        "x that others hold is not copied",
        "runtime/split/ownership.py",
        "autograd.count_holders(storage) > found.accounted",
        "False",
        "test_waiting.py",
    ),
    Mutant(
        "W replaces the gradient of the microbatch before",
        PRODUCTS,
        "grad.addmm_(one, other)",
        "grad.addmm_(one, other, beta=0)",
        "test_split.py",
    ),
    Mutant(
        "a change of x in place is not seen",
        PRODUCTS,
        "if now != gradient.versions:",
        "if not gradient.versions:",
        "test_waiting.py",
    ),
    Mutant(
        "a change of x that versions miss is not seen",
        PRODUCTS,
        "if words := gradient.name_where(map(differ, new, old or new)):",
        "if words := gradient.name_where(map(differ, new, new)):",
        "test_waiting.py",
    ),
    Mutant(
        "the first I defers",
        STAGE,
        "on_trial = self._num_split == 0",
        "on_trial = False",
        "test_waiting.py",
    ),
    Mutant(
        "a parameter of two stages is divided twice",
        STAGE,
        "if parameter.grad is not None and id(parameter) not in later:",
        "if parameter.grad is not None:",
        "test_zoo.py -m '' -k 'p1 and tied and over'",
    ),
    Mutant(
        "gradients of earlier steps are divided",
        "runtime/_torch/pipelining.py",
        "each.mul_(runtime._n_microbatches)",
        "pass",
        "test_modes.py -k one_rank",
    ),
    Mutant(
        "a received tensor is on another device",
        "runtime/_torch/buffers.py",
        "info.buffer = _make_like(info.placeholder, device, keeps_strides)",
        'info.buffer = _make_like(info.placeholder, "cpu", keeps_strides)',
        "test_fake_gpu.py",
    ),
    # Reductions.
    Mutant(
        "a reduction starts one product early",
        LAST_W,
        "        accumulate(own)\n        fsdp_overlap.reduce(unit)\n",
        "        fsdp_overlap.reduce(unit)\n        accumulate(own)\n",
        "test_reduction.py -k each_group",
    ),
    Mutant(
        "products of parameters outside FSDP are lost",
        LAST_W,
        "    accumulate(of_others)\n",
        "",
        "test_reduction.py -k gradients",
    ),
    Mutant(
        "every W reduces",
        STAGE,
        "if last_backward and self.reduces_early:",
        "if self.reduces_early:",
        "test_reduction.py -k each_group",
    ),
    Mutant(
        "the end of the step does not wait for reductions",
        "runtime/_torch/pipelining.py",
        "        fsdp_overlap.finish(self.submod)\n",
        "",
        "test_reduction.py -k each_group",
    ),
    Mutant(
        "reduced gradients are not divided",
        "runtime/_torch/pipelining.py",
        "if self._scale != 1:",
        "if self._scale == 1:",
        "test_reduction.py",
    ),
    # Lists with messages.
    Mutant(
        "a wait for a send comes before its receive is certain",
        PASSES,
        "[wait for posted, wait in others if posted < places[needed]]",
        "[wait for posted, wait in others]",
        "test_actions.py -k do_not_grow",
    ),
    Mutant(
        "a wait for a send is removed",
        PASSES,
        "*(wait for wait in mine if wait not in there)",
        "*(wait for wait in mine[1:] if wait not in there)",
        "test_actions.py -k do_not_grow",
    ),
    Mutant(
        "a receive is posted after a send", PASSES, "release = len(held)", "release = 0", "test_actions.py -k all_ways"
    ),
    Mutant(
        "a receive is swapped with its neighbour",
        PASSES,
        "rows[rank_of[receive.stage]].append(receive)",
        "rows[rank_of[receive.stage]].insert(-1, receive)",
        "test_actions.py -k torch_puts",
    ),
    Mutant(
        "a receive is posted before its turn",
        PASSES,
        "if made > now:",
        "if made > now + 1:",
        "test_actions.py -k all_ways",
    ),
    Mutant(
        "receives do not go before a later send",
        PASSES,
        "while waiting and waiting[0][0] < last:",
        "while waiting and waiting[0][0] < 0:",
        "test_actions.py -k all_ways",
    ),
    # Steps before the last one is validated.
    Mutant(
        "messages of a void step stay",
        "simulator/post_validation.py",
        'each.kind.startswith("RECV") and other_end(each) in sent)',
        'each.kind.startswith("RECV") and other_end(each) not in sent)',
        "test_running_ahead.py -k every_cut",
    ),
    Mutant(
        "a void step keeps its weights",
        STEP,
        "        backup.restore()\n",
        "",
        "test_optimizer_step.py -k ordinary_step",
    ),
    Mutant(
        "a void step keeps its random numbers",
        "runtime/schedules.py",
        "                random.restore()\n",
        "",
        "test_optimizer_step.py -k ordinary_step",
    ),
    Mutant(
        "gradients of a step stay while it is pending",
        STEP,
        "        self._drop_gradients()  # the backup keeps them\n",
        "",
        "test_optimizer_step.py -k ordinary_step",
    ),
    Mutant(
        "a norm above the limit counts",
        STEP,
        "return not norm * (1 + _CLOSE) + _TORCHS_EPSILON < self._max_norm",
        "return norm > 2 * self._max_norm",
        "test_optimizer_step.py -k close_to",
    ),
    Mutant(
        "the norm has one mesh's gradients alone",
        "runtime/optimizer/norm.py",
        "square += norm",
        "square = norm",
        "test_optimizer_step.py -k the_norm",
    ),
    Mutant(
        "a norm that is not finite is voted as 0",
        "runtime/optimizer/norm.py",
        "mine if isfinite(mine) else inf",
        "mine if isfinite(mine) else 0.0",
        "test_optimizer_step.py -k nan",
    ),
    Mutant(
        "a repeated step has no gradients",
        BACKUP,
        "parameter.grad = gradient.restore() if isinstance(gradient, _Copy) else gradient",
        "pass",
        "test_optimizer_step.py -k ordinary_step",
    ),
    Mutant(
        "Nesterov's momentum spoils kept gradients",
        BACKUP,
        "return isinstance(optimizer, SGD) and any(",
        "return False and any(",
        "test_optimizer_step.py -k to_0_itself",
    ),
    Mutant(
        "a buffer that was replaced is not restored",
        BACKUP,
        "owner.update(before)",
        "pass",
        "test_optimizer_step.py -k ordinary_step",
    ),
    # Tied weights.
    Mutant(
        "tied gradients of earlier steps are lost",
        "frameworks/whole_model/tied.py",
        "_gradient(weight).add_(_local(before))",
        "pass",
        "test_whole_model.py -k tied",
    ),
    Mutant(
        "the norm counts copies of tied weights",
        "runtime/optimizer/norm.py",
        "set(map(id, copies))",
        "set()",
        "test_whole_model.py -k tied",
    ),
    Mutant(
        "tied weights are told only if both train",
        "runtime/tied_weights.py",
        "(trains or head_trains)",
        "(trains and head_trains)",
        "test_steps.py -k ties",
    ),
    # Ranks that agree, or do not.
    Mutant(
        "different numbers of microbatches go on",
        "runtime/ranks/step_board.py",
        "if any(each.microbatches != microbatches for each in answers.values()):",
        "if not answers:",
        "test_steps.py -k 'alike or sizes'",
    ),
    Mutant(
        "a step has the messages of another size",
        "runtime/ranks/step_sizes.py",
        "pipelining.use_shapes(runtime, self._set_up[number])",
        "pipelining.use_shapes(runtime, self._set_up[-1])",
        "test_steps.py -k 'alike or sizes'",
    ),
    Mutant(
        "ranks that refuse a step end the pipeline for those that have not begun it",
        "runtime/ranks/step_board.py",
        "if step <= self._run else None",
        "",
        "test_steps.py -k failures_of",
    ),
    Mutant(
        "the second of two failures is taken for the first",
        "runtime/ranks/failures.py",
        "return failure if found is None else Failure(*json.loads(found))",
        "return failure",
        "test_interleavings.py -k two",
    ),
    Mutant(
        "rank 0 ends with the store before others have read",
        "runtime/ranks/step_failures.py",
        "self._notice.wait_for_readers()",
        "pass",
        "test_interleavings.py -k two",
    ),
    # Schedules and their simulation.
    Mutant(
        "the fill of the V is one short",
        "algorithms/zbv.py",
        "fill = 2 * (ranks - rank) - 1",
        "fill = max(1, 2 * (ranks - rank) - 2)",
        "test_schedules.py",
    ),
    Mutant(
        "a W may be missing",
        "simulator/validation.py",
        "f == whole == i | b and i == w and",
        "f == whole == i | b and",
        "test_validation.py",
    ),
    Mutant(
        "a memory limit is not checked in the middle of an op",
        "simulator/validation.py",
        "most = held + costs.needs(op.stage, op.kind)",
        "most = held + costs.adds(op.stage, op.kind)",
        "test_validation.py",
    ),
    Mutant(
        "messages arrive at once",
        "simulator/times.py",
        "return costs.transfer(rank_of[stage], rank_of[taker])",
        "return 0.0 * costs.transfer(rank_of[stage], rank_of[taker])",
        "test_simulation.py",
    ),
    Mutant(
        "a message does not wait for the previous one of its queue",
        "simulator/graph.py",
        "self._wait(node, [*blocking, *last[peer]])",
        "self._wait(node, blocking)",
        "test_transport.py",
    ),
    Mutant(
        "the rank does not wait for its message",
        "simulator/graph.py",
        "self._wait_from(range(op + 1, ops.stop), self.arrivals[op])",
        "pass",
        "test_transport.py",
    ),
    Mutant(
        "a reduction starts before its last W",
        "simulator/graph.py",
        "[*waits, *reduced])",
        "reduced)",
        "test_collectives.py",
    ),
)


def try_out(mutant: Mutant) -> Outcome:
    """Run the mutant's test on a copy of the package with the fault."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "src")
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        file = source / "zbpipe" / mutant.file
        text = file.read_text()
        if text.count(mutant.old) != 1:
            return Outcome(False, f"{mutant.file} has {text.count(mutant.old)} places like {mutant.old!r}")
        file.write_text(text.replace(mutant.old, mutant.new))
        return run_test(mutant.test, source)


def run_test(test: str, source: Path) -> Outcome:
    """Caught if the test fails in time. All its processes have ended then."""
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", *shlex.split(test)]
    process = subprocess.Popen(
        command,
        cwd=ROOT / "tests",
        env={**os.environ, "PYTHONPATH": str(source)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return Outcome(False, f"no end within {SECONDS:.0f} s")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    failed = re.findall(r"^(?:FAILED|ERROR) (test_.+?)(?: - .*)?$", said, re.MULTILINE)
    return Outcome(process.returncode == 1, ", ".join(failed) or said.strip()[-300:])


def parse_arguments(arguments: Sequence[str] | None = None) -> list[Mutant]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", metavar="N/OF", default="1/1", help="of the faults, counted from 1")
    parser.add_argument("--name", default="", help="only faults whose description has this text")
    parsed = parser.parse_args(arguments)
    number, of = map(int, parsed.part.split("/"))
    return [each for each in MUTANTS[number - 1 :: of] if parsed.name in each.what]


def write_table() -> str:
    """A row of Markdown for each file of tests, with the faults that it catches."""
    caught: dict[str, list[str]] = defaultdict(list)
    for mutant in MUTANTS:
        caught[mutant.test.partition(".py")[0]].append(mutant.what)
    return "\n".join(f"| `{file}` | {'; '.join(faults)} |" for file, faults in caught.items())


def main() -> int:
    """Print what caught each fault; returns how many escaped."""
    if "--list" in sys.argv:
        print(write_table())
        return 0
    escaped, mutants = 0, parse_arguments()
    for mutant in mutants:
        began = time.monotonic()
        outcome = try_out(mutant)
        escaped += not outcome.caught
        verdict = "caught" if outcome.caught else "ESCAPED"
        print(f"{verdict:8} {time.monotonic() - began:4.0f} s  {mutant.what}: {outcome.words}", flush=True)
    print(f"{len(mutants) - escaped} of {len(mutants)} faults caught")
    return escaped


if __name__ == "__main__":
    sys.exit(min(main(), 1))
