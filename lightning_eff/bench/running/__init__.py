"""How arms are run: jobs in worker processes, placed, taking turns, and prices confirmed on a quiet stretch."""
