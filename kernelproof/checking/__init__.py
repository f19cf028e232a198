"""Implements ``kernelproof check``: compiles a CUDA program, runs it on an emulated GPU and collects its errors.

- ``compilation`` compiles the sources into a library of host code and PTX, and caches it.
- ``plan`` describes what to run: the program's main, one function, or single launches.
- ``supervision`` runs a plan in a child process with limits of time and memory, and collects its messages.
- ``execution`` is the code of that child process.
- ``result`` is the outcome, as text for a terminal and as JSON; ``writing`` writes it as SARIF, as annotations for
  GitHub and as an HTML page.
"""
