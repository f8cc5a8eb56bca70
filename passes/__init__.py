"""Passes over FX graphs: trace a model, normalize its graph, fold it into repeated blocks, shard
and differentiate it.
"""
