"""Explain why a job has no plan, or not another plan, and find the nearest changes that give it one."""
