"""What stochastic rounding in bfloat16 needs beside its updates."""
