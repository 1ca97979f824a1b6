"""A config for TorchTitan's `--module`: the debug model, cut as the table of layers of a plan says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from torchtitan.trainer import Trainer

from zbpipe.cli.demo.models03 import llama3_python_stdlib


def llama3_split() -> Trainer.Config:
    """By `plan.json` in the folder that the job writes into: TorchTitan's command line has no lists of lists."""
    folder = Path(sys.argv[sys.argv.index("--dump_folder") + 1])
    config = llama3_python_stdlib()
    config.parallelism.module_fqns_per_model_part = json.loads((folder.parent / "plan.json").read_text())[
        "module_fqns_per_model_part"
    ]
    return config
