"""The standing check on published packages: their modules train with the techniques, or are refused for a true reason."""
