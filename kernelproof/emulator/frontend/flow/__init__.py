"""Control flow of a kernel: calls inlined, basic blocks, an order that reconverges, liveness, uniformity."""
