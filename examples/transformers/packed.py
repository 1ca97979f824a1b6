"""Fine-tunes a causal language model of transformers on the lines of a text file, in a pipeline, without padding.

torchrun --nproc-per-node 4 examples/transformers/packed.py MODEL lines.txt OUTPUT
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

import zbpipe

EPOCHS, BATCH, LENGTH, LEARNING_RATE, MAX_NORM = 2, 16, 512, 1e-4, 1.0

name, file, output = sys.argv[1:]
torch.manual_seed(0)
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name).train()
pipe = zbpipe.pipeline(model, schedule="ZB", microbatches=8)
optimizer = torch.optim.AdamW(pipe.parameters(), lr=LEARNING_RATE)


def collate(lines: list[str]) -> dict[str, Any]:
    """All samples in one row, and the number of tokens of each microbatch, which has two of them."""
    samples = tokenizer(lines, truncation=True, max_length=LENGTH)["input_ids"]
    ids = torch.tensor([[token for sample in samples for token in sample]], device=device)
    positions = torch.cat([torch.arange(len(sample), device=device) for sample in samples])[None]
    labels = ids.masked_fill(positions == 0, -100)  # the last token of a sample does not predict the next sample
    tokens = [sum(map(len, samples[first : first + 2])) for first in range(0, len(samples), 2)]
    return {"input_ids": ids, "position_ids": positions, "labels": labels, "microbatches": tokens}


lines = Path(file).read_text().splitlines()
for epoch in range(EPOCHS):
    for batch in DataLoader(lines, BATCH, shuffle=True, collate_fn=collate, drop_last=True):  # type: ignore[arg-type]
        loss = pipe.step(**batch)
        pipe.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if torch.distributed.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.5f}")

pipe.save_pretrained(output)
