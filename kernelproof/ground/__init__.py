"""What both packages stand on: facts of GPUs and types, errors, files, child processes, the compilers, pages."""
