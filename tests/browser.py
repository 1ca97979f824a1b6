"""Chromium without a window, driven over WebDriver (w3.org/TR/webdriver2) by the standard library alone."""

import base64
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

import pytest

_BROWSERS, _DRIVERS = ("chromium", "chromium-browser", "google-chrome"), ("chromedriver", "chromium.chromedriver")
_ARGUMENTS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


def _found(names: tuple[str, ...]) -> str | None:
    return next((path for name in names if (path := shutil.which(name))), None)


def require_browser() -> tuple[str, str]:
    """The paths of the browser and its driver; without them the test is skipped, or fails where CI installed them."""
    browser, driver = _found(_BROWSERS), _found(_DRIVERS)
    if browser and driver:
        return browser, driver
    if os.environ.get("ZBPIPE_NEEDS_BROWSER"):
        pytest.fail("ZBPIPE_NEEDS_BROWSER is set, and chromium or chromedriver is not installed")
    pytest.skip("needs a browser: apt-get install chromium chromium-driver")


class Browser:
    def __init__(self, address: str, session: str) -> None:
        self._session = f"{address}/session/{session}"

    def _post(self, command: str, **body: Any) -> Any:
        return _request(f"{self._session}/{command}", body)

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self._post("goog/cdp/execute", cmd=command, params=parameters)

    def show(
        self, page: Path | str, width: int = 1280, height: int = 800, *, dark: bool = False, phone: bool = False
    ) -> None:
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1 + phone, mobile=phone
        )
        self.devtools("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", features=[scheme])
        self._post("url", url=page.as_uri() if isinstance(page, Path) else page)

    def run(self, script: str, *arguments: Any) -> Any:
        return self._post("execute/sync", script=script, args=list(arguments))

    def until(self, condition: str, seconds: float = 10) -> None:
        end = time.monotonic() + seconds
        while not self.run(f"return Boolean({condition})"):
            assert time.monotonic() < end, f"never true: {condition}; the console says {self.console()}"
            time.sleep(0.02)

    def press(self, *keys: str) -> None:
        for key in keys:
            for kind in ("keyDown", "keyUp"):
                text = {"text": key} if len(key) == 1 and kind == "keyDown" else {}
                self.devtools("Input.dispatchKeyEvent", type=kind, key=key, **text)

    def touch(self, *moments: list[tuple[float, float]]) -> None:
        """Fingers at these points, moment by moment; they are lifted at the end."""
        for n, fingers in enumerate(moments):
            points = [{"x": x, "y": y, "id": finger} for finger, (x, y) in enumerate(fingers)]
            self.devtools("Input.dispatchTouchEvent", type="touchMove" if n else "touchStart", touchPoints=points)
        self.devtools("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def wheel(self, x: float, y: float, down: float, *, control: bool = False) -> None:
        how: dict[str, Any] = {"x": x, "y": y, "deltaX": 0, "deltaY": down, "modifiers": 2 if control else 0}
        self.devtools("Input.dispatchMouseEvent", type="mouseWheel", **how)

    def point(self, x: float, y: float) -> None:
        self.devtools("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def console(self) -> list[str]:
        return [entry["message"] for entry in self._post("se/log", type="browser")]


def _request(address: str, body: dict[str, Any] | None = None, method: str | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(json.load(error)["value"]["message"]) from None


def _port(output: IO[str]) -> int:
    """Where the driver listens, which it says in one of its first lines."""
    for line in output:
        if found := re.search(r"started successfully on port (\d+)", line):
            return int(found[1])
    raise AssertionError("chromedriver ended")


@contextmanager
def running_browser() -> Iterator[Browser]:
    browser, driver = require_browser()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        ends: list[Callable[[], object]] = [process.wait, process.terminate]
        try:
            assert process.stdout is not None
            address = f"http://127.0.0.1:{_port(process.stdout)}"
            options = {"binary": browser, "args": [*_ARGUMENTS, f"--user-data-dir={profile}"]}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            session = _request(f"{address}/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
            ends.append(lambda: _request(f"{address}/session/{session}", method="DELETE"))
            yield Browser(address, session)
        finally:
            while ends:
                ends.pop()()


def page_data(page: str) -> dict[str, Any]:
    match = re.search(r'<script id="data" type="text/plain">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    return json.loads(zlib.decompress(base64.b64decode(match[1])))


def page_ops(data: dict[str, Any], columns: dict[str, list[int]]) -> list[tuple[str, float, float]]:
    ends = list(accumulate(gap + length for gap, length in zip(columns["gap"], columns["length"], strict=True)))
    names = (
        f"{stage}{data['kinds'][kind][0]}{microbatch}"
        for stage, kind, microbatch in zip(columns["stage"], columns["kind"], columns["microbatch"], strict=True)
    )
    return [
        (name, (end - length) * data["tick"], end * data["tick"])
        for name, end, length in zip(names, ends, columns["length"], strict=True)
    ]
