"""The programs of one plan, which share parameters and optimizer states: training steps for several batch shapes,
evaluation and generation. Their data types, their compact form in plan files, and the padding of their batches.
"""
