"""Proves what a policy of sessions decides: which CTAs run, what is a finding, who gets findings, who executes."""

from __future__ import annotations

import numpy as np
import pytest

from kernelproof import emulator
from kernelproof.emulator import (
    Buffer,
    Device,
    LaunchRefused,
    LaunchResult,
    Memory,
    Options,
    Report,
    Session,
    SessionHooks,
    SessionPolicy,
)
from kernelproof.emulator.host.cuda import NO_IMAGE
from kernelproof.emulator.host.execution import KernelLaunch
from kernelproof.emulator.host.session import refusal_report

# Each CTA stores its number in its element of x.
NUMBERS = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry numbers(.param .u64 x) {
  .reg .b32 %r; .reg .b64 %p, %q;
  ld.param.u64 %p, [x];
  mov.u32 %r, %ctaid.x;
  mad.wide.u32 %q, %r, 4, %p;
  st.global.u32 [%q], %r;
  ret;
}"""


class Recorder(SessionHooks):
    """Records reports and launches, and executes only launches of more than one CTA."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.launches: list[LaunchResult] = []
        self.executed: list[str] = []

    def execute(self, launch: KernelLaunch) -> LaunchResult:
        """Executes a launch of several CTAs."""
        if launch.geometry.ctas == 1:
            return LaunchResult(launch.kernel, launch.geometry.grid, launch.geometry.block, 0)
        self.executed.append(launch.kernel)
        return launch.execute()

    def report(self, reports: list[Report], launches: list[LaunchResult]) -> None:
        """Takes the reports and launches, and leaves none to the session."""
        self.reports += reports
        self.launches += launches
        reports.clear()
        launches.clear()


def output_buffer(memory: Memory, count: int) -> Buffer:
    """An output of this many numbers, which hold 99."""
    return memory.upload(np.full(count, 99, np.uint32), "output", name="x")


def launch_numbers(policy: SessionPolicy, grid: int, count: int) -> tuple[Session, Buffer]:
    """A session that has launched ``numbers``, and its output."""
    session = Session(policy)
    x = output_buffer(session.memory, count)
    session.run(emulator.load(NUMBERS), "numbers", grid, 1, [x])
    return session, x


def test_a_direct_launch_needs_no_open_session_and_is_kept() -> None:
    session, x = launch_numbers(SessionPolicy(), 4, 4)
    assert x.download().tolist() == [0, 1, 2, 3]
    assert ([launch.kernel for launch in session.launches], session.reports) == (["numbers"], [])


def test_the_filter_chooses_ctas_and_turns_off_the_check_of_outputs() -> None:
    session, x = launch_numbers(SessionPolicy(cta_filter=lambda grid: [0, grid[0] - 1]), 4, 4)
    assert x.download().view(np.int32).tolist() == [0, -1, -1, 3]
    session.check_outputs()
    assert session.reports == []


def test_outputs_are_checked_where_asked_and_those_of_a_launchs_own_memory_at_its_end() -> None:
    session, _ = launch_numbers(SessionPolicy(), 3, 4)
    assert session.reports == []
    session.check_outputs()
    assert [(report.kind, report.count) for report in session.reports] == [("unwritten-output", 1)]
    for check, kinds in ((True, ["unwritten-output"]), (False, [])):
        own = Memory()
        session = Session(SessionPolicy(check_outputs=check))
        session.run(emulator.load(NUMBERS), "numbers", 3, 1, [output_buffer(own, 4)], memory=own)
        assert [report.kind for report in session.reports] == kinds


def test_the_device_and_options_of_the_policy_are_those_of_the_launch() -> None:
    old = SessionPolicy(Device(capability=(7, 5)))
    with pytest.raises(LaunchRefused) as caught:
        launch_numbers(old, 1, 1)
    assert caught.value.code == NO_IMAGE
    session, _ = launch_numbers(SessionPolicy(options=Options(counters=True)), 2, 2)
    counters = session.launches[0].counters
    assert counters is not None
    assert counters.instructions["st.global.u32"] == 2


def test_hooks_execute_launches_and_receive_what_was_found() -> None:
    hooks = Recorder()
    session, x = launch_numbers(SessionPolicy(hooks=hooks), 1, 1)
    assert (hooks.executed, [launch.kernel for launch in hooks.launches]) == ([], ["numbers"])
    assert x.download().view(np.int32).tolist() == [-1]
    session.run(emulator.load(NUMBERS), "numbers", 2, 1, [x])  # the second CTA stores beyond the buffer
    assert hooks.executed == ["numbers"]
    assert ([report.kind for report in hooks.reports], session.reports) == (["global-out-of-bounds"], [])
    assert session.launches == []


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        ("launch", "launch-refused"),
        ("graph_launch", "launch-refused"),
        ("memcpy", "copy-out-of-bounds"),
        ("memcpy_to_symbol", "copy-out-of-bounds"),
        ("func_set_attribute", None),
    ],
)
def test_which_refused_calls_are_findings(call: str, kind: str | None) -> None:
    report = refusal_report(call, LaunchRefused(1, "no"))
    assert (report.kind if report is not None else None) == kind


@pytest.mark.parametrize("strict", [False, True])
def test_refusals_are_findings_only_by_the_policy(strict: bool) -> None:
    class Refusals(SessionHooks):
        def __init__(self) -> None:
            self.first: list[bool] = []

        def refused(self, call: str, refused: LaunchRefused, first: bool) -> None:
            assert call == "memset"
            self.first.append(first)

    hooks = Refusals()
    session = Session(SessionPolicy(refusals_are_findings=strict, hooks=hooks))
    for _ in range(2):
        assert session.handle("memset", (0x1000, 0, 4, 1, 0, 0)) == 1  # host memory: cudaErrorInvalidValue
    assert (len(session.refusals), hooks.first) == (2, [True, False])
    assert [report.kind for report in session.reports] == ["copy-out-of-bounds"] * (2 * strict)


def test_an_unsupported_function_is_reported_once() -> None:
    class Names(SessionHooks):
        def __init__(self) -> None:
            self.names: list[str] = []

        def unsupported(self, function: str) -> None:
            self.names.append(function)

    name = np.frombuffer(b"cudaFoo\0", np.uint8)
    hooks = Names()
    session = Session(SessionPolicy(hooks=hooks))
    for _ in range(2):
        session.handle("unsupported", (int(name.ctypes.data),))
    assert (hooks.names, session.unsupported["cudaFoo"]) == (["cudaFoo"], 2)
