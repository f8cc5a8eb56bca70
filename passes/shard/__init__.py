"""From a normal-form graph to what a rank runs: fold, split the batch, shard, differentiate."""
