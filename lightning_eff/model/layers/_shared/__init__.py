"""Arguments and choices that the techniques of this folder share."""
