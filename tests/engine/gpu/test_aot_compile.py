"""Every kernel compiles for A100, H200 and B200, fits the shared memory and keeps to the registers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.gpu.loop_loads import waited

pytest.importorskip("triton")

MATRIX_KERNELS = {
    "attention_kernel", "shrink_kernel", "expand_kernel", "fused_kernel", "skinny_kernel", "link_kernel",
    "product_kernel", "scaled_kernel", "by_head_kernel",
}  # fmt: skip
# Of fused steps: from Hopper on each starts while the one before it ends, and waits for its results.
OVERLAPPED = {"attention_kernel", "combine_kernel", "skinny_kernel", "link_kernel"}
OTHERS = {
    "combine_kernel",
    "rms_norm_kernel",
    "rotary_kernel",
    "gated_kernel",
    "activated_kernel",
    "round_rows_kernel",
    "clamped_kernel",
    "sample_kernel",
    "sum_choices_kernel",
    "rescale_kernel",
    "place_latent_kernel",
    "predict_kernel",
    "join_kernel",
    "correct_kernel",
    "lengthen_kernel",
    "sparse_gated_kernel",
}


@pytest.mark.proof
@pytest.mark.timeout(1860)
@pytest.mark.parametrize(("capability", "shared_kib"), [(80, 163), (90, 227), (100, 227)])
def test_every_kernel_compiles(capability: int, shared_kib: int, tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    root = Path(__file__).parents[3]
    environment["PYTHONPATH"] = str(root)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", Path(__file__).with_name("aot_compile.py"),
         str(capability)],
        capture_output=True, text=True, env=environment, cwd=root, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert {kernel["name"] for kernel in kernels} == MATRIX_KERNELS | OTHERS
    for kernel in kernels:
        assert kernel["stack"] == 0, f"spills registers: {kernel}"
        assert kernel["shared"] <= shared_kib * 1024, f"does not fit a processor: {kernel}"
        assert kernel["overlaps"] == (capability >= 90 and kernel["name"] in OVERLAPPED), kernel
        assert kernel["tensor_cores"] == (kernel["name"] in MATRIX_KERNELS), kernel


def test_a_load_that_its_own_turn_uses_is_found() -> None:
    """In the two forms of a loop: the second is that of a scale which is read a span ahead."""
    loop = """scf.for %i = %a to %b step %c iter_args(%scale = %first) {
      %next = tt.load %place : tensor<16x!tt.ptr<f16>>
      %wide = arith.extf USED : tensor<16xf16> to tensor<16xf32>
      scf.yield %next
    }"""
    assert waited(loop.replace("USED", "%next")) == ["%next"]
    assert waited(loop.replace("USED", "%scale")) == []


def _printed(tmp_path: Path, program: str, *arguments: str) -> list[dict[str, Any]]:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    root = Path(__file__).parents[3]
    environment["PYTHONPATH"] = str(root)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", Path(__file__).with_name(program), *arguments],
        capture_output=True, text=True, env=environment, cwd=root, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.proof
@pytest.mark.timeout(620)
def test_scales_are_read_a_span_before_they_are_used(tmp_path: Path) -> None:
    kernels = _printed(tmp_path, "loop_loads.py", "90")
    assert len(kernels) == 2, "few rows and many"
    for kernel in kernels:
        assert kernel == {"loops": 1, "loads": 1, "waited": []}


@pytest.mark.proof
@pytest.mark.timeout(620)
def test_attention_in_float32_keeps_to_the_registers(tmp_path: Path) -> None:
    kernels = _printed(tmp_path, "aot_compile.py", "90", "float32")
    assert {kernel["name"] for kernel in kernels} == {"attention_kernel", "combine_kernel"}
    for kernel in kernels:
        assert kernel["stack"] == 0, f"spills registers: {kernel}"
        assert kernel["shared"] <= 227 * 1024, f"does not fit a processor: {kernel}"
