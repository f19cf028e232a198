"""Checks untrusted CUDA text: brings it to a normal form, names it by its digest, and refuses unsafe constructs.

A record may name a text, which is then compiled like a kernel rendered from a template. Compiling does not run the
text, but the preprocessor reads files, and a text can make the compiler use much time and memory. So a text may include
only headers of CUDA, CUTLASS and the C++ library, it may use few directives, and it may not spell names in ways that
the rules here cannot see. Time and memory are limited where the compiler runs.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

from cudal2gen import places
from cudal2gen.kernel import host_code
from kernelproof.ground.errors import WrongInput, brief

MAX_CHARACTERS, LONGEST_LINE = 1 << 17, 4000  # most characters of a text, and of a line
DIGEST = r"^[0-9a-f]{32}$"  # the form of a digest
# What a text may use: directives of the preprocessor, and pragmas.
DIRECTIVES = ("define", "undef", "if", "ifdef", "ifndef", "elif", "else", "endif", "include", "pragma")
PRAGMAS = ("unroll", "nounroll", "once", "nv_diag_suppress", "nv_diag_default")
_HEADERS = (
    r"cu(?:da_(?:fp16|bf16|fp8|fp6|fp4|runtime|pipeline|pipeline_primitives|awbarrier|awbarrier_primitives)|da)\.h",
    r"mma\.h", r"cooperative_groups(?:/[\w/]+)?\.h", r"(?:cuda|cute|cutlass)/[\w/]+(?:\.hpp|\.h)?",
    r"c(?:stdint|stddef|float|math|limits)|array|type_traits|utility|tuple|limits|algorithm|initializer_list",
    r"std(?:int|def)\.h|cooperative_groups\.h",
)  # fmt: skip
_INCLUDE = re.compile(rf"<(?:{'|'.join(_HEADERS)})>")
# A comment, a string or a character, or else a quote without a partner. One expression matches them all, so that a
# quote inside a comment does not begin a string, and "//" inside a string does not begin a comment.
_TOKEN = re.compile(r"//[^\n]*|/\*.*?(?:\*/|\Z)|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])+'|[\"']", re.S)
_SPLICE = re.compile(r"\\[ \t]*\n")
_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(\w*)[ \t]*(.*)$", re.M)
_CONSTRUCTS = {  # pattern -> what it finds, and what to write instead
    r"\b_Pragma\b": "_Pragma: write #pragma",
    # Macros of headers, such as _CCCL_HAS_INCLUDE, pass their argument to __has_include, so these names are refused.
    r"\b\w*(?i:has_(?:include|embed))\w*\b": "__has_include: CUDA's headers always exist",
    r"\b__(?:FILE|BASE_FILE|FILE_NAME|DATE|TIME|TIMESTAMP|INCLUDE_LEVEL)__\b": "macros of file and time",
    r"##": "## joins tokens: spell names out",
    r"%:|\?\?[=/'()!<>-]|<%|%>|<:|:>": "digraphs and trigraphs: write # [ ] { }",
    r"\b(?:u8|u|U|L)?R\"": "raw strings",
    r"\d'": "digit separators",
    r"^[ \t]*(?:export\s+)?(?:import|module)\b": "modules of C++",
    r"\b(?:co_await|co_yield)\b": "coroutines",
    r"\bextern\s+__device__|\b(?:printf|malloc|free|assert|__trap|vprintf)\s*\(": "calls of the device's runtime",
}  # fmt: skip


def normal(text: str) -> str:
    """The text as it is stored and rendered: lines end with a line feed and without blanks, empty lines do not
    repeat."""
    text = re.sub(r"\r\n?", "\n", text.removeprefix("\ufeff"))
    text = "\n".join(line.rstrip(" \t") for line in text.rstrip().split("\n")) + "\n"
    return re.sub(r"\n{3,}", "\n\n", text).lstrip("\n")


def digest(text: str) -> str:
    """The name of a text in normal form."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]


