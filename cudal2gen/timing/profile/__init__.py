"""Profiles records: the machine code of the built kernel, its launch, and advice about the record's fields.

``of_record`` makes one and ``brief`` sums it up in three lines. ``kernelproof.profile`` prints and compares profiles.
"""

from cudal2gen.timing.profile.records import brief as brief
from cudal2gen.timing.profile.records import of_record as of_record
