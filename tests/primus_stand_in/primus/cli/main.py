"""What `primus-cli direct` starts in every process: `train pretrain --config FILE`, here on the CPU."""

import sys
from pathlib import Path

import torch.distributed as dist
from primus.core import experiment, patches


def main() -> None:
    from zbpipe.frameworks.titan import cpu

    cpu.stand_in()
    _, sections = experiment.load(Path(sys.argv[sys.argv.index("--config") + 1]))
    config = experiment.job_config(sections)
    patches.run_patches("torchtitan", "setup", experiment.namespace(sections))
    from torchtitan.train import Trainer

    Trainer(config).train()
    dist.destroy_process_group()
