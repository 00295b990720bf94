"""Fresh copies of the run, that train beside each other in turns."""
