"""The commands: argument handling and printing. What they do lives in train, config, models and core."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from trainwright.cli import data_quality_app  # noqa: F401 - its commands enter data_app
from trainwright.cli.data_app import data_app
from trainwright.cli.delta_app import delta_app
from trainwright.cli.plan_app import plan_app

app = typer.Typer(
    name="trainwright",
    help="Train language models with the published methods, one recipe line each.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Show, check and describe recipes.", no_args_is_help=True)
app.add_typer(config_app, name="config")
claims_app = typer.Typer(help="Published claims, held against small experiments.", no_args_is_help=True)
app.add_typer(claims_app, name="claims")
app.add_typer(data_app, name="data")
app.add_typer(plan_app, name="plan")
app.add_typer(delta_app, name="delta")
tokenizer_app = typer.Typer(help="Train, study and compare tokenizers.", no_args_is_help=True)
app.add_typer(tokenizer_app, name="tokenizer")

# typer writes brackets and dots around the metavar of a list.
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides, e.g. optimizer.lr=1e-3.")]
RecipeAndOverrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE] [KEY=VALUE", help="A YAML file (none: the quickstart), then overrides like optimizer.lr=1e-3."
    ),
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, e.g. runs/quickstart.")]
Checkpoint = Annotated[str, typer.Option(help="latest, best, a step, or a checkpoint's folder.")]
Live = Annotated[
    bool, typer.Option("--live", help="The weights as trained, where the run averages them for evaluation.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback(invoke_without_command=True)
def _main(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from trainwright import __version__

        print(f"trainwright {__version__}")
        raise typer.Exit


def split_arguments(arguments: list[str] | None) -> tuple[Path | None, list[str]]:
    """``[RECIPE] [KEY=VALUE]...`` -> recipe and overrides. Raises ConfigError for anything else."""
    from trainwright.core.errors import ConfigError

    arguments = list(arguments or [])
    recipe = None
    if arguments and ("=" not in arguments[0] or Path(arguments[0]).is_file()):
        recipe = Path(arguments.pop(0))
    for text in arguments:
        if "=" not in text:
            hint = (
                "only the first argument can be a recipe"
                if text.endswith((".yaml", ".yml"))
                else "e.g. optimizer.lr=1e-3"
            )
            raise ConfigError(f"override {text!r} should look like key=value; {hint}")
    return recipe, arguments


@app.command()
def train(
    arguments: RecipeAndOverrides = None,
    nproc: Annotated[
        str,
        typer.Option(
            metavar="N|MIN:MAX",
            help="Processes on this machine, usually one a GPU; MIN:MAX starts MAX, goes on with fewer if one fails.",
        ),
    ] = "1",
    restarts: Annotated[int, typer.Option(min=0, help="Failures after which all start again by themselves.")] = 0,
    nnodes: Annotated[
        str, typer.Option(metavar="N|MIN:MAX", help="Machines; MIN:MAX goes on with fewer, and lets others join.")
    ] = "1",
    rdzv: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where the machines meet: one of them, the same on all.")
    ] = None,
    rdzv_id: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the job, the same on all machines; default: SLURM's job id."),
    ] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Go on with this run where it stopped.")] = None,
) -> None:
    """Train a model by a recipe; without one, the quickstart."""
    from trainwright.cli import train as command

    recipe, overrides = split_arguments(arguments)
    processes = command.Processes.parse(nproc, nnodes, rdzv, rdzv_id, restarts)
    raise typer.Exit(command.run(recipe, overrides, processes, resume))


@app.command()
def compare(
    arguments: RecipeAndOverrides = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=A,B,...", help="Values to compare; several --vary make all combinations."),
    ] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME:KEY=VALUE,...", help="A further arm, with several settings at once."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each arm.")] = 3,
    budget: Annotated[
        str | None,
        typer.Option(help="tokens=2M, seconds=60 or flops=1e13 for each training; default: the recipe's length."),
    ] = None,
    tune: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=GRID", help="Tune each arm alike: log:1e-4:1e-1:7, lin:LOW:HIGH:N or [A,B]."),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(metavar="NAME", help="The arm to hold against; default: the first.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder to write; default: runs/compare/...")] = None,
    trials: Annotated[Path | None, typer.Option(metavar="DIR", help="Trials to share with other comparisons.")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the figures as JSON too.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Trials at the same time; with more than 1 speeds suffer.")] = 1,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the last checkpoint of each trial.")] = False,
) -> None:
    """Train with different settings under equal conditions, and say what the difference is worth."""
    from trainwright.cli import compare as command

    recipe, overrides = split_arguments(arguments)
    command.run(
        recipe, overrides, varied=vary or [], arms=arm or [], baseline=baseline, seeds=seeds, budget=budget,
        tune=tune or [], out=out, trials=trials, json=json, jobs=jobs, keep=keep,
    )  # fmt: skip


@app.command("eval")
def evaluate(
    run: Run,
    overrides: Overrides = None,
    checkpoint: Checkpoint = "latest",
    tokens: Annotated[int | None, typer.Option(min=1, help="Validation tokens; default: the recipe's.")] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Tasks of lm-evaluation-harness, by comma; needs the extra `eval`.")
    ] = None,
    include_path: Annotated[Path | None, typer.Option(help="Folder of your own task files.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Examples per task.")] = None,
    live: Live = False,
    json: Json = False,
) -> None:
    """Validation loss, perplexity and bits per byte of a run, or harness tasks on it."""
    from trainwright.cli.output import figures, print_json

    split_arguments(["-", *(overrides or [])])
    found: dict[str, Any]
    if tasks is not None:
        from trainwright.train.lm_eval_adapter import evaluate_tasks
        from trainwright.train.runs import open_model

        model, tokenizer = open_model(run, checkpoint, live=live)
        names = [t.strip() for t in tasks.split(",") if t.strip()]
        found = evaluate_tasks(model, tokenizer, names, include_path=include_path, limit=limit)
    else:
        from trainwright.train import evaluate_run

        found = evaluate_run(run, checkpoint, overrides=overrides, tokens=tokens, live=live)
    if json:
        print_json(found)
    else:
        for task, row in found.items() if tasks is not None else [("", found)]:
            if task:
                print(task)
            figures(row)


@app.command()
def generate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, or a Hugging Face model folder.")],
    prompt: Annotated[str | None, typer.Option(help="Text to continue; default: what comes from a pipe.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Talk with the model, by its chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message of the chat.")] = None,
    checkpoint: Checkpoint = "latest",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to write.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token.")] = 0.7,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw among this many likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Draw among the likeliest of this mass.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the answer; may be given several times.")
    ] = None,
    context: Annotated[
        str | None, typer.Option(metavar="URL", help="Metadata to write by, of a model trained with data.metadata.")
    ] = None,
    guidance: Annotated[
        float | None, typer.Option(help="Strength of the context: 0 none, 1 as trained; default 1.5.")
    ] = None,
    exit_threshold: Annotated[
        float | None, typer.Option(help="Probability from which on a model with early exits leaves at one.")
    ] = None,
    exit_method: Annotated[
        str, typer.Option(help="How the cache is filled behind an exit: recompute or pipelined.")
    ] = "recompute",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draws.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; default: the run's.")] = None,
    live: Live = False,
) -> None:
    """Continue a text, or chat."""
    from trainwright.cli import generate as command

    settings: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "seed": seed,
        "stop": stop or [],
    }
    settings |= {k: v for k, v in (("top_k", top_k), ("top_p", top_p)) if v is not None}
    command.run(
        run, checkpoint, device, settings, prompt=prompt, chat=chat, system=system, live=live,
        context=context, guidance=guidance, exit_threshold=exit_threshold, exit_method=exit_method,
    )  # fmt: skip


@app.command()
def export(
    run: Run,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; must not exist.")],
    checkpoint: Checkpoint = "latest",
    live: Live = False,
    adapter: Annotated[bool, typer.Option("--adapter", help="The LoRA adapter alone, in PEFT's format.")] = False,
) -> None:
    """Write a run's model as a folder that transformers loads; adapters are merged, and that is proved."""
    from trainwright.models.adapter_export import read_proof
    from trainwright.train.runs import export_run

    print(export_run(run, out, checkpoint, live, adapter))
    if (proof := read_proof(out)) is not None:
        print(proof)


