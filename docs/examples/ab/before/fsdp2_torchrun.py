"""FSDP2: `torchrun --standalone --nproc-per-node 2 fsdp2_torchrun.py`. Runs on CPUs, over gloo."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from harness.training.models.llama import Llama, LlamaConfig

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model = Llama(LlamaConfig(vocab_size=64, max_seq=32, layers=2, width=64, heads=4, kv_heads=2, ffn=128))
for layer in model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
draw = torch.Generator().manual_seed(dist.get_rank())  # each rank has batches of its own
text = (torch.arange(4096) % 61).unfold(0, 33, 1)

for _ in range(60):
    rows = text[torch.randint(len(text), (4,), generator=draw)]
    loss = model(rows[:, :-1], rows[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    print(f"last loss {loss.item():.3f}")
dist.destroy_process_group()
