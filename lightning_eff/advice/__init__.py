"""Advice: a short profile of a run, exact techniques that are tried one by one and together, and what else could help."""
