"""The efficiency monitor: speed, FLOPs, memory, energy and cost of any run."""
