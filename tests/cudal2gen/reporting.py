"""Makes measurements for tests of the report, and finds parts of a report by anchors, captions and rows."""

from __future__ import annotations

import json
import re
from typing import Any

from cudal2gen import report, results
from cudal2gen.results import KERNEL, Measurement, Measurements
from kernelproof.ground.pages import Section, Table
from tests.cudal2gen.measured import H200, measurement, timing

# A store without environments and measurements.
EMPTY = Measurements({}, [])
# A text that is markup in HTML, in a script and in Markdown.
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> | `a` <b>&amp; \u2028\n# x"


def store_of(*measurements: Measurement, environment: results.Environment = H200) -> Measurements:
    """A store of these measurements and of the environment in which they were made."""
    return Measurements({environment.id: environment}, list(measurements))


def steady(
    mnk: tuple[int, int, int], kernel_us: float, vendor_us: float, spread: float = 0.0, **fields: object
) -> Measurement:
    """Nine samples of our kernel and of torch.matmul; those of the latter vary by ``spread`` to either side."""
    swing = [vendor_us * (1 + spread * (i - 4) / 4) for i in range(9)]
    return measurement(mnk, [timing(KERNEL, [kernel_us] * 9, record="r"), timing("torch.matmul", swing)], **fields)


def section(document: report.Report, anchor: str) -> Section:
    """The section of a report with this anchor."""
    return next(part for part in document.sections if part.anchor == anchor)


def table(document: report.Report, anchor: str, start: str) -> Table:
    """The first table of a section whose caption starts so."""
    return next(candidate for candidate in section(document, anchor).tables if candidate.caption.startswith(start))


def rows(table: Table) -> dict[str, dict[str, str]]:
    """A table's cells, by the first cell of the row and the column's title."""
    return {row[0]: dict(zip(table.columns[1:], row[1:], strict=True)) for row in table.rows}


def embedded_data(page: str) -> Any:
    """The JSON data in a page, which its script draws."""
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert match
    return json.loads(match[1])
