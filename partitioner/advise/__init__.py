"""Explain why a job (model, batch, cluster and constraints) has no plan, or why its plan does not have other
constraints, and find the smallest changes of the job that make a plan possible."""
