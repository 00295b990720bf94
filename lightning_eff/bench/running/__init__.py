"""Run jobs: in worker processes, on idle cores, in turns; and check step costs while the machine is idle."""
