"""Resume: what Lightning still has to do after it saved a checkpoint, and the state of a run that it does not save."""
