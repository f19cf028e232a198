"""Proves which CUDA texts from elsewhere are refused, how they become records, and how they are compiled."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from pydantic import create_model

from cudal2gen import places, validator
from cudal2gen.generation import catalog, compiler
from cudal2gen.generation.renderer import render
from cudal2gen.kernel import FAMILIES, IllegalRecord, Record, device_text, host_code, parse, revise
from kernelproof.ground.errors import WrongInput
from kernelproof.ground.sandbox import Sandbox
from tests.cudal2gen import device_texts
from tests.cudal2gen.device_texts import LAUNCH, PROBLEM, gemm
from tests.cudal2gen.test_kernel import written_forms


@pytest.fixture(autouse=True)
def _own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's folder, and a catalog without records."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("CUDAL2GEN_CATALOG", str(tmp_path / "catalog" / "kernels.jsonl"))
    catalog.save([], tmp_path / "catalog" / "kernels.jsonl")


# By text: a part of the reason for which it is refused.
REFUSED = {
    '#include "/etc/passwd"': "include",
    "#include </etc/passwd>": "include",
    '#include "../../canary"': "include",
    "#include <cute/../../canary>": "include",
    "#define FILE <cuda_fp16.h>\n#include FILE": "include",
    '/* */ #include "canary"': "include",
    '/*\n*/#include "canary"': "include",
    '#inclu\\\nde "canary"': "include",
    '#inclu\\ \nde "canary"': "include",
    '%:include "canary"': "digraphs",
    '??=include "canary"': "digraphs",
    '#import "canary"': "only the directives",
    '#include_next "canary"': "only the directives",
    '#embed "canary"': "only the directives",
    '#define CUDA_STD_HEADER(name) "canary"\n#include <cute/config.hpp>': "includes come before",
    "#undef CUDA_STD_HEADER\n#include <cute/config.hpp>": "includes come before",
    "#line 1": "only the directives",
    '#pragma GCC dependency "/etc/passwd"': "only the pragmas",
    '_Pragma("GCC poison float")': "_Pragma",
    '#if __has_include("/etc/passwd")\n#endif': "__has_include",
    "#if _CCCL_HAS_INCLUDE(</etc/passwd>)\n#endif": "__has_include",
    "#define PASTE(a, b) a##b": "## joins",
    "const char* where = __FILE__;": "file and time",
    "const char* day = __DATE__;": "file and time",
    'const char* raw = R"(text)";': "raw strings",
    "'\n#if 0": "does not end",
    '/* open\n#include "canary"': "does not end",
    "int many = 1'000;": "does not end",
    "int many = 1'000'000;": "digit separators",
    'asm(".incbin \\"/etc/passwd\\"");': "assembly that includes",
    "int zero\0;": "is not allowed",
    'import "canary";': "modules",
    '__device__ void f() { printf("%d", 1); }': "runtime",
    'extern "C" int system(const char*);': "system is a function of the host",
    "int at_start() { return 1; }": "a function of the host",
    "struct Host { Host() {} };\nstatic Host host;": "a function of the host",
    "struct Host { Host() : a{1} {} int a; };": "a function of the host",
    "namespace a {\ntemplate <class T> T twice(T x) { return 2 * x; }\n}": "a function of the host",
    "int foreign(int);": "a declaration of the host",
    "static int at_start = foreign(3);": "a declaration of the host",
    'constexpr int f(int x) { asm("nop"); return x; }': "asm in a function of the host",
    "#define BODY { }\nstruct Host { Host() BODY };": "a declaration of the host",
    "x" * 5000: "longer than",
}


@pytest.mark.parametrize("attack", REFUSED)
@pytest.mark.parametrize("place", ["first", "last"])
def test_what_reaches_beyond_the_text_is_refused(attack: str, place: str) -> None:
    text = f"{attack}\n{gemm()}" if place == "first" else f"{gemm()}\n{attack}\n"
    assert REFUSED[attack] in "; ".join(device_text.refusals(device_text.normal(text)))


@pytest.mark.parametrize("text", ["/*" + "\n" * 100_000 + "*/", "/*\n" * 40_000, " " * 120_000 + "x"])
def test_a_text_is_looked_at_in_one_pass(text: str) -> None:
    start = time.process_time()
    device_text.refusals(text)
    device_text.normal(text)
    assert time.process_time() - start < 3


@pytest.mark.slow
def test_proper_texts_are_not_refused() -> None:
    """These are texts of the catalog's kernels, and texts whose comments and strings look like attacks."""
    assert device_text.refusals(gemm()) == []
    words = """// #include "canary", it's 1'000
/* #import, " */
#pragma unroll 4
#include <mma.h>
"""
    assert device_text.refusals(f"{words}{gemm()}#define QUOTE '\"'\n") == []
    device = """#define INLINE __device__ __forceinline__
enum class Kind : int { first = 1, last };
template <int N, class T = float> struct __align__(16) Pair {
  using Type = T;
  __device__ Pair() : a{T(1)}, b(N) {}
  Pair(Pair const&) = default;
  INLINE T sum() const noexcept { return a + b; }
  T a{}, b = T(2);
 private:
  static constexpr int kSize = int(sizeof(T)) * N;
};
constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int kRows = ceil_div(7, 2), kTable[] = {1, 2, (3)};
static_assert(kRows == 4);
__device__ int table[4] = {1, 2, 3, 4};
extern __shared__ __align__(1024) unsigned char smem[];
template <class T> INLINE T twice(T x) {
  auto f = [](T y) { return y + y; };
  return f(x);
}
"""
    assert device_text.refusals(f"{gemm()}{device}") == []
    for record in {
        record.family: record for record in catalog.load(places.shipped("configs") / "kernels.jsonl")
    }.values():
        assert device_text.refusals(device_text.normal(render(record))) == []


