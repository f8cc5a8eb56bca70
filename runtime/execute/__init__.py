"""Executes a rank's instructions: graphs as functions, transfers, overlap, flight recorder."""
