"""Passes that rewrite a captured graph to normal form, in which each computation is written in one way.

They decompose operators and rewrite losses, attention masks and random numbers.
"""