def test_a_record_is_read_back_and_renders_its_text() -> None:
    record = device_texts.record(gemm())
    assert parse(catalog.dump(record)) == record
    assert render(record).endswith(f"#define gemm {record.name}\n\n{gemm()}")
    assert f"//   entry={record.name}\n" in render(record)


@pytest.mark.parametrize("change", [{"bm": 32}, {"block": 64}, {"text": "0" * 32}, {"bk": 32}, {"padding": "none"}])
def test_text_and_launch_change_together_only(change: dict[str, object]) -> None:
    with pytest.raises(IllegalRecord, match="changed after it was sealed"):
        revise(device_texts.record(gemm()), **change)


@pytest.mark.parametrize("change", [{"layout": "nn"}, {"acc": "f16"}, {"ab": "bf16"}, {"gpu": "h200"}])
def test_a_text_serves_its_own_operation(change: dict[str, str]) -> None:
    with pytest.raises(IllegalRecord, match="the text is not for"):
        revise(device_texts.record(gemm()), **change)
    assert revise(device_texts.record(gemm()), m=1000, n=7, k=8).name == device_texts.record(gemm()).name


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ({"call": "grid raster=plain"}, "must begin with one of tiles, cluster, tma"),
        ({"call": "tiles raster=zsplit"}, "raster zsplit needs options swizzle_stride"),
        ({"call": "tiles raster=plain threads=64"}, "threads: the record has fields for these"),
        ({"call": "tiles"}, "raster: field required"),
        ({"call": "cluster reduce=none steps=4", "padding": "none"}, "has neither clusters nor TMA"),
        ({"options": "raster_group=8"}, "the convention tiles has swizzle_stride=NUMBER"),
        ({"padding": "none", "bm": 48}, "does not divide m=64"),
        ({"dynamic_smem": 200000}, "bytes of shared memory exceed"),
        ({"baked": 32}, "is compiled in, the problem has k=64"),
        ({"entry": "Gemm"}, "should match pattern"),
        ({"split_k": 8}, "exceeds the 4 k-steps"),
    ],
)
def test_a_launch_that_cannot_be_is_refused(launch: dict[str, object], message: str) -> None:
    with pytest.raises(IllegalRecord, match=message):
        device_texts.record(gemm(), **launch)


def test_a_text_that_is_absent_or_changed_says_so() -> None:
    record = device_texts.record(gemm())
    (path,) = (places.user_data() / "sources").iterdir()
    path.write_text(gemm().replace("16", "17"))
    with pytest.raises(WrongInput, match="the file was changed"):
        render(record)
    path.unlink()
    with pytest.raises(WrongInput, match=f"no text {path.name} in .*; copy it"):
        render(record)


def test_a_stored_text_is_looked_at_again() -> None:
    text = f'#include "/etc/passwd"\n{gemm()}'
    with pytest.raises(WrongInput, match="include"):
        render(device_texts.record(text))


def test_the_catalog_takes_the_text_along(tmp_path: Path) -> None:
    record = device_texts.record(gemm())
    catalog.put(record)
    shutil.rmtree(places.user_data())
    (path,) = (tmp_path / "catalog" / "sources").iterdir()
    assert (path.name, path.read_text()) == (f"{device_text.digest(gemm())}.cu", gemm())
    assert catalog.find(PROBLEM).record == record
    served = catalog.find(PROBLEM.revised(m=1000, n=40, k=72)).record
    assert (served.name, served.mnk) == (record.name, "1000_40_72")


