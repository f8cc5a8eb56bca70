"""Solve one candidate of the search (mesh, microbatch size, schedule, ZeRO stage) on its possible placements, for a job
with a prepared model."""
