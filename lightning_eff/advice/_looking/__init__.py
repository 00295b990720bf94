"""Parts of the callback that watches a run for problems."""
