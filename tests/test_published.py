"""The simulator against published figures whose inputs are published, too: `benchmarks/published.py`."""

from dataclasses import replace
from statistics import fmean

import published_jobs
import pytest
from published import Row, error, predict, read_rows

from zbpipe import estimate
from zbpipe.estimation import layouts
from zbpipe.estimation.devices import find
from zbpipe.estimation.rows import Answer, answer

BOUNDS = {"bubble": 0.004, "ratio": 0.06, "memory": 0.09, "activations": 0.09}
"""Largest error by metric: absolute for bubbles, which the authors computed, and relative for all others."""
GIVEN = [row for row in read_rows() if row.kind == "A" and not row.is_fitted]


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.id, marks=pytest.mark.long if row.p * row.m > 16 * 48 else []) for row in GIVEN]
)
def test_figures_with_published_inputs(row: Row) -> None:
    assert abs(error(row, predict(row))) <= BOUNDS[row.metric]


def test_every_row_has_a_source_and_no_row_counts_twice() -> None:
    rows = read_rows()
    assert all(row.source and row.kind in "ABC" and row.published > 0 for row in rows)
    assert len({row.id for row in rows}) == len(rows)
    assert {row.metric for row in GIVEN} == set(BOUNDS)
    # Inputs that were fitted to a row make it no evidence.
    assert all(row.is_fitted for row in rows if row.kind == "C")


def test_messages_of_megatrons_interleaved_schedule_block() -> None:
    ratios = [row for row in GIVEN if row.metric == "ratio" and row.p < 16]
    interleaved = [row for row in ratios if row.schedule.startswith("Interleaved")]
    assert len(interleaved) == 6
    for row in interleaved:
        hidden = predict(replace(row, source="another trainer"))
        assert abs(error(row, predict(row))) < abs(error(row, hidden))


@pytest.mark.long
def test_published_speeds_of_jobs() -> None:
    """With and without a pipeline: bias, mean error, and four of five within the printed range."""
    jobs = published_jobs.read_jobs()
    fitted, kept_back = ([job for job in jobs if job.use == use] for use in ("fitted", "kept back"))
    assert 3 * len(fitted) <= 2 * len(jobs)
    assert not {job.source for job in kept_back} & {job.source for job in fitted}
    found = [(job, published_jobs.predict(job)) for job in (*fitted, *kept_back)]
    for has_pipeline in (False, True):
        some = [(job, speed) for job, speed in found if (job.p > 1) == has_pipeline]
        errors = [speed.error(job) for job, speed in some]
        assert abs(fmean(errors)) <= 0.04
        assert fmean(map(abs, errors)) <= 0.10
        assert fmean(speed.includes(job) for job, speed in some) >= 0.8
    assert fmean(abs(speed.error(job)) for job, speed in found if job in kept_back) <= 0.13


@pytest.mark.parametrize("name", ["titan-8b-8", "nemo-70b-64", "nemo-405b-576-float8", "tp-70b-256"])
@pytest.mark.parametrize("times", [2, 8])
def test_more_gpus_are_never_faster_each(name: str, times: int) -> None:
    job = next(each for each in published_jobs.read_jobs() if each.id == name)
    few, many = (published_jobs.predict(each).likely for each in (job, replace(job, gpus=times * job.gpus)))
    assert 0.9 * few < many <= few


def test_a_faster_device_or_link_is_never_slower() -> None:
    job = next(each for each in published_jobs.read_jobs() if each.id == "tp-8b-64")
    device = find(job.device)
    work = published_jobs.workload(job)
    first, *others = (
        estimate(work, replace(device, **{name: 1.5 * getattr(device, name)} if name else {}), only=[]).steps[0].seconds
        for name in (None, "peak", "products", "attention", "hbm", "inside", "between")
    )
    assert all(each < first for each in others)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "device", "gpus", "sequences", "options", "expected"),
    [
        ("Llama 3 8B", "H100", 64, 128, "compiled", Answer.NO),
        ("Llama 3 70B", "H100", 64, 128, "compiled", Answer.UNDECIDED),
        ("Llama 3 405B", "H100", 512, 128, "compiled async", Answer.YES),
        ("Llama 3 70B", "MI300X", 64, 128, "compiled", Answer.NO),
    ],
)
def test_the_answers_of_practice(
    monkeypatch: pytest.MonkeyPatch, model: str, device: str, gpus: int, sequences: int, options: str, expected: Answer
) -> None:
    """On 64 H100, 70B is trained with a pipeline (NeMo) and without (MaxText, AutoModel), about equally fast."""
    # Longer pipelines, and all other schedules, take most of the time. VHalf and the plans are the shortest that fit.
    monkeypatch.setattr(layouts, "_MOST_RANKS", min(layouts._MOST_RANKS, gpus // 8))
    like = next(each for each in published_jobs.read_jobs() if each.id == "titan-8b-8")
    changed = replace(like, model=model, device=device, gpus=gpus, microbatch=1, options=frozenset(options.split()))
    work = published_jobs.workload(replace(changed, tp=8, m=sequences * 8 // gpus))
    found = layouts.search(work, device, only=["VHalf"])
    best = {each.workload.degrees.pipeline > 1: each.on_these_degrees for each in reversed(found)}
    assert answer(best[True], best[False]) is expected  # type: ignore[arg-type]
