"""The base of both packages: facts about GPUs and types, errors, files, child processes, compilers and pages."""
