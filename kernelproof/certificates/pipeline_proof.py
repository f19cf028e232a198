"""Proves a pipelined kernel: all CTAs of a cluster together, each by its roles."""

from __future__ import annotations

from collections.abc import Iterator

from kernelproof.certificates.accumulators import check_accumulators
from kernelproof.certificates.cells import Kinds
from kernelproof.certificates.cluster_sum_proof import ClusterSumProof
from kernelproof.certificates.contract import Contract
from kernelproof.certificates.cta_proof import CtaProof
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.invariants import Invariant
from kernelproof.certificates.loops import Case
from kernelproof.certificates.pipelines import Pipeline
from kernelproof.certificates.program import Program
from kernelproof.certificates.sum_proof import SumProof
from kernelproof.certificates.tensor_loops import end_of_setup
from kernelproof.certificates.tensor_proof import TensorCta


class PipelineProof:
    """Proves a kernel's pipeline under a contract. ``invariants``: of the producer, then of each group of consumers. In
    a cluster, those of all CTAs' producers come first."""

    def __init__(
        self, program: Program, contract: Contract, pipeline: Pipeline, invariants: tuple[Invariant, ...] = (),
        guesses: bool = True,
    ) -> None:  # fmt: skip
        if program.graph.spin_heads and pipeline.parts is None:
            raise NotCertified("a loop that waits for memory is not covered")
        self.program, self.contract, self.pipeline = program, contract, pipeline
        self.invariants, self.guesses = list(invariants), guesses
        self.kinds = Kinds()

    def cases(self) -> Iterator[Case]:
        """Prove every role, and yield its case. Raises NotCertified at the first that cannot be proven."""
        check_accumulators(self.program)
        size = self.contract.shared_bytes + self.program.layout.shared_static
        of_cta = TensorCta if self.pipeline.tensor else CtaProof
        ctas = [
            of_cta(self.program, self.kinds, self.invariants, self.guesses, *each, size)
            for each in ((self.contract, self.pipeline), *self.pipeline.peers)
        ]  # fmt: skip
        for cta in ctas:
            cta.protocol.cluster = [each.protocol for each in ctas]
        found: list[Invariant] = []
        for cta in ctas:
            yield cta.begin(self._barrier())
        # All producers are proven first, since consumers read what producers of other CTAs load.
        for cta in ctas:
            yield cta.prove(0, found)
        for cta in ctas:
            cta.protocol.check_stages()
        for cta in ctas:
            for number in cta.roles:
                yield cta.prove(number, found)
        self.invariants = found
        for cta in ctas:
            cta.check()
        if self.pipeline.adds:
            adding = [(cta.contract, cta.pipeline, cta.protocol, cta.adding_states) for cta in ctas]
            yield from ClusterSumProof(self.program, self.kinds, adding).cases()
        if self.pipeline.adders is not None:
            stores = any((state.track.stores.read != 0).any() for cta in ctas for state in cta.adding_states)
            protocols = [cta.protocol for cta in ctas]
            yield from SumProof(self.program, self.pipeline, protocols, self.kinds, stores).cases()

    def _barrier(self) -> int:
        """The block after the barrier of the CTA, or of its cluster. A barrier within a loop is not that one: groups
        that add partial sums have such barriers."""
        if self.pipeline.tensor is not None:
            return end_of_setup(self.program)
        waits = ("barrier.cluster.wait",) if self.pipeline.ranks > 1 else ("bar.sync", "barrier.sync")
        blocks = [x for x in self.program.blocks if any(ins.op.startswith(waits) for ins in x.all())]
        if self.pipeline.parts is not None:
            looped = set[int]().union(*self.program.loops.values())
            blocks = [block for block in blocks if block.index not in looped]
        if len(blocks) != 1 or blocks[0].end != "wait":
            raise NotCertified("a CTA without one barrier of all its threads before they have roles")
        return blocks[0].targets[0]
