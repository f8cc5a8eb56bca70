"""Passes over FX graphs: capture, normalise, fold, shard and differentiate a model."""
