"""Suggests what a user may have meant by a field that a family does not have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches

from cudal2gen.kernel.fieldset import fieldset
from cudal2gen.kernel.record import Record
from cudal2gen.kernel.spelling import FAMILIES
from kernelproof.ground.chips import GPUS

# What Triton, CUTLASS, CuTe DSL and ThunderKittens call the things that fields hold, in small letters and without
# underscores. Several fields may be meant by a word; a family has one or two of them.
WORDS: Mapping[str, str] = {
    "bm": "blockm blocksizem tilem tilesizem ctam ctatilem threadblockm mtile",
    "bn": "blockn blocksizen tilen tilesizen ctan ctatilen threadblockn ntile",
    "bk": "blockk blocksizek tilek tilesizek ctak ctatilek threadblockk ktile",
    "k_chunks": "bk blockk blocksizek tilek tilesizek stages numstages",
    "stages": "numstages pipelinestages pipelinedepth numbuffers buffers",
    "mma_repeat": "numwarps warps warpsm warpsn warpsk warpm warpn threads numthreads blockdim atomlayout",
    "consumers": "numwarps warps warpsm warpsn threads numthreads blockdim warpgroups numconsumers",
    "atom_n": "mman instructionn instrn",
    "cluster": "clusterm clustern clustershape clustersize clusterdims numctas multicast",
    "pair": "ctagroup twocta twosm use2cta 2cta 2sm",
    "accumulators": "accstages accumulatorstages epilogueoverlap",
    "raster_group": "groupm groupn groupsizem groupsizen swizzle swizzlesize maxswizzle maxswizzlesize blockswizzle",
    "raster_axis": "raster rasterorder rasterization alongm alongn",
    "swizzle_stride": "groupm groupn groupsizem groupsizen blockswizzle",
    "raster": "persistent rasterorder rasterization",
    "split_k": "splits ksplits numsplits splitkslices slices kslices",
    "schedule": "kernelschedule warpspecialize warpspecialization warpspecialized",
    "scheduler": "tilescheduler persistent clc",
    "registers": "maxnreg numregs setmaxnreg numconsumerregisters",
    "min_blocks": "maxnreg occupancy minblockspersm ctaspersm blockspersm",
    "epilogue": "storemode tmastore epilogueschedule",
    "pdl": "launchpdl griddepcontrol programmaticdependentlaunch",
    "prefetch_b": "l2prefetch prefetchl2 prefetchweights weightprefetch",
    "swap_ab": "swap transpose transposed",
    "acc": "accdtype acctype accumulator accum accumulatortype",
    "ab": "dtype indtype inputdtype elementa elementb",
    "d": "outdtype outputdtype cdtype elementc elementd",
    "layout": "transa transb layouta layoutb",
    "fusion": "activation bias",
}


def unknown_field(family: type[Record], name: str, gpu: str) -> str:
    """An error message for ``name`` that suggests the field that other tools call so, a family of this GPU that has
    the field, the nearest field, or the field with this value."""
    own, word = family.line_fields(), name.lower()
    family_name = next(known for known, kind in FAMILIES.items() if kind is family)
    title = f"{name}: no field of {family_name}"
    if word in own:
        return f"{title}; did you mean {word}?"
    if meant := [field for field in same_meaning(word) if field in own]:
        return f"{title}; did you mean {' or '.join(f'{field} ({own[field].description})' for field in meant)}?"
    if having := [other for other, kind in FAMILIES.items() if word in kind.line_fields() and not kind.TEXTUAL]:
        served = [other for other in having if FAMILIES[other].serves(GPUS[gpu])]
        way = f": add --set family={served[0]}" if served else f"; none of them serves {gpu}"
        return f"{title}, but of {', '.join(served or having)}{way}"
    values = (f"{field}={word}" for field, values in fieldset(family).values.items() if word in values)
    if near := get_close_matches(word, own, n=2) or list(values):
        return f"{title}; did you mean {' or '.join(near)}?"
    return f"{title}, which has {', '.join(own)}"


def same_meaning(word: str) -> list[str]:
    """The fields of any family that hold what other tools call by this word."""
    plain = re.sub(r"[\s_.-]", "", word)
    return [field for field, words in WORDS.items() if plain in words.split()]
