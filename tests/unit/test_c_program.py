"""Programs in C, without Python in them: the header alone, and the example on the kernels' sources and the archive."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import c_api as c
import numpy as np
import pytest
from reference import Ffns, numbers

import colibri_cli
from colibri_cli import Experts, MoELayer, Router, _core

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "c" / "moe_layer.c"
KERNELS = ROOT / "src" / "colibri_cli" / "kernels"
INCLUDE = Path(colibri_cli.get_include())
ARCHIVE = INCLUDE.parent / "lib" / "libcolibri.a"
CC, CXX = shutil.which("cc"), shutil.which("c++")
STRICT = ("-Wall", "-Wextra", "-Werror", "-pedantic")
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g")
UNITS = (
    "api",
    "dispatch",
    "experts",
    "float_mode",
    "in_place",
    "isa",
    "isa_scalar",
    "lanes",
    "pack",
    "pairs",
    "pool",
    "projection",
    "route",
    "score",
)
WIDE = ("isa_amx", "isa_avx2", "isa_avx512", "isa_neon")
TOKENS = 64

pytestmark = pytest.mark.skipif(CC is None, reason="no C compiler")

INITIALIZERS = """
#include "colibri.h"
int main(void) {
  clb_shape shape = CLB_SHAPE_INIT;
  clb_arrays arrays = CLB_ARRAYS_INIT;
  clb_router router = CLB_ROUTER_INIT;
  return shape.struct_size != sizeof shape || arrays.struct_size != sizeof arrays ||
         router.struct_size != sizeof router || sizeof(clb_expert) != 256 || sizeof(clb_shape) != %d ||
         sizeof(clb_arrays) != %d || sizeof(clb_router) != %d;
}
"""


def compile_to(program, compiler, *arguments):
    subprocess.run([compiler, *arguments, "-o", program, "-lpthread", "-lm"], check=True)
    return program


def sanitizers_work(folder):
    source, program = folder / "empty.c", folder / "empty"
    source.write_text("int main(void) { return 0; }\n")
    for command in ([CC, *SANITIZE, source, "-o", program], [program]):
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            return False
    return True


@pytest.fixture(scope="module", params=["sanitized sources", "installed archive"])
def program(request, tmp_path_factory):
    """The example, strictly compiled."""
    folder = tmp_path_factory.mktemp("program")
    strict = ("-std=c11", *STRICT, EXAMPLE, f"-I{INCLUDE}")
    if request.param == "installed archive":
        if not ARCHIVE.exists():
            pytest.skip("no libcolibri.a: not an installed wheel, whose check asks for it")
        if _core.sanitized():
            pytest.skip("a sanitized archive wants its program linked likewise")
        return compile_to(folder / "moe_layer", CC, *strict, "-O2", ARCHIVE)
    flags = SANITIZE if sanitizers_work(folder) else ()
    if flags:
        (folder / "watched").touch()
    objects = []
    for name in (*UNITS, *WIDE):
        objects.append(folder / f"{name}.o")
        watched = () if name in WIDE else flags  # what `make debug` watches; here they would take half a minute
        command = [CC, "-O1", "-std=gnu11", "-ffp-contract=off", *watched, "-c", KERNELS / f"{name}.c"]
        subprocess.run([*command, "-o", objects[-1]], check=True)
    return compile_to(folder / "moe_layer", CC, *strict, "-O1", *flags, *objects)


def output_of(program, *arguments, **environment):
    done = subprocess.run(
        [program, *arguments], env=os.environ | environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def made_up(hidden):
    """The example's input."""
    state, values = 88172645463325252, []
    for _ in range(TOKENS * hidden):
        state ^= state << 13 & (1 << 64) - 1
        state ^= state >> 7
        state ^= state << 17 & (1 << 64) - 1
        values.append(((state >> 43) - (1 << 20)) / (1 << 20))
    return np.array(values, np.float32).reshape(TOKENS, hidden)


def checksum(y):
    value = 14695981039346656037
    for byte in y.tobytes():
        value = (value ^ byte) * 1099511628211 & (1 << 64) - 1
    return f"{value:016x}"


def constants():
    """The arrays in the example's source: gate_up, down, gate."""
    text = EXAMPLE.read_text()
    found = {}
    for name, shape in {"gate_up": (4, 6, 4), "down": (4, 4, 3), "gate": (4, 4)}.items():
        initializer = re.search(rf"static const float {name}(?:\[\w+(?: \* \w+)?\])+ = (\{{.*?\}});", text, re.DOTALL)[
            1
        ]
        values = re.findall(r"-?\d*\.?\d+", initializer.replace("f", ""))
        found[name] = np.array(values, np.float32).reshape(shape)
    return found


@pytest.mark.parametrize("language", [("c", "c99"), ("c", "c11"), ("c++", "c++11"), ("c++", "c++20")], ids="-".join)
def test_the_header_stands_alone(tmp_path, language):
    kind, standard = language
    compiler = CC if kind == "c" else CXX
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = tmp_path / "program"
    source.write_text(INITIALIZERS % tuple(len(bytes(s())) for s in (c.Shape, c.Arrays, c.Router)))
    program = compile_to(tmp_path / "out", compiler, "-x", kind, f"-std={standard}", *STRICT, f"-I{INCLUDE}", source)
    subprocess.run([program], check=True)


