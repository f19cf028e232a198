"""Writes the page of a profile: one self-contained HTML file."""

from __future__ import annotations

from pathlib import Path

from kernelproof.ground import pages
from kernelproof.profile.figures import Profile
from kernelproof.profile.picture import LEFT, picture
from kernelproof.profile.sections import LISTING_COLUMNS, by_size, loop_words, place, sections

FOLDER = Path(__file__).with_name("page")
LISTING = "listing"  # the anchor of the section that the page shows as a table with bars instead


def html(profile: Profile) -> str:
    """The page: the sections, the main loop as a picture, and the listing with a bar of stalls for each instruction."""
    most = max((sum(line.stalls.values()) for line in profile.lines), default=0.0) or 1.0
    rows = [
        {
            "sass": f"{line.address:04x} {line.sass}",
            "pipe": line.pipe,
            "stalls": [(name, cycles, 100 * cycles / most) for name, cycles in line.stalls.items() if cycles],
            "cycles": sum(line.stalls.values()),
            "words": ", ".join(f"{name} {cycles:.1f}" for name, cycles in by_size(line.stalls) if cycles),
            "place": place(line),
        }
        for line in profile.lines
    ]
    image = picture(profile)
    start = min((issue.cycle for issue in profile.issues), default=0.0)
    data = {
        "left": LEFT,
        "scale": image.scale,
        "issues": [[issue.warp, issue.line, round(issue.cycle - start, 1)] for issue in profile.issues],
    }
    return pages.html(
        FOLDER,
        "page.html.j2",
        styles=("style.css",),
        script="script.js",
        title=f"Profile of {profile.title}",
        profile=profile,
        sections=[section for section in sections(profile) if section.anchor != LISTING],
        picture=image if profile.issues else None,
        loop_words=loop_words(profile.loop),
        columns=LISTING_COLUMNS,
        rows=rows,
        data=pages.embedded(data),
    )
