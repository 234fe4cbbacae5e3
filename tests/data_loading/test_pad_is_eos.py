"""Known fault: pad == eos, every EOS masked, so that the model never stops."""

import numpy as np

from trainwright.core.registry import build
from trainwright.data.dataset import ArrayDataset
from trainwright.data.loader import Loader
from trainwright.data.rows import RowStream


def test_a_real_eos_is_a_target_and_padding_is_not():
    eos = pad = 9
    docs = [[1, 2, 3, eos], [4, 5, eos]]
    stream = RowStream(ArrayDataset(docs), build("batcher", "padded"), 6, seed=0)
    loader = Loader({"docs": stream}, None, global_batch_rows=2, pad_id=pad, prefetch=0)
    batch = loader.next_batch()
    trained = batch.targets[batch.weights > 0].tolist()
    assert sorted(trained) == sorted(t for d in docs for t in d[1:])
    assert trained.count(eos) == 2
    padding = np.array([[6 - len(d) for d in docs]]).sum()
    assert int((batch.weights == 0).sum()) == padding + len(docs)