def test_the_program_in_the_documentation_compiles_and_runs(program, tmp_path):
    """Strictly, with what the example was linked to; on one expert, whose weights are zeros and bias is not."""
    page = (ROOT / "docs" / "c.md").read_text()
    source = tmp_path / "layer.c"
    source.write_text(re.search(r"^```c\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[1])
    objects = sorted(program.parent.glob("*.o")) or [ARCHIVE]
    flags = SANITIZE if (program.parent / "watched").exists() else ()
    layer = compile_to(tmp_path / "layer", CC, "-std=c11", *STRICT, *flags, f"-I{INCLUDE}", source, *objects)
    bias = np.array([2.5, 0, 0], np.float32)
    shape = c.Shape(hidden_size=3, intermediate_size=5)
    arrays = c.arrays_of(np.zeros((10, 3), np.float32), np.zeros((3, 5), np.float32), None, bias)
    c.packed(shape, arrays).tofile(tmp_path / "expert.bin")
    assert output_of(layer, tmp_path / "expert.bin", ASAN_OPTIONS="detect_leaks=0") == "y[0][0] = 2.5\n"
    (tmp_path / "expert.bin").write_bytes(bytes(64))
    done = subprocess.run([layer, tmp_path / "expert.bin"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "CLB_ERROR_FORMAT" in done.stderr


def test_the_core_exports_the_headers_functions_and_no_others():
    declared = set(re.findall(r"^CLB_API [^(]*?(clb_\w+)\(", (INCLUDE / "colibri.h").read_text(), re.MULTILINE))
    listing = subprocess.run(["nm", "-D", "--defined-only", _core.__file__], capture_output=True, text=True, check=True)
    exported = {line.split()[-1] for line in listing.stdout.splitlines()}
    if _core.sanitized():
        exported = {name for name in exported if name.startswith(("clb_", "PyInit"))}  # and the sanitizers' own
    assert len(declared) == 15
    assert exported == declared | {"PyInit__core"}


def test_constant_arrays_have_pythons_bits(program):
    arrays = constants()
    layer = MoELayer(Router.from_array(arrays["gate"]), Experts.from_arrays(arrays["gate_up"], arrays["down"]))
    expected = checksum(layer(made_up(4)))
    for isa in ("", "scalar"):
        output = output_of(program, COLIBRI_ISA=isa)
        assert output.startswith("64 tokens, top 2 of 4 experts, hidden size 4, ")
        assert output.endswith(f": {expected}\n")


def test_files_that_it_packs_run_with_the_same_bits(program, tmp_path):
    names = [tmp_path / f"{e}.bin" for e in range(4)]
    subprocess.run([program, "--pack", *names], cwd=tmp_path, check=True)
    assert output_of(program, tmp_path / "router.bin", *names) == output_of(program)
    arrays = constants()
    for e, name in enumerate(names):
        file = np.fromfile(name, np.uint8)
        assert c.expert_verify(c.address(file), file.nbytes) == c.OK
        shape, experts = c.opened([file])
        x, ids, weights = numbers(1, 3, 4), np.zeros((3, 1), np.int32), np.ones((3, 1), np.float32)
        expected = Experts.from_arrays(arrays["gate_up"][e : e + 1], arrays["down"][e : e + 1]).run(x, ids, weights)
        assert np.array_equal(c.run(shape, experts, x, ids, weights), expected)


@pytest.mark.parametrize("dtype", c.DTYPES)
def test_a_layers_packed_files_have_pythons_bits(program, tmp_path, dtype):
    ffns = Ffns.make(1, 6, 72, 56, activation="gelu", limit=2.0)
    gate = numbers(5, 6, 72)
    shape = c.Shape(hidden_size=72, intermediate_size=56, dtype=c.DTYPES[dtype], activation=3, limit=2.0)
    names = [tmp_path / f"expert_{e}.bin" for e in range(6)]
    for e, name in enumerate(names):
        arrays = c.arrays_of(ffns.up[e], ffns.down[e], ffns.up_bias[e], ffns.down_bias[e])
        c.packed(shape, arrays).tofile(name)
    gate.tofile(tmp_path / "router.bin")
    layer = MoELayer(Router.from_array(gate), Experts.from_arrays(**ffns.arrays(), dtype=dtype))
    expected = checksum(layer(made_up(72)))
    for isa in ("", "scalar"):
        assert output_of(program, tmp_path / "router.bin", *names, COLIBRI_ISA=isa).endswith(f": {expected}\n")
    cut = names[2].read_bytes()
    names[2].write_bytes(cut[:-1])
    done = subprocess.run([program, tmp_path / "router.bin", *names], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{names[2]}: CLB_ERROR_FORMAT" in done.stderr


def test_the_ctypes_example_has_pythons_bits(tmp_path):
    example = ROOT / "examples" / "ctypes_caller.py"
    assert output_of(sys.executable, example, tmp_path).endswith(": the same bits as colibri_cli.Experts\n")
    assert len(list(tmp_path.iterdir())) == 4
