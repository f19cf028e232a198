"""The tuner: proposers suggest records, an environment says how good they are, a policy learns from it.

From below: ``space`` (what is legal), ``environment`` and ``on_gpu`` (what happens to a record), ``reward``,
``features`` and ``policy``, ``proposers``, ``executor`` (where evaluations run), ``race`` (one problem), ``campaign``
(many, and the catalog), ``benchmark`` (which proposer is better).
"""
