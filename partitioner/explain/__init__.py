"""Texts and tables about plans: summary, explanation, difference, measured against predicted."""
