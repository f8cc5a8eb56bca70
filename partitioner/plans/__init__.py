"""What is done with a plan: files, outlines, launch scripts, verification, cost of a run."""
