"""From a solved candidate to instruction lists: buckets, ZeRO gathers, sends, offload, frees."""
