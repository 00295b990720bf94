"""Generates the site from the classes, their cases and the committed results; ``make docs`` runs it."""
