"""Speed and memory of Trainwright beside other trainers: same model shape, tokens, batch, dtype and threads.

    python benchmarks/peers.py                       # all cases; writes benchmarks/results/peers.md
    python benchmarks/peers.py --quick --json FILE   # within five minutes; writes FILE only

Each contestant lives in a process of its own, all of them at once, and only one works at a time: the parent lets them
run a few steps each in turns, so that whatever else slows the machine slows all alike. A ratio is the median over the
turns of the quotient within one turn. Contestants:

    trainwright  the real Trainer, from a recipe, with its defaults (metrics.jsonl, monitors, clipping)
    hf_trainer   transformers.Trainer over LlamaForCausalLM
    hf_loop      a plain loop over LlamaForCausalLM with the loss that the model computes itself
    litgpt       litgpt's GPT and chunked loss under Lightning Fabric, as its pretraining script has them (if installed)

Measures: tokens/s from the end of one step to the end of a later one, so all that a trainer does between steps
counts; peak resident memory of the whole process (VmHWM), and what of it lies above the imports; seconds from the
start of the process, imports included, to the end of the first step, on prepared data; model FLOPs utilisation =
exact model FLOPs (causal attention as a triangle) over the best float32 matrix product of 512 to 2048 measured
between the turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

RESULTS = Path(__file__).parent / "results" / "peers.md"
SEQ_LEN = 256


@dataclass(frozen=True)
class Case:
    """What all contestants train on."""

    vocab: int
    size: str  # name of the decoder's size
    shape: dict[str, int]  # dim, n_layers, n_heads, n_kv_heads, head_dim, ffn_dim
    rows: int  # rows of SEQ_LEN tokens a step
    data: str  # folder with rows.npy, text/ and tokenizer/
    lr: float = 1e-3
    tied: bool = True

    @property
    def tokens(self) -> int:
        return self.rows * SEQ_LEN

    @property
    def body_params(self) -> int:
        s = self.shape
        attention = s["dim"] * s["head_dim"] * 2 * (s["n_heads"] + s["n_kv_heads"])
        return s["n_layers"] * (attention + 3 * s["dim"] * s["ffn_dim"])

    @property
    def params(self) -> int:
        norms = (2 * self.shape["n_layers"] + 1) * self.shape["dim"]
        return self.body_params + norms + self.vocab * self.shape["dim"] * (1 if self.tied else 2)

    @property
    def flops_per_token(self) -> float:
        """Forward and backward matrix products; the head counts, the look-up does not, attention as a triangle."""
        s = self.shape
        attention = s["n_layers"] * 2 * s["n_heads"] * s["head_dim"] * (SEQ_LEN + 1) / 2
        return 6.0 * (self.body_params + self.vocab * s["dim"] + attention)


# -- in a contestant's process -------------------------------------------------------------------------------------


def peak_memory() -> int:
    """Bytes. VmHWM belongs to this program alone; ru_maxrss may stem from the parent that forked it."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Stop(Exception):
    """The parent has seen enough."""


class Gate:
    """Where a contestant waits for its turn. :meth:`step_done` is called at the end of every step."""

    def __init__(self, started: float, out: IO[str]):
        self.started, self.out = started, out
        self.imported = 0
        self.left = 1  # the first step runs without being asked
        self.losses: list[float] = []
        self.since = 0.0
        self.extra: dict[str, Any] = {}

    def imports_done(self) -> None:
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        self.imported = peak_memory()

    def say(self, **message: Any) -> None:
        print(json.dumps(message), file=self.out, flush=True)

    def step_done(self, loss: float | None = None) -> None:
        if loss is not None:
            self.losses.append(loss)
        self.left -= 1
        if self.left:
            return
        now = time.perf_counter()
        if self.since:
            self.say(seconds=now - self.since)
        else:
            self.say(first_step=time.time() - self.started)
        command = sys.stdin.readline().split()
        if not command or command[0] == "stop":
            self.say(peak=peak_memory(), imported=self.imported, losses=self.losses, **self.extra)
            raise Stop
        self.left = int(command[1])
        self.since = time.perf_counter()


