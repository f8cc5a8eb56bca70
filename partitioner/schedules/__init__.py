"""Pipeline schedules: orders of actions, makespan, microbatches in flight."""
