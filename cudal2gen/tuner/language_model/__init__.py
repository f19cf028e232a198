"""Conducts exchanges with a language model, both for the proposer of records and for the author of kernels.

The two differ only in how they write a question and read an answer. The modules, each of which builds on those before
it: ``transcript`` stores exchanges, from which a restarted run continues; ``completions`` parses what servers send;
``server`` makes one exchange over the network; ``chat`` adds retries, back-off, the budget and the transcript;
``answer_text`` finds the JSON in an answer; ``conversation`` asks a question and its corrections.
"""
