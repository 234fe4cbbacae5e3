import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))  # for documents.py
torch.set_num_threads(1)
