"""Several runs of the solver benchmark share its measurements: who takes which, parts of results, one file from them.

Runs that get the same folder (`--share`) each take the next measurement that no other has taken, so all end at about
the same time however many there are. Each writes what it measured to a file of its own after every measurement;
`--merge` puts such files together, in the order in which one run would have measured.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Record = dict[str, Any]
FORMAT = "qsync-bench-solvers-part/1"
_OWN = ("--cores", "--share", "--output")
"""Options with a value that differ from run to run."""


def place(job: Record) -> tuple[str, ...]:
    """What tells a section's jobs apart: the problem and what is run on it."""
    return (job["title"], *(run["label"] for run in job.get("runs", ())))


class Share:
    """Measurements taken by any of several runs, as empty files in a folder."""

    def __init__(self, folder: Path) -> None:
        """Make the folder if it is not there yet."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def take(self, section: str, job: Record) -> bool:
        """True for the first run that asks for this measurement, False for all others."""
        name = hashlib.sha256(json.dumps([section, *place(job)]).encode()).hexdigest()
        try:
            (self._folder / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def write_part(path: Path, section: str, environment: Record, records: Iterable[Record]) -> None:
    """Write one run's measurements of a section beside those of other sections in the same file."""
    known = json.loads(path.read_text())["sections"] if path.exists() else {}
    found = {"environment": environment, "records": list(records)}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"format": FORMAT, "sections": {**known, section: found}}))
    temporary.replace(path)


def _plain(command: list[str]) -> list[str]:
    """A command without what only tells runs apart: cores, shared folder, output."""
    kept, skip = [], False
    for word in command:
        if not skip and word not in _OWN:
            kept.append(word)
        skip = word in _OWN
    return kept


def joined(paths: Iterable[Path], section: str, jobs: Iterable[Record]) -> tuple[Record | None, list[str]]:
    """One section of several parts, and what none of them has measured.

    Args:
        paths: Files of parts.
        section: Its name.
        jobs: All measurements of the section, in order.

    Returns:
        The section with its records in the order of ``jobs``, None if no part has any; titles of missing ones.

    Raises:
        SystemExit: A file is no part, or parts are of different revisions, machines or versions.
    """
    found: dict[tuple[str, ...], Record] = {}
    environments = []
    for path in paths:
        part = json.loads(path.read_text())
        if part.get("format") != FORMAT:
            raise SystemExit(f"--merge: {path} has format {part.get('format')!r}; only {FORMAT!r} can be merged")
        own = part["sections"].get(section, {"records": []})
        if own["records"]:
            environments.append(own["environment"])
            found.update({place(record["job"]): record for record in own["records"]})
    if not environments:
        return None, []
    for key in ("revision", "cpu", "cores", "python", "versions"):
        values = {json.dumps(environment[key]) for environment in environments}
        if len(values) > 1:
            raise SystemExit(f"--merge: parts of section {section!r} differ in {key}: {', '.join(sorted(values))}")
    expected = list(jobs)
    missing = [" ".join(place(job)) for job in expected if place(job) not in found]
    records = [found[place(job)] for job in expected if place(job) in found]
    first = min(environments, key=lambda environment: environment["date"])
    together = {
        **first,
        "command": _plain(first["command"]),
        "cores_used": sum(environment["cores_used"] for environment in environments),
        "runs": len(environments),
        "load_before": max(environment["load_before"] for environment in environments),
        "seconds": max(environment["seconds"] for environment in environments),
    }
    return {"environment": together, "records": records}, missing
