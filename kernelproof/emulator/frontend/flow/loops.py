"""Computes dominators, loops, and an order of blocks in which diverged lanes converge as early as possible."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kernelproof.emulator.frontend.flow.blocks import Block


def dominators(successors: list[list[int]], root: int) -> list[int]:
    """The dominators of each node of a graph with the entry ``root``, as a mask: bit d is set if node d is on all paths
    from ``root`` to the node. Unreachable nodes get 0."""
    n = len(successors)
    predecessors: list[list[int]] = [[] for _ in range(n)]
    reached, stack, order = {root}, [(root, iter(successors[root]))], []
    while stack:
        node, children = stack[-1]
        for nxt in children:
            predecessors[nxt].append(node)
            if nxt not in reached:
                reached.add(nxt)
                stack.append((nxt, iter(successors[nxt])))
                break
        else:
            order.append(node)
            stack.pop()
    order.reverse()
    # ``order`` is now in reverse postorder: a block comes after its predecessors, except for back edges. So the loop
    # below needs few passes.
    everything = (1 << n) - 1
    dom = [0] * n
    for node in order:
        # Start from "dominated by all" and intersect over predecessors until nothing changes.
        dom[node] = everything
    dom[root] = 1 << root
    changed = True
    while changed:
        changed = False
        for node in order:
            if node == root:
                continue
            mask = everything
            for p in predecessors[node]:
                mask &= dom[p]
            mask |= 1 << node
            if mask != dom[node]:
                dom[node], changed = mask, True
    return dom


def bits(mask: int) -> Iterator[int]:
    """The numbers of the bits that are set."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def reachable(blocks: list[Block], starts: Iterable[int], stop: int | None = None) -> set[int]:
    """The blocks that can be reached from ``starts``, which are included, without passing through ``stop``."""
    reached: set[int] = set()
    stack = list(starts)
    while stack:
        node = stack.pop()
        if node != stop and node not in reached:
            reached.add(node)
            stack += blocks[node].targets
    return reached


def natural_loops(blocks: list[Block]) -> tuple[dict[int, int], set[tuple[int, int]], bool]:
    """The natural loops (head -> mask of the blocks of the body), the back edges (from, to), and whether the graph is
    reducible."""
    # A back edge leads to a block that dominates its source, the head of a loop. The body has every block from which
    # the source can be reached without passing through the head. Loops with the same head are one loop.
    successors = [b.targets for b in blocks]
    dom = dominators(successors, 0)
    predecessors: list[list[int]] = [[] for _ in blocks]
    for b in blocks:
        if dom[b.index]:
            for t in b.targets:
                predecessors[t].append(b.index)
    back = {(b.index, t) for b in blocks if dom[b.index] for t in b.targets if dom[b.index] >> t & 1}
    loops: dict[int, int] = {}
    for tail, head in back:
        body, stack = loops.get(head, 1 << head), [tail]
        while stack:
            node = stack.pop()
            if not body >> node & 1:
                body |= 1 << node
                stack += predecessors[node]
        loops[head] = body
    return loops, back, _is_acyclic(blocks, dom, back)


def _is_acyclic(blocks: list[Block], dom: list[int], back: set[tuple[int, int]]) -> bool:
    """Is the graph of reachable blocks acyclic without its back edges? Then it is reducible."""
    # Kahn's algorithm: if every reachable block can be removed, there is no cycle.
    indegree = [0] * len(blocks)
    for b in blocks:
        if dom[b.index]:
            for t in b.targets:
                indegree[t] += (b.index, t) not in back
    ready, removed = [0], 0
    while ready:
        node = ready.pop()
        removed += 1
        for t in blocks[node].targets:
            if (node, t) not in back:
                indegree[t] -= 1
                if indegree[t] == 0:
                    ready.append(t)
    return removed == sum(1 for d in dom if d)


