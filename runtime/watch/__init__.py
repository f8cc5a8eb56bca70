"""Watching a run: who is where, who waits for whom, who is the cause."""

from runtime.watch.monitor import Monitor
from runtime.watch.slow import SlowRank, SlowRanks
from runtime.watch.watchdog import Watch

__all__ = ["Monitor", "SlowRank", "SlowRanks", "Watch"]