def load(name: str) -> str:
    """Reads the text with this digest from the folders of texts.

    Raises WrongInput if the text is absent, has another digest, or contains refused constructs.
    """
    for folder in places.sources():
        path = folder / f"{name}.cu"
        if path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            if digest(text) != name:
                raise WrongInput(f"{path}: the file was changed, its digest is {digest(text)}; restore it")
            if faults := refusals(text):
                raise WrongInput(f"{path}: {faults[0]}")
            return text
    folders = ", ".join(map(str, places.sources()))
    raise WrongInput(f"no text {name}.cu in {folders}; copy it from where the record was made")


def refusals(text: str) -> list[str]:
    """The first eight forbidden constructs in a text, each as one line with its line number; empty if it has none."""
    return list(_refusals(text))[:8]


def _refusals(text: str) -> Iterator[str]:
    """Yields every forbidden construct in a text, in the form that ``refusals`` returns."""
    if len(text) > MAX_CHARACTERS or max(map(len, text.split("\n"))) > LONGEST_LINE:
        yield f"longer than {MAX_CHARACTERS} characters, or than {LONGEST_LINE} in a line"
        return
    if control := next((char for char in text if not char.isprintable() and char not in "\n\t"), None):
        yield f"line {_line(text, text.index(control))}: the character {control!a} is not allowed"
        return
    joined = _SPLICE.sub("", text)
    bare, unclosed = _bare(joined)
    if unclosed is not None:
        yield f"line {_line(joined, unclosed)}: a comment, string or character that does not end"
        return
    defined = False  # a macro of the text could change which files a header includes
    for match in _DIRECTIVE.finditer(bare):
        defined |= match[1] in ("define", "undef")
        fault = _fault(match[1], match[2].strip())
        if defined and match[1] == "include":
            fault = fault or "includes come before the first define or undef"
        if fault:
            yield f"line {_line(bare, match.start())}: #{brief(match[1] + ' ' + match[2].strip())}: {fault}"
    for pattern, name in _CONSTRUCTS.items():
        if construct := re.search(pattern, bare, re.M):
            yield f"line {_line(bare, construct.start())}: {name} (not allowed)"
    for place, fault in host_code.findings(bare):
        yield f"line {_line(bare, place)}: {fault} (not allowed: only device code is taken)"
    if re.search(r"\.(?:incbin|include)\b", joined):
        yield "assembly that includes files"


def _bare(text: str) -> tuple[str, int | None]:
    """The text with blanks in place of comments and of the content of strings, so that all positions stay the same.

    Also returns the position of the first comment, string or character that does not end, or None.
    """
    unclosed: list[int] = []

    def blank(match: re.Match[str]) -> str:
        token = match[0]
        if token in ('"', "'") or (token.startswith("/*") and (len(token) < 4 or not token.endswith("*/"))):
            unclosed.append(match.start())
            return token
        inner = re.sub(r"[^\n]", " ", token[1:-1])
        return f"{token[0]}{inner}{token[-1]}" if token[0] in "\"'" else re.sub(r"[^\n]", " ", token)

    bare = _TOKEN.sub(blank, text)
    return bare, unclosed[0] if unclosed else None


def _fault(directive: str, text: str) -> str:
    """Why a directive is refused; empty if it is allowed."""
    if directive == "":
        return "" if not text else "no directive"
    if directive not in DIRECTIVES:
        return f"only the directives {', '.join(DIRECTIVES)} are allowed"
    if directive == "include" and not _INCLUDE.fullmatch(text):
        return "only headers of CUDA, CuTe, CUTLASS and C++'s types may be included, by <...>"
    if directive == "pragma" and re.split(r"\W", text)[0] not in PRAGMAS:
        return f"only the pragmas {', '.join(PRAGMAS)} are allowed"
    return ""


def _line(text: str, place: int) -> int:
    """The number, from 1, of the line in which a position lies."""
    return text.count("\n", 0, place) + 1
