"""Lets a language model write kernels.

The model reads source texts with their times and evidence from machine code, and answers with texts or patches. Each
kernel is compiled, proven in the emulator and timed, and the next question shows the results.

The modules, each of which builds on those before it: ``patches`` applies patches; ``kernel_answers`` reads replies;
``contract`` describes a kernel's launch to the grader; ``review`` searches PTX for cheats; ``proof`` decides whether a
kernel is right; ``evidence`` and ``counters`` explain its speed; ``modelled`` gives times without a GPU; ``judging``
proves, times and rewards one kernel; ``kernel_prompt`` writes questions, and ``exemplars`` chooses the kernels that
they show; ``session`` runs the rounds on one problem; ``crew`` runs many sessions; ``outcome`` turns the winner into a
record, or into a proposal for a reviewer; ``page`` shows the progress; ``rewarding`` scores answers for training.
"""
