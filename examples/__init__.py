"""Plain Lightning code to train: no module here knows of, or imports, lightning_eff."""
