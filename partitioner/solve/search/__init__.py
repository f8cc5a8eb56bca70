"""Search the candidates of a job best-first, with a certificate of how good the plan is, and make its program fit in
memory."""
