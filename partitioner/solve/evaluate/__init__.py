"""The job, the prepared model, and the solution of one candidate on its placements."""