def test_a_text_is_built_and_judged_like_any_other() -> None:
    record = device_texts.record(gemm())
    (artifact,) = compiler.build([record])
    verdict = validator.emulated.validate(record, artifact, compiler.launcher())
    assert verdict.passed, verdict.findings
    assert verdict.counters["mma_per_k_tile"] == 2


def test_a_later_field_is_silent_while_it_is_neutral(monkeypatch: pytest.MonkeyPatch) -> None:
    record = device_texts.record(gemm())
    later = create_model("Later", __base__=type(record), colour=(str | None, None))
    monkeypatch.setitem(FAMILIES, record.family, later)
    neutral = parse(catalog.dump(record))
    assert written_forms(neutral) == written_forms(record)
    assert all(
        new != old for new, old in zip(written_forms(revise(neutral, colour="red")), written_forms(record), strict=True)
    )


@pytest.mark.slow
def test_macros_of_a_text_reach_no_other_kernel(tmp_path: Path) -> None:
    """Each text is compiled alone, whichever kernels are built with it."""
    macros = "#define float double\n#define __float2half_rn __double2half\n"
    poison = device_texts.record(gemm(("constexpr int kTile", f"{macros}constexpr int kTile")))
    records: list[Record] = [poison, device_texts.record(gemm())]
    together = compiler.attempt(records, build_dir=tmp_path / "both", jobs=1)
    alone = compiler.attempt(records[1:], build_dir=tmp_path / "one", jobs=1)
    assert isinstance(together[1], compiler.Artifact)
    assert isinstance(alone[0], compiler.Artifact)
    assert together[1].cubin.read_bytes() == alone[0].cubin.read_bytes()


# Texts that take a compiler more time or memory than it is allowed.
BOMBS = {
    "macros": "#define A0 x x x x x x x x x x\n"
    + "".join(f"#define A{i} {' '.join([f'A{i - 1}'] * 10)}\n" for i in range(1, 10))
    + "__device__ int bomb() { return A9; }\n",
    "templates": """template <int n, int m> struct G {
  using L = typename G<n - 1, 2 * m>::L;
  using R = typename G<n - 1, 2 * m + 1>::L;
};
template <int m> struct G<0, m> { using L = int; };
__device__ G<30, 1>::L bomb;
""",
    "constants": """constexpr long f(long n) {
  long s = 0;
  for (long i = 0; i < n; ++i)
    for (long j = 0; j < n; ++j) s += i ^ j;
  return s;
}
__device__ long bomb = f(1l << 40);
""",
}


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_compiler_ends_within_its_limits(bomb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "TEXT_BOX", Sandbox(cpu_s=3, gib=4, file_mib=32))
    (outcome,) = compiler.attempt([device_texts.record(gemm() + BOMBS[bomb])], build_dir=tmp_path, jobs=1)
    assert isinstance(outcome, compiler.BuildError)
    assert len(str(outcome)) < 2000


def test_long_messages_of_a_compiler_are_cut(tmp_path: Path) -> None:
    """The text has names of types that double in length at each step."""
    names = "".join(f"using T{i} = P<T{i - 1}, T{i - 1}>;\n" for i in range(1, 20))
    text = f"template <class A, class B> struct P {{}};\nusing T0 = P<int, int>;\n{names}T19 x = 1;\n{gemm()}"
    (outcome,) = compiler.attempt([device_texts.record(text)], build_dir=tmp_path, jobs=1)
    assert isinstance(outcome, compiler.BuildError)
    assert len(str(outcome)) < 4000
    assert sum(path.stat().st_size for path in (tmp_path / "failed").iterdir()) < compiler.TEXT_BOX.output_bytes


@pytest.mark.slow
def test_only_the_kernel_that_is_launched_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host code that the parser misses is not compiled, and an entry with another name is a readable error."""
    monkeypatch.setattr(host_code, "findings", lambda _: ())
    canary = tmp_path / "canary"
    host = f"""extern "C" int system(const char*);
struct Host {{ Host() {{ system("touch {canary}"); }} }};
static Host host;
int main() {{ return system("touch {canary}"); }}
"""
    records = [device_texts.record(host + gemm()), device_texts.record(gemm(("gemm(", "other(")))]
    outcomes = compiler.attempt(records, build_dir=tmp_path / "build", jobs=1)
    assert isinstance(outcomes[0], compiler.Artifact), outcomes[0]
    assert "touch" not in outcomes[0].ptx.read_text()
    assert not canary.exists()
    assert isinstance(outcomes[1], compiler.BuildError)
    assert LAUNCH["entry"] == "gemm"
