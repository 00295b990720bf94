"""What a run costs and what the machine gives: speed, FLOPs, memory, energy; of any run, with techniques or without."""
