"""The playground answers what the simulator and the planner say, refuses the rest, and works in a browser."""

import json
import shlex
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from browser import Browser, page_ops, running_browser
from click.testing import CliRunner
from data import refusals
from searching import searching_little

from zbpipe import Schedule, cli, generate, simulate, validate
from zbpipe.costs.transformer import Checkpointing, typical_costs
from zbpipe.views import playground
from zbpipe.views.playground import ADDRESS, Setting, answer_simulation, presets, server

SMALL = Setting(3, 5, 2, 1.0, 1.3, 0.7, 0.1, Checkpointing.SELECTIVE, None)


@pytest.fixture(scope="module", autouse=True)
def short_searches() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, searching_little():
        patch.setattr(playground, "PLAN_BUDGET", 2e4)
        yield


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with server() as started:
        thread = threading.Thread(target=started.serve_forever)
        thread.start()
        yield f"http://{ADDRESS}:{started.server_address[1]}"
        started.shutdown()
        thread.join()


def asked(address: str, path: str, **headers: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(urllib.request.Request(address + path, headers=headers), timeout=60) as found:
            return found.status, json.load(found)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def on_the_command_line(command: str) -> dict[str, Any]:
    program, *arguments = shlex.split(command)
    assert program == "zbpipe"
    return json.loads(CliRunner().invoke(cli.main, [*arguments, "--json"], catch_exceptions=False).stdout)


@pytest.mark.parametrize("name", ["1F1B", "ZB", "Interleaved1F1B", "ZB1P"])
@pytest.mark.parametrize("stages", [1, 3])
def test_the_server_answers_what_the_simulator_says(address: str, name: str, stages: int) -> None:
    setting = replace(SMALL, stages=stages)
    status, found = asked(address, "/schedule?" + urlencode({"name": name, **setting.texts()}))
    assert status == 200
    assert found == json.loads(json.dumps(answer_simulation(setting, name)))
    schedule = Schedule.from_csv(found["csv"])
    shown = simulate(schedule, typical_costs(schedule.placement, "selective", times=(1, 1.3, 0.7), comm=0.1))
    assert (found["makespan"], found["bubble"]) == (shown.makespan, shown.bubble)
    drawn = [op for rank in found["drawing"]["ranks"] for op, *_ in page_ops(found["drawing"], rank["ops"])]
    assert drawn == [str(span.op) for spans in shown.spans for span in spans]
    if name == "Interleaved1F1B":
        assert len(schedule.placement.stages_on(0)) == stages
    said = on_the_command_line(found["command"])
    for key in ("makespan", "bubble", "memory_to_1f1b", "lower_bound"):
        assert found[key] == said[key]


@pytest.mark.parametrize("limit", [None, 0.9])
def test_a_plan_keeps_to_the_limit_and_is_that_of_the_command(address: str, limit: float | None) -> None:
    setting = replace(SMALL, limit=limit)
    status, found = asked(address, "/plan?" + urlencode(setting.texts()))
    assert status == 200
    assert validate(Schedule.from_csv(found["csv"])) == []
    assert found["fits"]
    assert limit is None or found["memory_to_1f1b"] <= limit
    assert found["lower_bound"] <= found["makespan"] <= answer_simulation(setting, "GPipe")["makespan"]
    said = on_the_command_line(found["command"].removesuffix(" -o plan.csv"))
    assert (said["makespan"], said["gap"]) == (found["makespan"], found["gap"])


@pytest.mark.parametrize(("given", "words"), refusals("playground"))
def test_bad_input_is_refused_by_name(address: str, given: str, words: str) -> None:
    changed = dict(each.split("=") for each in given.split())
    path, name = ("/plan?", {}) if "0.01" in given else ("/schedule?", {"name": "ZBV"})
    status, found = asked(address, path + urlencode({**name, **SMALL.texts(), **changed}))
    assert status == 400
    assert words in found["error"]
    for setting in presets().values():
        assert Setting.parse(setting.texts()) == setting


def test_the_server_serves_this_machine_and_nothing_else(address: str, tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(generate("1F1B", 3, 5).to_csv())
    query = urlencode({"name": str(tmp_path / "mine.csv"), **SMALL.texts()})
    assert asked(address, "/schedule?" + query)[0] == 400, "it reads no files"
    assert asked(address, "/schedule?ranks=4")[1]["error"].startswith("microbatches, stages, f, i, w, comm")
    assert asked(address, "/../secret")[0] == 404
    assert asked(address, "/", Host="elsewhere.example:80")[0] == 403, "a name of others that points here"
    with server() as other:
        assert other.server_address[0] == "127.0.0.1"
    with pytest.raises(urllib.error.HTTPError, match="501"):
        urllib.request.urlopen(urllib.request.Request(address + "/", b"{}"), timeout=60)


def test_the_command_serves_until_it_is_ended(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And refuses a port that is taken."""
    opened: list[str] = []

    def ended(self: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr("http.server.ThreadingHTTPServer.serve_forever", ended)
    outcome = CliRunner().invoke(cli.main, ["playground"])
    assert outcome.exit_code == 0
    assert f"the playground is at {opened[0]}; Ctrl-C ends it" in outcome.output
    port = address.rsplit(":", 1)[1]
    outcome = CliRunner().invoke(cli.main, ["playground", "--port", port])
    assert outcome.exit_code == 2
    assert f"--port {port} cannot be used" in outcome.output


def shown(browser: Browser) -> list[str]:
    """The lines of figures, once all three are there."""
    browser.until("pictures.length === 3 && pictures[2].answer && pictures.every(({picture}) => !picture.asked)", 60)
    return list(browser.run("return pictures.map(({figures}) => figures.textContent)"))


def test_the_page_in_a_browser(address: str) -> None:
    with running_browser() as browser:
        browser.show(address + "/", 390, 844, phone=True)
        for line in shown(browser):
            assert line.startswith("step ")
        assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
        browser.show(address + "/")
        shown(browser)
        browser.run('const slider = part("microbatches"); slider.value = 1; slider.dispatchEvent(new Event("input"))')
        lines = shown(browser)
        setting = Setting.parse(browser.run("return setting"))
        assert setting.microbatches == 2
        for line, name in zip(lines, ("Interleaved1F1B", "ZB"), strict=False):
            answer = answer_simulation(setting, name)
            assert line.startswith(f"step {answer['makespan']:.6g}, {answer['bubble']:.1%} idle; no schedule ")
            assert f"memory {answer['memory_to_1f1b']:.2f}x of 1F1B" in line
        assert "ZB has a step" in browser.run('return part("difference").textContent')
        assert "zbpipe plan -p" in browser.run("return pictures[2].command.textContent")
        browser.run("pictures[0].picture.zoom(0.5)")
        browser.until("pictures[1].picture.view.end < pictures[1].picture.until")
        assert browser.console() == []
