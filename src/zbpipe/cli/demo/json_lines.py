"""Writes the metrics of a job to a file, for the process that watches the job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torchtitan.components.metrics import BaseLogger


class JsonLines(BaseLogger):  # type: ignore[misc]
    """Passes TorchTitan's metrics to `logger`, and appends one JSON object per step to `file`."""

    def __init__(self, logger: BaseLogger, file: Path) -> None:
        self.logger = logger
        self.file = file

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.logger.log(metrics, step)
        with self.file.open("a") as lines:
            lines.write(json.dumps({"step": step, **metrics}) + "\n")

    def close(self) -> None:
        self.logger.close()
