"""Analyses the control flow of a kernel: calls, basic blocks and their order, liveness and uniformity of registers.

Module ``graph`` states what the order of blocks guarantees. The other modules compute parts of the graph.
"""
