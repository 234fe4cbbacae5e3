"""One rank: builds the data of a folder of texts and writes what it got as JSON. Run by test_data_ranks.py."""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from trainwright.core.errors import TrainwrightError
from trainwright.data.module import DataConfig, build_data, build_tokenizer
from trainwright.data.tokenizers.bytes import BytesConfig

out, texts, rank, world = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
dist.init_process_group(
    "gloo", init_method=f"file://{out}/rendezvous", rank=rank, world_size=world, timeout=timedelta(seconds=60)
)
config = DataConfig.model_validate(
    {"sources": [{"name": "text", "path": texts}], "cache_dir": str(out / "cache"), "validation_fraction": 0.2}
)
result: dict = {"error": None}
try:
    tokenizer = build_tokenizer(config, BytesConfig())
    data = build_data(config, tokenizer, seq_len=32, seed=3, rank=rank, world_size=world)
    with data.train_loader(4) as loader:
        rows = [loader.next_batch().tokens.tolist() for _ in range(5)]
        result |= {"rows": rows, "state": loader.state_dict(), "fingerprint": data.fingerprint}
    batches = list(data.validation_batches(batch_rows=2))
    result["validation"] = [b.tokens.tolist() for b in batches]
except TrainwrightError as error:
    result["error"] = f"{type(error).__name__}: {error}"
(out / f"rank{rank}.json").write_text(json.dumps(result))
dist.destroy_process_group()
