"""Proofs that a kernel is right for every size, where the emulator executes some.

The threads of a CTA are known, the problem is not: registers are polynomials over named integers with a coefficient per
lane, and data are known by their origin in place of their value.

- ``certificate``: proves a PTX text, and checks a certificate again.
- ``loops``: the cases of a proof; ``invariants`` says what holds at a loop's head, ``guessing`` guesses it.
- ``pipelines``: what roles do that mbarriers alone order, and why that is enough. ``pipeline_proof`` finds the roles,
  and ``roles`` proves each, on ``role_machine``, to which ``box_machine``, ``part_machine``, ``cluster_machine`` and
  ``warpgroup_machine`` add memory, partial sums, other CTAs and wgmma. ``accumulators``: what is in flight in
  registers.
- ``sum_proof``: how partial sums of a pipeline are added, by any thread of a group (``share``) on ``sum_machine``;
  ``conditions`` keep predicates open, and ``rests`` name quotients.
- ``machine``: runs a kernel's text, which the emulator's instructions write (``program``), on ``words`` and ``cells``
  in place of arrays (``abstract``), with ``shared_memory`` and ``products`` as its units.
- ``facts``: what is known of the named integers; ``polynomials``; ``solver`` asks z3 where bounds do not suffice.
- ``contract``: what a proof is told of a kernel. Who states contracts for kernels of their own uses the names below.
"""

from kernelproof.certificates import rests
from kernelproof.certificates.certificate import ASSUMPTIONS, Certificate, Claim, prove, recheck
from kernelproof.certificates.contract import Bounds, BoxMap, Contract, Matrix, Tile
from kernelproof.certificates.facts import Facts, NotCertified, Quotient
from kernelproof.certificates.global_places import ARRIVALS, PARTIALS
from kernelproof.certificates.items import Items
from kernelproof.certificates.loops import TILES, Ring
from kernelproof.certificates.pipelines import Parts, Pipeline
from kernelproof.certificates.polynomials import ZERO, Polynomial
from kernelproof.certificates.program import Program
from kernelproof.certificates.slices import Slices

__all__ = [
    "ARRIVALS",
    "ASSUMPTIONS",
    "PARTIALS",
    "TILES",
    "ZERO",
    "Bounds",
    "BoxMap",
    "Certificate",
    "Claim",
    "Contract",
    "Facts",
    "Items",
    "Matrix",
    "NotCertified",
    "Parts",
    "Pipeline",
    "Polynomial",
    "Program",
    "Quotient",
    "Ring",
    "Slices",
    "Tile",
    "prove",
    "recheck",
    "rests",
]
