"""A training loop of one's own: the modules of the package, torch's optimizer, and no `fit`."""

import sys

import torch

from nemotron_ultra import HybridLM, load_recipe, save_model
from nemotron_ultra.data.blend import BlendStream
from nemotron_ultra.data.tokenizer import load_tokenizer
from nemotron_ultra.objectives.next_token import NextToken

config = load_recipe("pretrain", sys.argv[1:])
tokenizer = load_tokenizer(config.data.tokenizer)
stream = BlendStream(config.data, micro_batch_size=4, global_batch_size=8, seed=1, tokenizer=tokenizer)
model = HybridLM(config.model)
objective = NextToken(mtp_loss_scale=0.1, mtp_depths=config.model.depths)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)

for step in range(config.trainer.steps):
    batches = next(stream)
    counted = [objective.count(batch) for batch in batches]
    totals = {name: sum(counts[name] for counts in counted) for name in counted[0]}
    loss = 0.0
    for batch in batches:
        output = model(batch.tokens_T, batch.cu_seqlens)
        part, metrics = objective(output, batch, totals)
        part.backward()
        loss += float(metrics["loss"])
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1}  loss {loss:.3f}")

save_model(model, f"{config.run.dir}/custom")
