"""Find failed, stalled and slow ranks of a run, and name the cause."""
