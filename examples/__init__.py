"""Plain Lightning code to train: no module here knows of, or imports, the package of techniques."""
