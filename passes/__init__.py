"""Passes over FX graphs: trace a model, rewrite it to normal form, fold it into repeated blocks, shard and
differentiate it.
"""