@app.command()
def methods(
    name: Annotated[
        str | None, typer.Argument(metavar="[SLOT|NAME]", help="A slot, a method, or a word to search for.")
    ] = None,
    json: Json = False,
) -> None:
    """List the methods, search them, or explain one: its settings, defaults and paper."""
    from trainwright.cli.methods import show

    show(name, json)


@config_app.command("show")
def config_show(arguments: RecipeAndOverrides = None) -> None:
    """Print a recipe with every default filled in."""
    recipe, overrides = split_arguments(arguments)
    from trainwright.config import RunConfig

    print(RunConfig.load(recipe, overrides).to_yaml(), end="")


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON Schema of a recipe, for editors."""
    from trainwright.cli.output import print_json
    from trainwright.config import RunConfig

    print_json(RunConfig.json_schema())


@config_app.command("check")
def config_check(arguments: RecipeAndOverrides = None) -> None:
    """Find mistakes in a recipe before any work."""
    recipe, overrides = split_arguments(arguments)
    from trainwright.config import RunConfig
    from trainwright.config.inputs import look

    config = RunConfig.load(recipe, overrides)
    lines = look(config)
    print("\n".join([f"{recipe or 'quickstart'}: valid; it would write to {config.run_dir}", *lines]))


@app.command()
def init(
    path: Annotated[Path, typer.Argument(metavar="[FILE]", help="File to write.")] = Path("recipe.yaml"),
    task: Annotated[
        str,
        typer.Option("--for", metavar="TASK", help="pretrain; continue (an open model on text); sft, lora (on chats)."),
    ] = "pretrain",
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write a commented recipe to start from."""
    from trainwright.cli.template import write

    write(path, force, task)
    print(f"{path} written. Train it: trainwright train {path}")


