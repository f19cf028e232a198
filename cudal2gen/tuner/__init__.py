"""The tuner: proposers suggest records, an environment evaluates them, and a cost model learns from the trials.

The modules, each of which builds on those before it: ``environment`` and ``on_gpu`` evaluate records, ``reward`` scores
trials, ``proposal`` and ``proposers`` suggest records, ``cost_model`` and ``training`` predict times, ``executor`` runs
evaluations, ``search`` tunes one problem, ``language_model`` talks to a model's server, ``campaign`` tunes many
problems and updates the catalog, ``benchmark`` compares proposers, and in ``writing`` a model writes kernels.
"""
