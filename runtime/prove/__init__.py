"""Prove that a program is complete and free of deadlock, without running it."""
