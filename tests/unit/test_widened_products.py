"""Products on processors without instructions for bfloat16: in one order, the same everywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import llvmlite.binding
import numpy as np
import pytest
import torch
from torch import nn

from workers import kernel_vectors, tile_products
from workers.exact_linear import ExactLinear

pytestmark = pytest.mark.usefixtures("one_thread")

AVX2 = ("sse2", "sse4.2", "popcnt", "cmov", "cx8", "avx", "avx2", "fma", "bmi", "bmi2", "f16c")
PROCESSORS = {
    "haswell": AVX2,
    "skylake-avx512": (*AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
}
FILES = [
    Path(__file__),
    *(Path(__file__).parent / f"test_{name}.py" for name in ("tile_products", "tile_attention")),
    Path(__file__).parent / "test_decoder_layers.py",
]


@pytest.mark.slow
@pytest.mark.parametrize("processor", PROCESSORS)
def test_kernels_hold_on_other_processors(processor: str) -> None:
    """All that is here, and what holds of kernels on any machine, in code for another one."""
    features = PROCESSORS[processor]
    host = llvmlite.binding.get_host_cpu_features()
    missing = [name for name in features if not host.get(name)]
    if missing:
        pytest.skip(f"this machine can't run it: no {', '.join(missing)}")
    environment = os.environ | {
        "NUMBA_CPU_NAME": processor,
        "NUMBA_CPU_FEATURES": ",".join(f"+{name}" for name in features),
        "PYTEST_ADDOPTS": "",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-k", "not other_processors"]
    done = subprocess.run(
        [*command, *map(str, FILES)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert "skipped" in done.stdout, "what compares with the library has no meaning there"
    assert "products are in one order" not in done.stdout, "it is skipped only where it can't be"


def summed_in_order(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return x W^T + b; the products themselves are exact in fp32."""
    wide, columns = x.float().numpy(), weight.float().numpy()
    total = np.zeros((len(wide), len(columns)), np.float32)
    for k in range(wide.shape[1]):
        total += wide[:, k, None] * columns[None, :, k]
    return torch.from_numpy(total + bias.float().numpy()).bfloat16()


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 10, 11, 16, 29, 100, 333])
@pytest.mark.parametrize("shape", [(960, 576), (96, 192), (33, 31), (1, 1), (4130, 100), (7, 1536)])
def test_a_row_is_the_sum_of_its_products_in_their_order(shape: tuple[int, int], rows: int) -> None:
    if not tile_products.widens():
        pytest.skip("products are in one order of the library's here")
    torch.manual_seed(rows)
    linear = nn.Linear(shape[1], shape[0]).bfloat16()
    with torch.inference_mode():
        x = torch.randn(rows, shape[1]).bfloat16()
        found = ExactLinear(linear)(x)
        expected = summed_in_order(x, linear.weight, linear.bias)
    assert torch.equal(found.view(torch.uint16), expected.view(torch.uint16))


def test_no_processor_is_without_products_of_its_kind() -> None:
    """Were they refused by a fault of ours, nothing else would show it but the clock."""
    host = llvmlite.binding.get_host_cpu_features()
    if not host.get("fma"):
        pytest.skip("no fused multiply-adds here")
    assert tile_products.is_available() or not kernel_vectors.WIDENS


def test_a_result_that_is_no_normal_number_is_zero() -> None:
    """As where the processor itself rounds to bfloat16; in whole vectors and in what is left."""
    if not tile_products.widens():
        pytest.skip("products are in one order of the library's here")
    linear = nn.Linear(1, 69, bias=False).bfloat16()
    sizes = torch.tensor([-26, -27, -40])[torch.arange(69) % 3]
    signs = 1 - 2 * (torch.arange(69) % 2)
    with torch.inference_mode():
        linear.weight[:, 0] = signs * 2.0**sizes
        found = ExactLinear(linear)(torch.tensor([[2.0**-100]]).bfloat16())[0]
    expected = torch.where(sizes == -26, 2.0**-126, 0.0).copysign(signs).bfloat16()
    assert torch.equal(found.view(torch.uint16), expected.view(torch.uint16))
