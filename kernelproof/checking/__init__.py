"""Any CUDA program, executed and checked without a GPU: compiled once, run in a process of its own, findings collected.

``compilation`` makes a library of sources; ``plan`` says what to run; ``supervision`` runs a plan in a process with
limits and collects what it reports; ``execution`` is that process; ``result`` is the outcome, which ``document``,
``sarif``, ``annotations`` and ``page`` write down.
"""
