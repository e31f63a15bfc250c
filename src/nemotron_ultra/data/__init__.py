"""From text to token batches: tokenizer, shards, blends, packs."""
