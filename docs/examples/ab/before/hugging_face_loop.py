"""A loop of one's own around a Hugging Face model. Tiny, from a configuration: nothing is downloaded."""

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = (torch.arange(800)[:, None] + torch.arange(16)) % 128
loader = DataLoader([{"input_ids": row, "labels": row} for row in tokens], batch_size=4, shuffle=True)

for batch in loader:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"last loss {loss.item():.3f}")
