import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # optimizer_zoo, also in spawned processes
