"""Read text or token shards as two streams of tokens, and batches from them."""
