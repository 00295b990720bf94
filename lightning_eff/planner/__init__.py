"""Which layout (data, tensor, pipeline) trains a module fastest on so many accelerators: by profile and simulation."""
