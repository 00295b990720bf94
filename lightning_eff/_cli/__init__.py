"""The parts of the command line: configs, errors and `select`."""
