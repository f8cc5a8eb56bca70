"""Checkpoints for training: every rank writes its own shards, any plan of the model reads them.

``boxes``: which part of which tensor a rank has, and which rank writes it; ``storage``: the files, in the format of
``torch.distributed.checkpoint``; ``saving``: at once or behind training, complete or not at all; ``loading``: checked,
under any plan; ``series``: one folder of many checkpoints, old ones removed; ``interrupts``: a run that is asked to
end; ``copies``: in the memory of the nodes, in ``slots``, agreed upon and sent by ``peers``.
"""
