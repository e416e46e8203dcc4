"""A loop of one's own, in the style of nanoGPT: microbatches, a learning rate by hand, clipping, AdamW. Runs on a CPU."""

import torch

from harness.training.models.llama import Llama, LlamaConfig

max_steps, microbatches, length = 200, 2, 32
torch.manual_seed(0)
text = torch.arange(4096) % 61
model = Llama(LlamaConfig(vocab_size=64, max_seq=32, layers=2, width=64, heads=4, kv_heads=2, ffn=128))
optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))


def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and those that follow them, int64 [4, length]."""
    windows = text.unfold(0, length + 1, 1)
    rows = windows[torch.randint(len(windows), (4,))]
    return rows[:, :-1], rows[:, 1:]


step = 0
while True:
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * min(1, (step + 1) / 10)
    for _ in range(microbatches):
        x, y = get_batch()
        loss = model(x, y) / microbatches
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step % 50 == 0:
        print(f"step {step}: loss {loss.item() * microbatches:.3f}")
    if step >= max_steps:
        break
