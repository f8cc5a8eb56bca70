"""Use of a finished plan: files, outlines, launch scripts, verification, cost of a run."""
