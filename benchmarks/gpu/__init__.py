"""What is worth knowing of a GPU, in units of at most 90 seconds, each a process of its own: ``python -m benchmarks.gpu``.

``__main__`` is the command, ``driver`` begins units and ends them, ``process`` is what a unit's process does, ``work`` its
rows, ``files`` the results on disk, ``units`` the list. The others are units, but ``environment`` (the machine), ``timing``,
``table`` and ``page`` (what README and docs say). The driver imports neither torch nor Lightning: nothing that a GPU does can
end it.
"""
