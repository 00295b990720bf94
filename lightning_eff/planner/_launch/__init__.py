"""What ``lightning-eff plan`` is given, and what it hands to ``lightning-eff fit``."""
