"""The tuner: proposers suggest records, an environment evaluates them, a policy learns from the trials.

From the bottom up: ``space`` (legal candidates), ``environment`` and ``on_gpu`` (evaluation), ``reward``, ``features``,
``network``, ``policy`` and ``checkpoint``, ``proposal`` and ``proposers``, ``executor``, ``search`` (one problem),
``campaign`` (many problems, and the catalog), ``benchmark`` (comparison of proposers).
"""
