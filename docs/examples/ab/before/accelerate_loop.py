"""A loop with accelerate, two microbatches a step. A tiny model from a configuration: nothing is downloaded."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = (torch.arange(1600)[:, None] + torch.arange(16)) % 128
loader = DataLoader([{"input_ids": row, "labels": row} for row in tokens], batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
if accelerator.is_main_process:
    print(f"last loss {loss.item():.3f}")
accelerator.end_training()
