"""The forms of an advice: a table, a page, a recipe and JSON."""
