"""Change a training loader's settings without changing its batches."""
