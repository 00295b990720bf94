"""The parts of a stack of blocks: how it is found, partial views of it, and the state that a module derives from it."""
