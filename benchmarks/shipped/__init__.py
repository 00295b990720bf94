"""The recipes that come with the package, each compared with its baseline."""
