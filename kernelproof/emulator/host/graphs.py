"""Records CUDA graphs once and executes their work at each launch, in an order that the graph's edges allow.

A captured graph has the work of its streams in the order in which it was issued, and every stream but the first is a
separate branch. A graph may also be built node by node. It is a finding if two branches or nodes touch the same bytes
without a path of edges between them, as for two streams.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from ctypes import string_at
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

from kernelproof.emulator.host.cuda import INVALID_HANDLE, INVALID_VALUE, NOT_SUPPORTED, SUCCESS, LaunchRefused
from kernelproof.emulator.host.graph_memory import GraphMemory, MemoryNodes
from kernelproof.emulator.host.runtime_state import Call, put
from kernelproof.emulator.host.standin import Words

Work = Callable[[int], int]  # does something on a stream; returns a cudaError_t
# The stream to which graphs.c sends the work of nodes; ``begin_node`` says which node the work belongs to.
NODE_STREAM = 3
AUTO_FREE = 1  # cudaGraphInstantiateFlagAutoFreeOnLaunch


@dataclass
class CapturedGraph:
    """A graph (cudaGraph_t) or an executable graph (cudaGraphExec_t).

    ``work``: pairs of branch number and captured work, in the order in which the work was issued; branch 0 is the
    stream on which capture began. ``nodes``: handle of a node -> its work. ``predecessors``: node -> the nodes that it
    waits for. ``memory``: the memory that its nodes allocate and free; a graph and its executable graph share it.
    ``instance``: the executable graph that was made last, which must be the only one if nodes allocate or free memory.
    ``capture``: the number of the capture that records the graph, 0 if none does.

    Executable graphs have ``source``, the graph that they were made from, and ``auto_free``: whether a launch first
    frees the memory that the previous launch has allocated.
    """

    work: list[tuple[int, Work]] = field(default_factory=list)
    nodes: dict[int, list[Work]] = field(default_factory=dict)
    predecessors: dict[int, set[int]] = field(default_factory=dict)
    memory: MemoryNodes = field(default_factory=MemoryNodes)
    source: CapturedGraph | None = None
    auto_free: bool = False
    instance: CapturedGraph | None = None
    capture: int = 0

    def copy(self) -> CapturedGraph:
        """A new graph with the same work. Later changes of either graph do not affect the other."""
        nodes = {node: list(work) for node, work in self.nodes.items()}
        predecessors = {node: set(others) for node, others in self.predecessors.items()}
        return CapturedGraph(list(self.work), nodes, predecessors, self.memory)

    def ordered(self) -> list[int]:
        """The nodes in an order in which each follows all that it waits for. Raises LaunchRefused for a cycle."""
        try:
            return list(
                TopologicalSorter({node: sorted(self.predecessors[node]) for node in self.nodes}).static_order()
            )
        except CycleError:
            raise LaunchRefused(INVALID_VALUE, "the nodes of a graph wait for each other in a circle") from None


@dataclass(frozen=True)
class _Branch:
    """A stream under capture: work that is appended to it is recorded in a graph."""

    graph: CapturedGraph
    number: int

    def append(self, work: Work) -> None:
        """Record work."""
        self.graph.work.append((self.number, work))


class Graphs:
    """The graphs of a session, and the graphs that record at present. ``new_handle``: makes a handle, writes it to an
    address in host memory and returns it. ``play``: runs a graph on a stream and returns a cudaError_t. ``memory``:
    manages the memory that graphs allocate."""

    def __init__(
        self, new_handle: Callable[[int], int], play: Callable[[CapturedGraph, int], int], memory: GraphMemory
    ) -> None:
        self.new_handle, self.play, self.memory = new_handle, play, memory
        self.by_handle: dict[int, CapturedGraph] = {}
        self.capturing: dict[int, _Branch | list[Work]] = {}  # stream -> where its work is recorded
        # Stream -> the graph that records it; NODE_STREAM -> the graph to which a node is being added.
        self.captured: dict[int, CapturedGraph] = {}
        self.captures = 0  # the number of captures that have begun
        self.calls: dict[str, Call] = {
            "capture_status": self.capture_status,
            "capture_info": self.capture_info,
            "capture_begin": self.begin_capture,
            "capture_end": self.end_capture,
            "graph_create": self.create,
            "graph_clone": self.clone,
            "graph_instantiate": self.instantiate,
            "graph_destroy_executable": self.destroy_executable,
            "graph_update": self.update,
            "graph_launch": self.launch,
            "graph_edges": self.add_edges,
            "graph_nodes": self.list_nodes,
            "child_graph": self.add_child,
            "node_begin": self.begin_node,
            "node_again": self.change_node,
            "node_end": self.end_node,
            **memory.calls,
        }

    def _graph(self, handle: int) -> CapturedGraph:
        """The graph of a handle. Raises LaunchRefused if there is none."""
        if handle not in self.by_handle:
            raise LaunchRefused(INVALID_HANDLE, f"{handle:#x} is no graph")
        return self.by_handle[handle]

    def give(self, stream: int, work: Work) -> int:
        """Do work on a stream now, or record it while the stream is under capture."""
        recorded = self.capturing.get(stream)
        if recorded is None:
            return work(stream)
        recorded.append(work)
        return SUCCESS

    # --- capture ---

    def capture_status(self, a: Words) -> int:
        """cudaStreamIsCapturing: stream, out."""
        put(a[1], "i", int(a[0] in self.capturing))
        return SUCCESS

    def capture_info(self, a: Words) -> int:
        """cudaStreamGetCaptureInfo: stream, out status, out number of the capture, or null. Every capture has a
        different number."""
        if a[2] and a[0] in self.capturing:
            put(a[2], "Q", self.captured[a[0]].capture)
        return self.capture_status(a)

    def begin_capture(self, a: Words) -> int:
        """cudaStreamBeginCapture."""
        if a[0] in self.capturing:
            return INVALID_VALUE
        self.captures += 1
        self.join_capture(a[0], CapturedGraph(capture=self.captures), 0)
        return SUCCESS

    def join_capture(self, stream: int, graph: CapturedGraph, branch: int) -> None:
        """Record a stream's work in a graph from now on, as the branch of this number."""
        self.captured[stream] = graph
        self.capturing[stream] = _Branch(graph, branch)

    def end_capture(self, a: Words) -> int:
        """cudaStreamEndCapture: stream, out graph."""
        graph = self.captured.get(a[0])
        if graph is None:
            return INVALID_VALUE
        for stream in [stream for stream, other in self.captured.items() if other is graph]:
            del self.captured[stream], self.capturing[stream]
        self.by_handle[self.new_handle(a[1])] = graph
        return SUCCESS

    # --- graphs ---

    def create(self, a: Words) -> int:
        """cudaGraphCreate: out."""
        self.by_handle[self.new_handle(a[0])] = CapturedGraph()
        return SUCCESS

    def clone(self, a: Words) -> int:
        """cudaGraphClone: out, graph."""
        graph = self._graph(a[1])
        if graph.memory:
            raise LaunchRefused(NOT_SUPPORTED, "a graph that allocates or frees memory cannot be cloned")
        self.by_handle[self.new_handle(a[0])] = graph.copy()
        return SUCCESS

    def instantiate(self, a: Words) -> int:
        """cudaGraphInstantiate: out, graph, flags."""
        graph = self._graph(a[1])
        graph.ordered()
        if graph.memory and graph.instance is not None:
            raise LaunchRefused(
                NOT_SUPPORTED, "a graph that allocates or frees memory has one executable graph at a time"
            )
        executable = graph.instance = graph.copy()
        executable.source, executable.auto_free = graph, bool(a[2] & AUTO_FREE)
        self.by_handle[self.new_handle(a[0])] = executable
        return SUCCESS

    def destroy_executable(self, a: Words) -> int:
        """cudaGraphExecDestroy: executable graph."""
        graph = self.by_handle.pop(a[0], None)
        if graph is not None and graph.source is not None and graph.source.instance is graph:
            graph.source.instance = None
        return SUCCESS

    def update(self, a: Words) -> int:
        """cudaGraphExecUpdate: executable graph, graph whose work it gets."""
        executable, graph = self._graph(a[0]), self._graph(a[1]).copy()
        executable.work, executable.nodes, executable.predecessors = graph.work, graph.nodes, graph.predecessors
        return SUCCESS

    def launch(self, a: Words) -> int:
        """cudaGraphLaunch: executable graph, stream."""
        graph = self._graph(a[0])

        def work(stream: int) -> int:
            self.memory.begin_launch(graph.memory, stream, graph.auto_free)
            return self.play(graph, stream)

        return self.give(a[1], work)

    # --- nodes ---

    def begin_node(self, a: Words) -> int:
        """Add a node to a graph; work that is given to NODE_STREAM from now on is its work. Words: out, graph,
        nodes that the new node waits for, their number."""
        graph, predecessors = self._graph(a[1]), set(_handles(a[2], a[3]))
        if not predecessors <= graph.nodes.keys():
            return INVALID_VALUE
        node = self.new_handle(a[0])
        graph.predecessors[node] = predecessors
        graph.nodes[node] = self.capturing[NODE_STREAM] = []
        self.captured[NODE_STREAM] = graph
        return SUCCESS

    def change_node(self, a: Words) -> int:
        """Replace the work of a node by the work that is given to NODE_STREAM from now on. Words: executable graph
        (0: the graph that has the node), node."""
        graphs = (
            [self._graph(a[0])] if a[0] else [graph for graph in self.by_handle.values() if a[1] in graph.nodes][:1]
        )
        if not graphs or a[1] not in graphs[0].nodes:
            return INVALID_HANDLE
        graphs[0].nodes[a[1]] = self.capturing[NODE_STREAM] = []
        return SUCCESS

    def end_node(self, a: Words) -> int:
        """End the work of the node that ``begin_node`` or ``change_node`` began. Word: the code of the call that gave
        the work; a new node whose call failed is removed."""
        graph, work = self.captured.pop(NODE_STREAM, None), self.capturing.pop(NODE_STREAM, None)
        if a[0] and graph is not None:
            node = next(node for node in graph.nodes if graph.nodes[node] is work)
            del graph.nodes[node], graph.predecessors[node]
        return SUCCESS

    def add_child(self, a: Words) -> int:
        """cudaGraphAddChildGraphNode: graph, stream."""
        graph = self._graph(a[0]).copy()
        if graph.memory:
            raise LaunchRefused(NOT_SUPPORTED, "a graph that allocates or frees memory cannot be part of another one")
        return self.give(a[1], lambda stream: self.play(graph, stream))

    def add_edges(self, a: Words) -> int:
        """cudaGraphAddDependencies: graph, nodes, the node that waits for each of them, their number."""
        graph = self._graph(a[0])
        for first, second in zip(_handles(a[1], a[3]), _handles(a[2], a[3]), strict=True):
            if not {first, second} <= graph.nodes.keys():
                return INVALID_VALUE
            graph.predecessors[second].add(first)
        return SUCCESS

    def list_nodes(self, a: Words) -> int:
        """cudaGraphGetNodes: graph, out nodes or null, number in and out, whether only nodes that wait for none."""
        graph = self._graph(a[0])
        nodes = [node for node in graph.nodes if not (a[3] and graph.predecessors[node])]
        if a[1]:
            (capacity,) = struct.unpack("<Q", string_at(a[2], 8))
            nodes = nodes[:capacity]
            put(a[1], f"{len(nodes)}Q", *nodes)
        put(a[2], "Q", len(nodes))
        return SUCCESS


def _handles(pointer: int, count: int) -> tuple[int, ...]:
    """The 64-bit handles of an array in host memory."""
    return struct.unpack(f"<{count}Q", string_at(pointer, 8 * count)) if count else ()