def llama(case: Case) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    s = case.shape
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=case.vocab,
            hidden_size=s["dim"],
            intermediate_size=s["ffn_dim"],
            num_hidden_layers=s["n_layers"],
            num_attention_heads=s["n_heads"],
            num_key_value_heads=s["n_kv_heads"],
            head_dim=s["head_dim"],
            max_position_embeddings=SEQ_LEN,
            rms_norm_eps=1e-5,
            tie_word_embeddings=case.tied,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def rows_of(case: Case) -> Any:
    """int64 ``[rows, SEQ_LEN + 1]``."""
    import numpy as np
    import torch

    return torch.from_numpy(np.load(Path(case.data) / "rows.npy").astype("int64"))


def run_hf_trainer(case: Case, gate: Gate) -> None:
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    gate.imports_done()
    rows = rows_of(case)[:, :SEQ_LEN]

    class Turns(TrainerCallback):
        stopped = False

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            gate.step_done()

    class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return len(rows)

        def __getitem__(self, i: int) -> dict[str, Any]:
            return {"input_ids": rows[i], "labels": rows[i]}

    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            model=llama(case),
            args=TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=case.rows,
                max_steps=100_000,
                learning_rate=case.lr,
                weight_decay=0.1,
                adam_beta2=0.95,
                max_grad_norm=1.0,
                lr_scheduler_type="constant",
                logging_steps=10,
                save_strategy="no",
                report_to="none",
                use_cpu=True,
                dataloader_pin_memory=False,
                disable_tqdm=True,
            ),
            train_dataset=Rows(),
            callbacks=[Turns()],
        ).train()


