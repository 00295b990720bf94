"""Inspection before a search: the module, each technique alone, and an earlier search in the same folder."""
