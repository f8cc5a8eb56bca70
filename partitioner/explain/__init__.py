"""Texts and tables about plans: the summary, the explanation, the comparison of two plans, and of measured with
predicted times."""
