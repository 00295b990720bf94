"""Run jobs in worker processes, on idle cores and in turns; check arms and step costs."""
