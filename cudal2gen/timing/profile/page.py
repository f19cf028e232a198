"""The page of a profile: one self-contained HTML file."""

from __future__ import annotations

from cudal2gen import places
from cudal2gen.timing.profile.figures import Profile
from cudal2gen.timing.profile.picture import LEFT, picture
from cudal2gen.timing.profile.sections import by_size, place, sections
from kernelproof.ground import pages

LISTING = "listing"


def html(profile: Profile) -> str:
    """The picture of the main loop, the sections, and the listing with bars."""
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
        places.shipped("templates"),
        "profile/page.html.j2",
        styles=("profile/style.css",),
        script="profile/script.js",
        title=f"cudal2gen: profile of {profile.title}",
        profile=profile,
        sections=[section for section in sections(profile) if section.anchor != LISTING],
        picture=image,
        rows=rows,
        data=pages.embedded(data),
    )