@app.command()
def doctor(json: Json = False) -> None:
    """What this machine has, how fast it is, and what is missing for which feature."""
    from trainwright.cli.doctor import diagnose, show
    from trainwright.cli.output import print_json

    found = diagnose()
    print_json(found) if json else show(found)


@app.command()
def report(run: Run) -> None:
    """Write report.html of a run; also of one that is still going."""
    from trainwright.train.report import write_report

    print(write_report(run))


Claims = Annotated[Path, typer.Option("--dir", metavar="DIR", help="Folder of the claims; results/ lies in it.")]


@claims_app.command("list")
def claims_list(folder: Claims = Path("claims"), json: Json = False) -> None:
    """The claims: id, method, whether run, verdict."""
    from trainwright.cli.claims import show_list

    show_list(folder, json)


@claims_app.command("run")
def claims_run(
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID", help="Ids, e.g. B075, or names.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every claim.")] = False,
    folder: Claims = Path("claims"),
    trials: Annotated[Path, typer.Option(metavar="DIR", help="Where trials are kept, for all claims together.")] = Path(
        "runs/claims/trials"
    ),
    jobs: Annotated[int, typer.Option(min=1, help="Trials at the same time; with more than 1 speeds suffer.")] = 1,
    stop_after: Annotated[
        float | None, typer.Option(min=0, metavar="MINUTES", help="Start no trial after this time.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Judge anew what has a result; trials are not rerun.")] = False,
) -> None:
    """Run the experiments of claims and write claims/results/ID.json; goes on where it was stopped."""
    from trainwright.cli import claims as command

    command.run(ids or [], everything, folder, trials, jobs, stop_after, again)