def run_hf_loop(case: Case, gate: Gate) -> None:
    import torch
    import transformers  # noqa: F401 - its import is part of the time to the first step

    model = llama(case)
    gate.imports_done()
    rows = rows_of(case)[:, :SEQ_LEN]
    optimizer = torch.optim.AdamW(model.parameters(), lr=case.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    model.train()
    while True:
        for start in range(0, len(rows) - case.rows + 1, case.rows):
            batch = rows[start : start + case.rows]
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            gate.step_done(loss.item())


def run_litgpt(case: Case, gate: Gate) -> None:
    import lightning
    import torch
    from litgpt import GPT, Config
    from litgpt.utils import chunked_cross_entropy

    gate.imports_done()
    s = case.shape
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision="32-true")
    torch.manual_seed(0)
    with fabric.init_module(empty_init=False):
        model = GPT(
            Config(
                block_size=SEQ_LEN,
                n_layer=s["n_layers"],
                n_embd=s["dim"],
                n_head=s["n_heads"],
                n_query_groups=s["n_kv_heads"],
                head_size=s["head_dim"],
                intermediate_size=s["ffn_dim"],
                vocab_size=case.vocab,
                padded_vocab_size=case.vocab,
                norm_class_name="RMSNorm",
                mlp_class_name="LLaMAMLP",
                rotary_percentage=1.0,
                parallel_residual=False,
                bias=False,
            )
        )
    if case.tied:
        model.transformer.wte.weight = model.lm_head.weight
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(
        torch.optim.AdamW(model.parameters(), lr=case.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    )
    rows = rows_of(case)
    while True:
        for start in range(0, len(rows) - case.rows + 1, case.rows):
            batch = rows[start : start + case.rows]
            logits = model(batch[:, :SEQ_LEN].contiguous())
            loss = chunked_cross_entropy(logits, batch[:, 1:].contiguous())
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            gate.step_done(loss.item())


def recipe(case: Case, folder: str) -> dict[str, Any]:
    data = Path(case.data)
    return {
        "run": {"name": "peers", "dir": folder, "overwrite": True, "device": "cpu"},
        "model": {"name": "decoder", "family": "llama", "tie_embeddings": case.tied, **case.shape},
        "tokenizer": {"name": "hf", "path": str(data / "tokenizer")},
        "data": {
            "sources": [{"name": "text", "path": str(data / "text")}],
            "cache_dir": str(data / "cache"),
            "validation_fraction": 0.1,
        },
        "optimizer": {"name": "adamw", "lr": case.lr, "weight_decay": 0.1},
        "schedule": {"name": "constant", "warmup": 0},
        "clip": {"name": "global_norm"},
        "precision": {"name": "fp32"},
        "evaluate": {"tokens": SEQ_LEN},
        "train": {"steps": 100_000, "seq_len": SEQ_LEN, "global_batch_tokens": case.tokens},
        "log": {"loggers": [], "progress": "none", "report": False},
    }


def run_trainwright(case: Case, gate: Gate) -> None:
    from trainwright import RunConfig, Trainer

    gate.imports_done()
    outside: list[float] = []

    def on_step(row: dict[str, Any]) -> None:
        step = case.tokens / row["tokens_per_s"]
        outside.append(1 - (row["time_forward_backward"] + row["time_optimizer"]) / step)
        gate.extra["outside"] = statistics.median(outside)
        gate.step_done(row["loss"])

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(RunConfig.load(recipe(case, folder)))
        gate.extra["flops_per_token"] = trainer.flops_per_token
        gate.extra["params"] = sum(p.numel() for p in trainer.parallel.model.parameters())
        trainer.fit(on_step=on_step)


CONTESTANTS: dict[str, Callable[[Case, Gate], None]] = {
    "trainwright": run_trainwright,
    "hf_trainer": run_hf_trainer,
    "hf_loop": run_hf_loop,
    "litgpt": run_litgpt,
}


def contestant(name: str, case: Case, started: float) -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not reach the parent's ears
    with contextlib.suppress(Stop):
        CONTESTANTS[name](case, Gate(started, out))


# -- in the parent -------------------------------------------------------------------------------------------------


class Contestant:
    """A process that runs steps when told to."""

    def __init__(self, name: str, case: Case, threads: int):
        self.name = name
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by kill()
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, __file__, "--contestant", name, "--case", json.dumps(asdict(case))]
        self.process = subprocess.Popen(
            [*command, "--started", repr(time.time())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=env,
        )
        self.first_step: float = self._hear()["first_step"]

    def _hear(self) -> dict[str, Any]:
        line = self.process.stdout.readline() if self.process.stdout else ""
        if not line:
            self.process.wait()
            self.log.seek(0)
            raise SystemExit(f"{self.name} died:\n{self.log.read()[-4000:]}")
        return dict(json.loads(line))

    def _tell(self, command: str) -> None:
        if self.process.stdin is not None:
            self.process.stdin.write(command + "\n")
            self.process.stdin.flush()

    def run(self, steps: int) -> float:
        """Seconds that ``steps`` steps took."""
        self._tell(f"run {steps}")
        return float(self._hear()["seconds"])

    def stop(self) -> dict[str, Any]:
        self._tell("stop")
        end = self._hear()
        self.process.wait(timeout=60)
        return end

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.log.close()


def shape_of(size: str) -> dict[str, int]:
    """Dimensions of the decoder's named size."""
    from trainwright.models.architecture import SIZES

    names = ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim")
    return {name: getattr(SIZES[size], name) for name in names}


def matmul_peak(threads: int) -> float:
    """FLOP/s of the best float32 product of square matrices of 512, 1024 and 2048."""
    import torch

    torch.set_num_threads(threads)
    best = 0.0
    for n in (512, 1024, 2048):
        a, b, c = torch.randn(n, n), torch.randn(n, n), torch.empty(n, n)
        for _ in range(4):
            start = time.perf_counter()
            torch.mm(a, b, out=c)
            best = max(best, 2 * n**3 / (time.perf_counter() - start))
    return best


def prepare_data(folder: Path, vocab: int, rows: int) -> None:
    """The same tokens as an array of rows, and as text with a tokenizer that gives these very ids."""
    import numpy as np
    from transformers import PreTrainedTokenizerFast

    from tokenizers import Tokenizer, models, pre_tokenizers

    rng = np.random.default_rng(0)
    rank = rng.permutation(vocab - 1) + 1  # id 0 is the end of a document
    ids = rank[np.minimum(rng.zipf(1.2, size=rows * (SEQ_LEN + 1)) - 1, vocab - 2)].astype(np.int32)
    np.save(folder / "rows.npy", ids.reshape(rows, SEQ_LEN + 1))
    (folder / "text").mkdir()
    for i, part in enumerate(np.array_split(ids, 20)):  # twenty documents: one or two to a row
        (folder / "text" / f"{i:02d}.txt").write_text(" ".join(f"w{t}" for t in part))
    words = {"<eos>": 0, **{f"w{i}": i for i in range(1, vocab)}}
    backend = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>", unk_token="<eos>"
    ).save_pretrained(folder / "tokenizer")


