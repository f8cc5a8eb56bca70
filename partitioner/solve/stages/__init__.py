"""Cuts the calls of a model into pipeline stages under the memory of each stage."""
