"""What an advice is written as: a table, a page, a recipe and JSON."""
