"""The cost model: seconds and bytes of one call of a block, such as a layer (`call`), and of a whole step (`step`)."""

MEAN_ERRORS = {  # (mean error of step times of published runs, number of runs); see docs/accuracy.md
    "known": (0.064, 2147),
    "unseen": (0.119, 395),  # runs from which no constant of the cost model was set
}
