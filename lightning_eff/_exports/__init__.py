"""The public names, which are imported when first used."""
