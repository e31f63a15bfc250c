"""Packs through parquet to loss and gradients: those of the documents alone (golden i_packed)."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nemotron_ultra import load_model
from nemotron_ultra.data.pack_stream import token_batch
from nemotron_ultra.data.packs import PackFiles, PackWriter
from nemotron_ultra.objectives.next_token import NextToken


def trained(folder: Path, batch, dtype):
    model = load_model(folder, dtype=dtype)
    objective = NextToken(mtp_loss_scale=0.0, balance_coefficient=0.0, mtp_depths=0)
    output = model(batch.tokens_T, batch.cu_seqlens, mtp_depths=0)
    loss, metrics = objective(output, batch, objective.count(batch))
    loss.backward()
    return float(metrics["loss"]), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_a_pack_of_the_golden_documents_trains_as_they_do(golden, tmp_path, dtype):
    folder = golden / "model" / "i_packed"
    if not folder.is_dir():
        pytest.skip("no case i_packed in this set")
    case = load_file(folder / "golden.safetensors")
    ids = case["packed.input_ids"][0].numpy().astype(np.int32)
    bounds = case["packed.cu_seqlens"].tolist()
    with PackWriter(tmp_path / "train-00000.parquet") as writer:
        writer.add([(ids[a:b], np.ones(b - a, np.uint8)) for a, b in pairwise(bounds)])
    batch = token_batch([PackFiles(tmp_path)[0]])
    assert batch.cu_seqlens.tolist() == bounds
    loss, found = trained(folder, batch, dtype)
    assert loss == pytest.approx(float(case["packed.loss"]), abs=1e-6)
    expected = {k.removeprefix("packed.grad."): v for k, v in case.items() if k.startswith("packed.grad.")}
    assert expected
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name].to(gradient), gradient, rtol=0, atol=1e-5, msg=name)
