"""Proves that a kernel is right for every size, while the emulator can only execute some sizes.

A proof executes one CTA whose threads are known and whose problem is not. Registers are polynomials over named integers
with a coefficient per lane, and data are known by their origin, not by their value.

- ``certificate`` proves a PTX text, and checks a certificate again.
- ``loops`` has the cases of a proof. ``invariants`` state what holds at a loop's head, and ``guessing`` guesses them.
- ``machine`` executes a kernel's text, which the emulator's instructions generate (``program``), on ``words`` and
  ``cells`` in place of arrays (``abstract``). ``shared_memory`` and ``products`` are units of it.
- ``pipelines`` says what roles must do that only mbarriers order, and why that suffices. ``cta_proof`` finds the
  roles of each CTA for ``pipeline_proof``; ``roles`` and ``item_roles`` prove each of them on ``role_machine``.
  ``box_machine``, ``part_machine``, ``cluster_machine`` and ``warpgroup_machine`` add memory, partial sums, other CTAs
  and wgmma to that. ``accumulators`` checks the registers of wgmma.
- ``sum_proof`` proves how a pipeline's partial sums are added, for any thread of a group (``share``) on
  ``sum_machine``, a ``thread_machine`` that keeps its ``progress``. ``part_loops`` has its
  loop over parts, ``conditions`` predicates that are not decided, and ``rests`` names for quotients.
- ``cluster_sums`` says how CTAs of a cluster send each other partial sums (``sum_sender``), and why that suffices.
  ``cluster_sum_proof`` proves how they add them.
- ``tensor_memory`` says how accumulators in tensor memory are used, and why that suffices. ``tensor_machine`` and
  ``tensor_products`` execute the roles of such a CTA, and ``tensor_proof`` proves them. ``store_role`` has the group
  that stores the sums.
- ``single_shot`` proves kernels whose CTAs load all of their k at once, on ``shot_machine`` for all threads and then
  for any thread. ``edges`` copies what lies within A and B. ``sum_peer``, ``cluster_addresses`` and ``waits`` are what
  such CTAs and roles have in common.
- ``facts`` has what is known of the named integers of ``polynomials``. ``solver`` asks z3 where bounds do not suffice.
- ``contract`` states what a kernel must do. To state contracts for kernels of your own, use the names below.
"""

from kernelproof.certificates import rests
from kernelproof.certificates.certificate import ASSUMPTIONS, Certificate, Claim, prove, recheck
from kernelproof.certificates.contract import Bounds, BoxMap, Contract, Matrix, Tile
from kernelproof.certificates.facts import Facts, Fraction, Minimum, NotCertified, Quotient, Reciprocal
from kernelproof.certificates.global_places import ARRIVALS, PARTIALS
from kernelproof.certificates.items import Items
from kernelproof.certificates.loops import TILES, Ring
from kernelproof.certificates.pipelines import Adders, ItemKind, Parts, Pipeline
from kernelproof.certificates.polynomials import ZERO, Polynomial
from kernelproof.certificates.program import Program
from kernelproof.certificates.single_shot import SingleShot
from kernelproof.certificates.slices import Slices
from kernelproof.certificates.tensor_memory import TensorPlan
from kernelproof.certificates.traffic import GlobalAccess, SharedAccess

__all__ = [
    "ARRIVALS",
    "ASSUMPTIONS",
    "PARTIALS",
    "TILES",
    "ZERO",
    "Adders",
    "Bounds",
    "BoxMap",
    "Certificate",
    "Claim",
    "Contract",
    "Facts",
    "Fraction",
    "GlobalAccess",
    "ItemKind",
    "Items",
    "Matrix",
    "Minimum",
    "NotCertified",
    "Parts",
    "Pipeline",
    "Polynomial",
    "Program",
    "Quotient",
    "Reciprocal",
    "Ring",
    "SharedAccess",
    "SingleShot",
    "Slices",
    "TensorPlan",
    "Tile",
    "prove",
    "recheck",
    "rests",
]
