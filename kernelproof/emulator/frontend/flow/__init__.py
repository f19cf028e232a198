"""The control flow of a kernel: calls inlined, basic blocks, an order in which lanes meet again, liveness, uniformity.

Module ``graph`` states what the order guarantees; the other modules compute its parts.
"""
