"""The cost model: seconds and bytes of a block's call (`call`) and of a whole step (`step`)."""

MEAN_ERRORS = {  # of step times of published runs, with their number; the means over families in docs/accuracy.md
    "known": (0.065, 2147),
    "unseen": (0.119, 395),  # runs that no constant was set by
}
