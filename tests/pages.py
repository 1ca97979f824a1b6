"""What zbpipe's HTML pages hold."""

import base64
import json
import re
import zlib
from itertools import accumulate
from typing import Any


def page_data(page: str) -> dict[str, Any]:
    match = re.search(r'<script id="data" type="text/plain">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    return json.loads(zlib.decompress(base64.b64decode(match[1])))


def page_ops(data: dict[str, Any], columns: dict[str, list[int]]) -> list[tuple[str, float, float, int]]:
    """What a page says of a rank's ops: (op, start, end, step)."""
    ends = list(accumulate(gap + length for gap, length in zip(columns["gap"], columns["length"], strict=True)))
    names = (
        f"{stage}{data['kinds'][kind][0]}{microbatch}"
        for stage, kind, microbatch in zip(columns["stage"], columns["kind"], columns["microbatch"], strict=True)
    )
    return [
        (name, (end - length) * data["tick"], end * data["tick"], step)
        for name, end, length, step in zip(names, ends, columns["length"], columns["step"], strict=True)
    ]
