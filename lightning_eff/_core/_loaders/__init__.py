"""The parts of a training loader that determine its batches: samplers, generators and iterators."""
