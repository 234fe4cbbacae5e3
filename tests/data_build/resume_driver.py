"""Builds a corpus in processes that kill themselves with SIGKILL at one write after the other, until one gets through.

python resume_driver.py INPUT OUT LOG [WORKERS]
"""

import os
import signal
import sys
from pathlib import Path

from trainwright.data.build import operator_hashes, resume, stage
from trainwright.data.build.documents import Document
from trainwright.data.build.formats import Inputs
from trainwright.data.build.pipeline import run_pipeline
from trainwright.data.build.stage import DocumentStage
from trainwright.data.build.stages import make_stages
from trainwright.data.build.writers import Writer

SPEC = [
    {"unique_ids": {"on_duplicate": "rename"}},
    {"normalize_unicode": {"mojibake": False}},
    {"exact_dedup": {"keep": "longest"}},
    "scrub_personal",
    {"lengths": {"least": 60}},
    {"near_dedup": {"permutations": 32}},
    {"exact_dedup": {"keep": "first"}},
    {"repeated_lines": {"width": 4096}},
]


class Noted(DocumentStage):
    """Writes down each document that it sees, in whatever process."""

    name = "noted"

    def __init__(self, log):
        super().__init__()
        self.log = log

    def apply(self, document: Document) -> Document:
        if self.log:
            with open(self.log, "a") as file:
                file.write(document.id + "\n")
        return document


def build(source, out, log, workers=0, resume_it=True):
    # Chunks are cut in this process, so this reaches the workers too.
    stage.CHUNK_DOCUMENTS, resume.PART_CHUNKS = 16, 2
    stages = make_stages(SPEC)
    noted = Noted(log)
    stages.insert(5, noted)
    operator_hashes.NOT_SETTINGS.add("log")
    documents = Inputs([f"a={source}/a.jsonl", f"b={source}/b.jsonl"])
    return run_pipeline(stages, documents, Writer(out, shard_bytes=9_000), workers=workers, resume=resume_it)


def dying(at):
    """The ``at``-th write of this process is its last; odd ones before the file has its name, even ones after."""
    real, count = resume.write_whole, 0

    def write(path: Path, content):
        nonlocal count
        count += 1
        if count == at and at % 2:
            with path.with_name(f".{path.name}.partial").open("wb") as file:
                file.write(b"half of it")
            os.kill(os.getpid(), signal.SIGKILL)
        real(path, content)
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)

    resume.write_whole = write


def main():
    source, out, log = sys.argv[1:4]
    if len(sys.argv) > 4:
        build(source, out, log, int(sys.argv[4]))
        return
    for attempt in range(500):
        pid = os.fork()
        if pid == 0:
            dying(2 + attempt % 3)
            build(source, out, log)
            os._exit(0)
        if os.waitpid(pid, 0)[1] == 0:
            print(attempt)
            return


if __name__ == "__main__":
    main()
