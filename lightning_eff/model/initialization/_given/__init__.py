"""Branches and attention that users name, where they are not found or not to be looked for."""
