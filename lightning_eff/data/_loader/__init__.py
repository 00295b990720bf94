"""How a training loader's settings are changed without changing its batches."""
