"""Grades solutions of public benchmarks: Python files that define a reference, and files that replace it.

A *room* is a sandboxed process that executes one of these files, with the real torch on the CPU. The grader's own
process executes no line of them. In that process, ``recognition`` finds the format of a file by its text, ``task``
reads the cases, ``rooms`` starts the rooms, and ``judgement`` compares their answers. ``wire`` carries messages and
tensors between the grader and a room.

These modules run inside a room: ``guest`` answers requests; ``problems`` executes the reference and the solution;
``cuda_face`` makes the CPU look like a GPU to them; ``extensions`` and ``triton_kernels`` run kernels on the emulator;
and ``ledger`` records which kernels and which operators of torch the results come from.
"""
