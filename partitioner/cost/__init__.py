"""The cost model: seconds and bytes of one call of a block, such as a layer (`call`), and of a whole step (`step`)."""

# Errors in published runs, from the tables of docs/accuracy.md: means over families of runs.
MEAN_ERRORS = {  # (mean error of step times, number of runs)
    "known": (0.064, 2147),
    "unseen": (0.119, 395),  # runs from which no constant of the cost model was set
}
MEMORY_ERRORS = {  # (mean error of peak memory, number of runs whose source states their memory)
    "known": (0.075, 71),
    "unseen": (0.168, 93),
}
