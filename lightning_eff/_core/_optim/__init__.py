"""One optimizer made of several, and the module's schedulers around it."""
