"""Examples in docstrings as code: Markdown takes a line that begins with `>>>` for a quotation."""

from __future__ import annotations

import re
from textwrap import indent
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^>>> .*(?:\n.*\S.*)*", re.MULTILINE)


class Examples(griffe.Extension):
    """Indents each example that is not indented, as Markdown's code blocks are."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(lambda example: indent(example[0], "    "), obj.docstring.value)
