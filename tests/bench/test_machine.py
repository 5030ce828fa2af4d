"""A machine's ceilings are the best rates of its kernels."""

import pytest
import torch

from kvprobe.bench import machine as machine_module
from kvprobe.bench.machine import Machine, measure_machine
from kvprobe.bench.roofline import Ceilings
from support.clocks import Ticking


def test_a_machine_is_the_best_of_its_kernels():
    first = Machine({"sum": 10.0, "dot": 30.0}, {"gemm": 50.0})
    second = Machine({"sum": 20.0, "dot": 15.0}, {"gemm": 40.0, "other": 60.0})
    best = first.best_of(second)
    assert best == Machine({"sum": 20.0, "dot": 30.0}, {"gemm": 50.0, "other": 60.0})
    assert best.ceilings == Ceilings(bandwidth=30.0, matrix_rate=60.0)
    assert best.record()["ridge_point"] == 2.0


def test_rates_are_work_over_the_least_time():
    # every run takes 2 s, and what comes after `seconds` of them is not waited for
    machine = measure_machine(
        torch.float32, buffer_bytes=2**20, gemm_widths=(32,), seconds=0, clock=Ticking(*[2.0] * 1000)
    )
    assert set(machine.reads.values()) == {2**19}
    assert set(machine.products.values()) == {32**3}
    assert {"torch sum", "torch dot", "torch matrix-vector"} < machine.reads.keys()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_has_the_rate_of_float32_where_its_own_is_lower(dtype, monkeypatch):
    made, now = machine_module._multipliers, 0.0

    def taking(run, seconds):
        def timed():
            nonlocal now
            run()
            now += seconds

        return timed

    def slow_in_the_dtype(*given):
        return {name: taking(run, 1 if "float32" in name else 4) for name, run in made(*given).items()}

    # those that read, which are not what is looked at, take no time but the smallest
    def clock():
        nonlocal now
        now += 2**-20
        return now

    monkeypatch.setattr(machine_module, "_multipliers", slow_in_the_dtype)
    machine = measure_machine(dtype, buffer_bytes=2**20, gemm_widths=(32,), seconds=0, clock=clock)
    assert machine.products["torch matmul"] == pytest.approx(2 * 32**3 / 4, rel=1e-5)
    assert machine.products["through float32"] == pytest.approx(2 * 32**3, rel=1e-5)
    assert machine.ceilings.matrix_rate == pytest.approx(2 * 32**3, rel=1e-5)
    ways = made(dtype, torch.device("cpu"), 32)
    torch.testing.assert_close(ways["through float32"](), ways["torch matmul"]())


def test_slow_products_are_not_made_larger(monkeypatch):
    seen = []

    def ways(dtype, device, width):
        return {"one": lambda: seen.append(width)}

    monkeypatch.setattr(machine_module, "_multipliers", ways)
    measure_machine(torch.float32, buffer_bytes=2**20, gemm_widths=(32, 128), seconds=0.1, clock=Ticking(*[5.0] * 1000))
    assert set(seen) == {32}
