"""Advice on a run: exact techniques that make it faster, comparisons worth making, and problems."""