@claims_app.command("table")
def claims_table(
    folder: Claims = Path("claims"),
    out: Annotated[Path, typer.Option(metavar="FILE", help="File to write.")] = Path("docs/claims.md"),
) -> None:
    """Write docs/claims.md from the results."""
    from trainwright.cli.claims import table

    table(folder, out)


Texts = Annotated[
    list[str], typer.Option("--text", metavar="LANG=PATH", help="Text of a language: a file or folder; repeatable.")
]
Parallel = Annotated[
    list[str] | None,
    typer.Option("--parallel", metavar="LANG=FILE", help="The same sentences in several languages, one a line."),
]
Morphemes = Annotated[
    str | None, typer.Option("--segmentation", metavar="NAME", help="en, tr or a file: adds morphological metrics.")
]
Hidden = Annotated[int, typer.Option(min=1, help="Width of the model whose training cost is predicted.")]
Layers = Annotated[int, typer.Option(min=1, help="Its layers.")]
SeqLen = Annotated[int, typer.Option(min=1, help="Its tokens per sequence.")]
Recompute = Annotated[bool, typer.Option("--recompute", help="It recomputes activations in the backward pass.")]
Untied = Annotated[bool, typer.Option("--untied", help="It has two embedding matrices.")]


@tokenizer_app.command("train")
def tokenizer_train(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write; must not exist.")],
    arguments: RecipeAndOverrides = None,
) -> None:
    """Train the tokenizer of a recipe on its data and write it as a Hugging Face folder."""
    from trainwright.cli import tokenizer as command

    command.train(*split_arguments(arguments), out)


@tokenizer_app.command("study")
def tokenizer_study(
    text: Texts,
    algorithm: Annotated[list[str] | None, typer.Option(help="bpe, unigram, morph_bpe; repeatable.")] = None,
    vocab_size: Annotated[list[int] | None, typer.Option(min=260, help="Sizes to try; repeatable.")] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to keep the tokenizers in.")] = Path(
        "runs/tokenizers"
    ),
    validation_fraction: Annotated[float, typer.Option(min=0.0, max=0.5, help="Share of the texts held out.")] = 0.1,
    mono: Annotated[bool, typer.Option("--mono", help="Train on each language alone too.")] = False,
    parallel: Parallel = None,
    segmentation: Morphemes = None,
    proxy: Annotated[
        Path | None, typer.Option(metavar="RECIPE", help="Train this small recipe with each, for bits per byte.")
    ] = None,
    proxy_bytes: Annotated[int, typer.Option(min=1, help="Text that each of these trainings sees, in bytes.")] = 10**7,
    hidden: Hidden = 2048,
    layers: Layers = 24,
    seq_len: SeqLen = 2048,
    recompute: Recompute = False,
    untied: Untied = False,
    json: Json = False,
) -> None:
    """Train tokenizers at several vocabulary sizes; what each does to the text, and what that costs."""
    from trainwright.cli import tokenizer as command

    dims = {"hidden": hidden, "layers": layers, "seq_len": seq_len, "recompute": recompute, "tied": not untied}
    command.study(
        text, algorithm or ["bpe", "unigram"], vocab_size or [4096, 8192, 16384], dims,
        validation_fraction=validation_fraction, mono=mono, parallel=parallel or [], segmentation=segmentation,
        proxy=proxy, proxy_bytes=proxy_bytes, out=out, json=json,
    )  # fmt: skip


@tokenizer_app.command("compare")
def tokenizer_compare(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER", help="Tokenizers or models with one.")],
    text: Texts,
    parallel: Parallel = None,
    segmentation: Morphemes = None,
    hidden: Hidden = 2048,
    layers: Layers = 24,
    seq_len: SeqLen = 2048,
    recompute: Recompute = False,
    untied: Untied = False,
    json: Json = False,
) -> None:
    """Compare tokenizers that exist on the same text."""
    from trainwright.cli import tokenizer as command

    dims = {"hidden": hidden, "layers": layers, "seq_len": seq_len, "recompute": recompute, "tied": not untied}
    command.compare(folders, text, dims, parallel=parallel or [], segmentation=segmentation, json=json)
