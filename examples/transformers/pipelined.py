"""Fine-tunes a causal language model of transformers on the lines of a text file, in a pipeline.

torchrun --nproc-per-node 4 examples/transformers/pipelined.py MODEL lines.txt OUTPUT
"""

import sys
from pathlib import Path

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


def collate(lines: list[str]) -> dict[str, torch.Tensor]:
    batch = tokenizer(lines, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt").to(device)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels}


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
