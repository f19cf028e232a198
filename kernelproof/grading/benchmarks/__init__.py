"""Grades solutions of public benchmarks: files of Python that define a reference, and files that replace it.

``recognition`` tells the formats apart by their text. ``rooms`` runs each file in a process of its own, in the sandbox,
with the real torch on the CPU; this process never imports torch and never executes a line of either file. ``wire``
carries messages and tensors between the two. ``judgement`` compares what the rooms answer, and says what ran.

What runs inside a room: ``guest`` answers requests; ``problems`` holds the reference, ``solutions`` the solution;
``cuda_face`` makes the CPU look like a GPU; ``extensions`` and ``triton_kernels`` run kernels on the emulator; and
``ledger`` records which kernels and which operators of torch the results come from.
"""
