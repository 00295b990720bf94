"""The parts of a training loader that decide the order of its batches, and the batches that it has made."""
