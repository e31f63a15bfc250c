import dataclasses

import pytest
import torch

from nemotron_ultra.data.batch import TokenBatch


def test_from_documents():
    batch = TokenBatch.from_documents([[5, 6, 7], [8], [9, 10]])
    assert batch.tokens_T.tolist() == [5, 6, 7, 8, 9, 10]
    assert batch.labels_T.tolist() == [6, 7, 0, 0, 10, 0]
    assert batch.weight_T.tolist() == [1, 1, 0, 0, 1, 0]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 6] and batch.cu_seqlens.dtype == torch.int32
    assert (batch.num_tokens, batch.version_T, batch.stats) == (6, None, {})


def test_is_frozen():
    batch = TokenBatch.from_documents([[1, 2]])
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.stats = {}