def measure(case: Case, names: list[str], threads: int, steps: int, turns: int, deadline: float) -> dict[str, Any]:
    """Let ``names`` take turns at ``case``; stops early, after two turns, when ``deadline`` has passed."""
    field: list[Contestant] = []
    try:
        for name in names:
            field.append(Contestant(name, case, threads))
            field[-1].run(1)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        peak = 0.0
        for turn in range(turns):
            peak = max(peak, matmul_peak(threads))
            for one in field if turn % 2 == 0 else reversed(field):
                seconds[one.name].append(one.run(steps) / steps)
            if turn >= 1 and time.monotonic() > deadline:
                break
        peak = max(peak, matmul_peak(threads))
        ends = {one.name: one.stop() for one in field}
    finally:
        for one in field:
            one.kill()
    flops = ends["trainwright"]["flops_per_token"]
    if ends["trainwright"]["params"] != case.params or not math.isclose(flops, case.flops_per_token, rel_tol=0.01):
        raise SystemExit(
            f"the models differ: {ends['trainwright']['params']} parameters and {flops:.4g} FLOPs a token, "
            f"expected {case.params} and {case.flops_per_token:.4g}"
        )
    learnt = {name: end["losses"][-1] for name, end in ends.items() if end["losses"]}
    if max(learnt.values()) - min(learnt.values()) > 0.5:  # nats, after equally many steps at one learning rate
        raise SystemExit(f"the contestants do not learn alike, so their speeds do not compare: {learnt}")
    return {
        one.name: {
            "tokens_per_s": case.tokens / statistics.median(seconds[one.name]),
            "seconds_per_step": seconds[one.name],
            "peak_memory": ends[one.name]["peak"],
            "peak_above_imports": ends[one.name]["peak"] - ends[one.name]["imported"],
            "first_step_s": one.first_step,
            "mfu": flops * case.tokens / statistics.median(seconds[one.name]) / peak,
            "outside": ends[one.name].get("outside"),
            "peak_gflops": peak / 1e9,
        }
        for one in field
    }


def compare(case: Case, figures: dict[str, Any]) -> list[dict[str, Any]]:
    """One entry of the JSON file for each peer. Ratios are ours over theirs."""
    ours = figures["trainwright"]
    out = []
    for peer, theirs in figures.items():
        if peer == "trainwright":
            continue
        per_turn = [b / a for a, b in zip(ours["seconds_per_step"], theirs["seconds_per_step"], strict=True)]
        out.append(
            {
                "vocab": case.vocab,
                "params": case.params,
                "size": case.size,
                "peer": peer,
                "tokens_per_s_ratio": statistics.median(per_turn),
                "tokens_per_s_ratio_range": [min(per_turn), max(per_turn)],
                "peak_memory_ratio": ours["peak_memory"] / theirs["peak_memory"],
                "peak_above_imports_ratio": ours["peak_above_imports"] / theirs["peak_above_imports"],
                "first_step_s_ratio": ours["first_step_s"] / theirs["first_step_s"],
                "ours": {k: v for k, v in ours.items() if k != "seconds_per_step"},
                "theirs": {k: v for k, v in theirs.items() if k not in ("seconds_per_step", "outside")},
            }
        )
    return out


def machine(threads: int) -> str:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        cpu = next((x.split(":")[1].strip() for x in info.read_text().splitlines() if x.startswith("model name")), cpu)
    versions = []
    for package in ("torch", "transformers", "accelerate", "litgpt"):
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return f"{cpu}, {threads} threads, Python {platform.python_version()}, {', '.join(versions)}"


