"""What a gradient buffer keeps of MTP: the thresholds and the stored rows of the reference experiment."""

import json

import pytest

from nemotron_ultra.precision.accumulation import accumulation_rows


@pytest.fixture(scope="module")
def rows():
    return {(row["gradients"], row["buffer"], row["n"]): row for row in accumulation_rows()}


def test_a_row_for_every_power_of_two(rows):
    assert sorted({n for _, _, n in rows}) == [2**i for i in range(11)] and len(rows) == 44


def test_fp32_keeps_everything(rows):
    for (_, buffer, _), row in rows.items():
        if buffer == "fp32":
            assert row["mtp_error"] < 1e-3 and abs(row["kept"] - 1) < 1e-3


@pytest.mark.parametrize("seed", [4, 0])
def test_bf16_loses_more_with_every_doubling(rows, seed):
    found = (
        rows
        if seed == 4
        else {("coherent", r["buffer"], r["n"]): r for r in accumulation_rows(seed=seed)[:22]}
    )
    bf16 = {n: row for (kind, buffer, n), row in found.items() if (kind, buffer) == ("coherent", "bf16")}
    assert all(bf16[n]["kept"] > 0.98 for n in (1, 2, 4, 8))
    assert bf16[64]["kept"] < 0.8 and bf16[64]["noop"] > 0.5
    assert bf16[256]["kept"] < 0.5 and bf16[512]["kept"] < 0.15 and bf16[512]["total_error"] > 0.25


@pytest.mark.parametrize("kind", ["coherent", "noisy"])
def test_rows_are_those_of_the_stored_experiment(golden, rows, kind):
    for stored in json.loads((golden / "nvfp4" / "bf16_accum.json").read_text())[kind]:
        row, bf16 = rows[kind, "bf16", stored["n"]], stored["bf16"]
        assert row["kept"] == pytest.approx(bf16["mtp_kept"], abs=1e-3)
        assert row["noop"] == pytest.approx(bf16["mtp_noop_adds"], abs=1e-3)
        assert row["mtp_error"] == pytest.approx(bf16["mtp_rel_err"], rel=1e-2)
        assert row["total_error"] == pytest.approx(bf16["total_rel_err"], rel=1e-2)


def test_fewer_micro_batches_and_another_scale():
    rows = accumulation_rows(micro_batches=20, mtp_scale=0.5, elements=64)
    assert {row["n"] for row in rows} == {1, 2, 4, 8, 16}
    assert all(row["kept"] == pytest.approx(1, abs=0.02) for row in rows)
