"""A language model writes kernels. It reads texts with times and evidence from machine code, and answers with texts or
patches; each is compiled, proven in the emulator and timed, and the next question shows the results.

Modules, from the bottom up: ``patches``, ``kernel_answers`` (what a reply proposes), ``contract`` (how a text is
graded), ``review`` (what its PTX shows a reader), ``proof`` (whether it is right), ``evidence`` and ``counters`` (what
is known of a kernel's speed), ``modelled`` (times without a GPU), ``kernel_prompt``, ``session`` (rounds on one
problem), ``outcome`` (the winner as a record, or as a proposal for a reviewer).
"""
