"""The input of ``lightning-eff plan``, and the config that it writes for ``lightning-eff fit``."""