def report(cases: list[dict[str, Any]], threads: int, tokens: int) -> str:
    lines = [
        "# Speed and memory beside other trainers",
        "",
        f"Written by `benchmarks/peers.py`. {machine(threads)}. float32, no compile, {tokens} tokens a step in rows of "
        f"{SEQ_LEN}, tied head, AdamW with gradient clipping.",
        "",
        "Ratios are Trainwright over the peer: tokens/s above 1, memory and time below 1 are in Trainwright's favour. "
        "How each figure is measured stands at the head of the script.",
        "",
        "| vocab | parameters | peer | tokens/s ratio (range) | peak memory ratio | above imports | "
        "first step ratio | MFU ours / peer |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for c in cases:
        low, high = c["tokens_per_s_ratio_range"]
        lines.append(
            f"| {c['vocab']} | {c['params'] / 1e6:.1f}M ({c['size']}) | {c['peer']} "
            f"| **{c['tokens_per_s_ratio']:.2f}** "
            f"({low:.2f}-{high:.2f}) | **{c['peak_memory_ratio']:.2f}** | {c['peak_above_imports_ratio']:.2f} | "
            f"{c['first_step_s_ratio']:.2f} | {c['ours']['mfu']:.0%} / {c['theirs']['mfu']:.0%} |"
        )
    lines += [
        "",
        "| vocab | size | trainer | tokens/s | peak memory MB | above imports MB | first step s | matmul peak GFLOP/s "
        "| step time outside forward, backward, optimizer |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    seen = set()
    for c in cases:
        for name, f in (("trainwright", c["ours"]), (c["peer"], c["theirs"])):
            if (c["vocab"], c["size"], name) in seen:
                continue
            seen.add((c["vocab"], c["size"], name))
            outside = "" if f.get("outside") is None else f"{f['outside']:.1%}"
            lines.append(
                f"| {c['vocab']} | {c['size']} | {name} | {f['tokens_per_s']:.0f} | {f['peak_memory'] / 1e6:.0f} | "
                f"{f['peak_above_imports'] / 1e6:.0f} | {f['first_step_s']:.1f} | {f['peak_gflops']:.0f} | {outside} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer turns, without litgpt; within five minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures as JSON")
    parser.add_argument("--peers", default="", help="comma-separated; default: all that are installed")
    parser.add_argument("--vocabs", default="32000,4096")
    parser.add_argument("--sizes", default="2m,10m")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contestant:
        contestant(args.contestant, Case(**json.loads(args.case)), args.started)
        return

    peers = [x for x in args.peers.split(",") if x] or ["hf_trainer", "hf_loop", *([] if args.quick else ["litgpt"])]
    unknown = [x for x in peers if x not in CONTESTANTS or x == "trainwright"]
    if unknown:
        parser.error(f"no such peer: {', '.join(unknown)}; there are {', '.join(list(CONTESTANTS)[1:])}")
    if "litgpt" in peers and not (find_spec("litgpt") and find_spec("lightning")):
        print("litgpt is not installed; it is left out", file=sys.stderr)
        peers.remove("litgpt")
    rows, steps, turns, budget = (8, 2, 4, 260.0) if args.quick else (8, 4, 9, math.inf)
    began = time.monotonic()
    plan = [(int(v), s) for s in args.sizes.split(",") for v in args.vocabs.split(",")]
    results: list[dict[str, Any]] = []
    longest = 0.0
    with tempfile.TemporaryDirectory() as root:
        for i, (vocab, size) in enumerate(plan):
            folder = Path(root) / str(vocab)
            fresh = not folder.exists()
            if fresh:
                folder.mkdir()
                prepare_data(folder, vocab, rows=256)
            case = Case(vocab, size, shape_of(size), rows, str(folder))
            case_began = time.monotonic()
            if fresh:  # tokenizes the text, so that all contestants start from prepared data
                Contestant("trainwright", case, args.threads).stop()
            left = budget - (time.monotonic() - began)
            if longest > left:
                print(f"no time left for {len(plan) - i} of {len(plan)} cases; they are left out", file=sys.stderr)
                break
            deadline = time.monotonic() + left / (len(plan) - i)
            figures = measure(case, ["trainwright", *peers], args.threads, steps, turns, deadline)
            longest = max(longest, time.monotonic() - case_began)
            found = compare(case, figures)
            results += found
            for c in found:
                print(
                    f"vocab {vocab} {size} vs {c['peer']}: tokens/s {c['tokens_per_s_ratio']:.2f}x, "
                    f"peak memory {c['peak_memory_ratio']:.2f}x, MFU {c['ours']['mfu']:.0%}",
                    flush=True,
                )
    if args.json:
        args.json.write_text(json.dumps({"cases": results, "machine": machine(args.threads)}, indent=1) + "\n")
    if not args.quick:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(report(results, args.threads, rows * SEQ_LEN))
        print(f"wrote {RESULTS}")


if __name__ == "__main__":
    main()