def add_latches(blocks: list[Block]) -> None:
    """Give each loop a single back edge, so that lanes that branch to the next iteration converge before its head."""
    _, back, _ = natural_loops(blocks)
    tails: dict[int, list[int]] = {}
    for tail, head in sorted(back):
        tails.setdefault(head, []).append(tail)
    for head, sources in tails.items():
        if len(sources) < 2:
            continue
        latch = Block(len(blocks), [], targets=[head], line=blocks[head].line)
        blocks.append(latch)
        for source in sources:
            blocks[source].targets = [latch.index if t == head else t for t in blocks[source].targets]


def scheduling_order(blocks: list[Block]) -> tuple[list[int], bool]:
    """The order in which the machine prefers blocks, and whether the graph is reducible.

    The order contains the reachable blocks, topologically sorted except for back edges, and every loop is contiguous in
    it. The machine always runs the group of lanes whose block comes first. So after a divergent branch, lanes that have
    reached the join wait for those that have not, and lanes that have left a loop wait for those still in it.
    """
    loops, _, reducible = natural_loops(blocks)
    dom = dominators([b.targets for b in blocks], 0)
    reachable = sum(1 << i for i, d in enumerate(dom) if d)
    return _arrange(blocks, loops, reachable, 0), reducible


def _arrange(blocks: list[Block], loops: dict[int, int], nodes: int, head: int) -> list[int]:
    """Order ``nodes`` (a mask of blocks), which are the body of the loop with this head, or the whole graph.

    Each outermost loop among them counts as one item and is then ordered by itself, so that it is contiguous. Edges
    back to ``head`` do not count, so the items of a reducible graph have no cycle. In an irreducible graph, every
    remaining item may have a predecessor; then the item that comes first in the text is next.
    """
    # Loops are masks of blocks: ``inner`` has all loops within ``nodes``, ``outermost`` those within no other one.
    # ``owner``: block -> head of the outermost loop around it, which stands for the loop among the items.
    inner = {h: m & nodes for h, m in loops.items() if h != head and nodes >> h & 1 and m & ~nodes == 0}
    outermost = {
        h: m for h, m in inner.items() if not any(o != h and om & m == m and om != m for o, om in inner.items())
    }
    owner = {node: h for h, m in outermost.items() for node in bits(m)}
    items = {owner.get(n, n) for n in bits(nodes)}
    indegree = dict.fromkeys(items, 0)
    edges: dict[int, set[int]] = {i: set() for i in items}
    for n in bits(nodes):
        source = owner.get(n, n)
        for t in blocks[n].targets:
            target = owner.get(t, t)
            if nodes >> t & 1 and t != head and target != source and target not in edges[source]:
                edges[source].add(target)
                indegree[target] += 1
    out: list[int] = []
    remaining = set(items)
    while remaining:
        ready = [i for i in remaining if indegree[i] == 0]
        # The first one in the text is chosen, so that the order does not depend on the iteration of sets.
        chosen = min(ready) if ready else min(remaining)
        remaining.discard(chosen)
        for t in edges[chosen]:
            indegree[t] -= 1
        out += _arrange(blocks, loops, outermost[chosen], chosen) if chosen in outermost else [chosen]
    return out


def immediate_postdominators(blocks: list[Block]) -> list[int | None]:
    """For every block, the first block through which all of its paths to the end lead; None if there is none."""
    n = len(blocks)
    reverse: list[list[int]] = [[] for _ in range(n + 1)]
    for b in blocks:
        for t in b.targets:
            reverse[t].append(b.index)
        if not b.targets:
            reverse[n].append(b.index)
    dom = dominators(reverse, n)
    out: list[int | None] = []
    for b in blocks:
        candidates = [c for c in bits(dom[b.index]) if c not in (b.index, n)]
        # The immediate postdominator is the candidate that has all other candidates as postdominators.
        best = max(candidates, key=lambda c: dom[c].bit_count(), default=None)
        out.append(best)
    return out
