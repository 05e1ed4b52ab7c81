"""One model over several processes, each with a share of every layer and of every KV block."""
