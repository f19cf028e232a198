"""Prepares a user's measurements for sharing, and checks such files before they are accepted.

``anonymous`` removes folders, host names and user names from all texts. ``inspect`` finds faults in a file that
somebody else measured: damaged lines, impossible times, too few or repeated samples, copied measurements.
"""

from __future__ import annotations

import getpass
import math
import platform
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from cudal2gen import results
from cudal2gen.bench.protocols import MIN_ROUNDS
from cudal2gen.report.groups import Group, by_conditions
from cudal2gen.results import Environment, Measurement, Measurements
from kernelproof.ground.errors import SkippedLine

MIN_SAMPLES = 2 * MIN_ROUNDS  # least samples of each contender; `bench` takes two per round
# Fields that an environment must state. Without them no lower bound of times follows, and cards cannot be compared.
REQUIRED_FACTS = ("sms", "l2_bytes", "max_sm_mhz", "max_memory_mhz", "memory_bus_bits", "driver", "versions")

Row = TypeVar("Row", Environment, Measurement)

# The folders of an absolute path or of one that begins with ~, without the file's name.
_FOLDERS = re.compile(r"(?<![\w.])~?(?:/[\w.+@ -]+)+/(?=[\w.+-])")


def anonymous(measurements: Measurements) -> Measurements:
    """The same measurements and environments, without folders, host names and user names in their texts.

    The ids of environments are replaced by numbers, since an id is free text.
    """
    rows = measurements.measurements
    numbers = {name: f"card-{number}" for number, name in enumerate(dict.fromkeys(row.environment for row in rows), 1)}
    environments = {
        number: _anonymous_row(measurements.environments[name]).model_copy(update={"id": number})
        for name, number in numbers.items()
    }
    return Measurements(
        environments, [_anonymous_row(row).model_copy(update={"environment": numbers[row.environment]}) for row in rows]
    )


def _anonymous_row(row: Row) -> Row:
    """The row with this machine's names removed from all of its texts."""
    return type(row).model_validate(_without_names(row.model_dump()))


def _without_names(value: Any) -> Any:
    """A JSON value without the names of this machine and its user in any of its texts."""
    if isinstance(value, dict):
        return {key: _without_names(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_without_names(item) for item in value)
    if not isinstance(value, str):
        return value
    value = _FOLDERS.sub("", value)
    for name in _private_names():
        value = re.sub(rf"\b{re.escape(name)}\b", "(name)", value)
    return value


def _private_names() -> set[str]:
    """The names of this machine and its user that must not be published.

    Names of up to three letters are kept, because they may be ordinary words in any text.
    """
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = ""
    node = platform.node()
    return {name for name in (user, node, node.split(".")[0]) if len(name) > 3}


class Inspection(NamedTuple):
    """The measurements of a file, and its faults in one sentence each."""

    measurements: Measurements
    faults: list[str]

    @property
    def summary(self) -> str:
        """How many measurements the file has, of how many problems, on which cards."""
        rows = self.measurements.measurements
        cards = ", ".join(sorted({environment.name for environment in self.measurements.environments.values()}))
        problems = len({row.problem for row in rows})
        return f"{len(rows)} measurements of {problems} problems on {cards or 'no card'}"


def inspect(path: Path) -> Inspection:
    """Reads a file that somebody else measured, and lists its faults.

    Every line must be complete, every time possible on its card, and no measurement or series of samples may be a copy.
    """
    with warnings.catch_warnings(record=True) as skipped:
        warnings.simplefilter("always", SkippedLine)
        measurements = results.measurements(path)
    faults = [str(warning.message) for warning in skipped if issubclass(warning.category, SkippedLine)]
    for environment in measurements.environments.values():
        faults += _missing_facts(environment)
    with warnings.catch_warnings(action="ignore", category=SkippedLine):  # these lines are among the faults already
        faults += _wrong_models(path)
    for row in measurements.measurements:  # one at a time, since groups keep only the latest measurement of a problem
        for group in by_conditions(measurements._replace(measurements=[row])):
            faults += [doubt.words for doubt in group.doubts]
            faults += _fast_samples(group)
    faults += [fault for row in measurements.measurements for fault in _sample_faults(row)]
    faults += _copies(measurements)
    if not measurements.measurements:
        faults.append("no measurement is in it")
    return Inspection(measurements, faults)


def _missing_facts(environment: Environment) -> Iterator[str]:
    """The fault of an environment that lacks facts about its card."""
    missing = [name for name in REQUIRED_FACTS if not getattr(environment, name)]
    if missing:
        yield f"environment {environment.id}: {', '.join(missing)} not stated, so its times have no floor"


def _wrong_models(path: Path) -> Iterator[str]:
    """Faults of environments whose ``gpu`` is not the model that the card's name and number of SMs identify.

    An empty ``gpu`` makes no claim, so it is no fault.
    """
    for number, row in results.lines(path):
        if isinstance(row, Environment) and row.gpu not in ("", row.model):
            yield (
                f"{path}:{number}: gpu is {row.gpu}, but {row.name} with {row.sms} SMs is "
                f"{row.model or 'no model of the catalog'}: measure again with 'cudal2gen bench', or set gpu to "
                f'"{row.model}" if name and sms are the card\'s'
            )


def _fast_samples(group: Group) -> Iterator[str]:
    """Faults of timings with a sample below the lower bound of the time.

    If even the median is below it, ``Group.doubts`` reports the timing, and it is not repeated here.
    """
    for row in group.measurements:
        floor = group.floor_us(row)
        for timing in row.timings:
            if min(timing.samples_us) < floor <= timing.median_us:
                least = f"{min(timing.samples_us):g} us"
                yield f"{row.mnk}, {timing.contender}: a sample of {least} is below the card's floor of {floor:g} us"


def _sample_faults(row: Measurement) -> Iterator[str]:
    """Faults of one measurement: too few or constant samples, a wrong result, or a single contender."""
    for timing in row.timings:
        if len(timing.samples_us) < MIN_SAMPLES:
            yield f"{row.mnk}, {timing.contender}: {len(timing.samples_us)} samples; a measurement has {MIN_SAMPLES}"
        elif len(set(timing.samples_us)) == 1:
            yield f"{row.mnk}, {timing.contender}: all samples are {timing.samples_us[0]:g} us, which no clock reads"
        if not math.isfinite(timing.error):
            yield f"{row.mnk}, {timing.contender}: its result is wrong by {timing.error}"
    if len(row.timings) < 2:
        yield f"{row.mnk}: only one contender; measure it in turns with one of the vendor's at least"


def _copies(measurements: Measurements) -> Iterator[str]:
    """Faults of measurements, or samples of a contender, that appear more than once in the file."""
    texts = [row.model_dump_json() for row in measurements.measurements]
    rows = dict(zip(texts, measurements.measurements, strict=True))
    for text, count in Counter(texts).items():
        if count > 1:
            row = rows[text]
            yield f"{row.mnk}, {row.protocol}, L2 {row.l2}: the same measurement appears {count} times"
    owners: dict[tuple[float, ...], str] = {}
    for row in rows.values():
        for timing in row.timings:
            samples, owner = timing.samples_us, f"{row.mnk}, {row.protocol}, L2 {row.l2}, {timing.contender}"
            if len(set(samples)) > 1 and samples in owners:
                yield f"{owner}: sample for sample those of {owners[samples]}"
            owners.setdefault(samples, owner)
