"""The examples for clusters: well-formed, and every command in them one that the program takes."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from trainwright import RunConfig
from trainwright.cli.train import Processes

FOLDER = Path(__file__).parents[2] / "docs/clusters"
MANIFESTS = sorted(FOLDER.glob("*.yaml"))


def check_command(words):
    """The options of ``trainwright train`` in ``words`` exist and have values that it takes; the recipe's keys too."""
    import typer

    from trainwright.cli.app import app

    assert words[:2] == ["trainwright", "train"], words
    parser = typer.main.get_command(app).commands["train"]
    context = parser.make_context("train", words[2:], resilient_parsing=False)
    given = context.params
    processes = Processes.parse(given["nproc"], given["nnodes"], given["rdzv"], given["rdzv_id"], given["restarts"])
    recipe, *overrides = given["arguments"]
    assert recipe.endswith(".yaml")
    RunConfig.load({}, overrides)
    return processes


def containers(path):
    (document,) = yaml.safe_load_all(path.read_text())
    if document["kind"] == "PyTorchJob":
        worker = document["spec"]["pytorchReplicaSpecs"]["Worker"]
        return document, worker["replicas"], worker["template"]["spec"]
    (job,) = document["spec"]["replicatedJobs"]
    assert job["template"]["spec"]["completions"] == job["template"]["spec"]["parallelism"]
    return document, job["template"]["spec"]["completions"], job["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda p: p.name)
def test_manifest(path):
    document, pods, spec = containers(path)
    assert (document["apiVersion"], document["kind"]) in {
        ("kubeflow.org/v1", "PyTorchJob"),
        ("jobset.x-k8s.io/v1alpha2", "JobSet"),
    }
    (container,) = spec["containers"]
    processes = check_command([*container["command"], *container["args"]])
    machines = processes.machines
    assert machines.most == pods and processes.here[1] == container["resources"]["limits"]["nvidia.com/gpu"]
    host, _, port = machines.endpoint.rpartition(":")
    assert int(port) in {p["containerPort"] for p in container["ports"]}
    name = document["metadata"]["name"]
    if document["kind"] == "PyTorchJob":
        assert host == f"{name}-worker-0" and container["name"] == "pytorch"  # the operator looks for that name
    else:
        assert host == f"{name}-{document['spec']['replicatedJobs'][0]['name']}-0-0.{name}"
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in spec["volumes"]}
    paths = [m["mountPath"] for m in container["volumeMounts"]]
    assert all(any(a.split("=")[1].startswith(p) for p in paths) for a in container["args"] if "dir=/" in a)


def test_there_are_manifests():
    assert {p.name for p in MANIFESTS} == {"pytorchjob.yaml", "jobset.yaml"}


def test_sbatch():
    path = FOLDER / "train.sbatch"
    subprocess.run(["bash", "-n", str(path)], check=True)
    text = path.read_text()
    lines = text.splitlines()
    # SLURM reads its lines up to the first command, and no further.
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first:])
    assert text.startswith("#!/bin/bash\n") and "#SBATCH --ntasks-per-node=1" in lines
    command = re.search(r"^srun (.*?)\n$", text.replace("\\\n", " ") + "\n", re.M | re.S)[1]
    values = {"$RECIPE": "recipe.yaml", '"$@"': "", "${SLURM_GPUS_ON_NODE:-8}": "8", "$SLURM_JOB_NUM_NODES": "4"}
    values |= {"$FIRST": "node01", "$PORT": "29400", "$SLURM_JOB_ID": "17"}
    for name, value in values.items():
        assert name in command
        command = command.replace(name, value)
    words = shlex.split(command)
    processes = check_command(words[words.index("trainwright") :])
    assert processes.machines.job == "17" and processes.machines.endpoint == "node01:29400" and processes.restarts == 3


def test_the_page_names_every_file_and_its_commands_work():
    page = (FOLDER / "index.md").read_text()
    assert {p.name for p in FOLDER.iterdir()} == {"index.md", *re.findall(r"\]\(([\w.]+)\)", page)}
    (block,) = re.findall(r"```bash\n(.*?)```", page, re.S)
    for line in block.strip().splitlines():
        check_command(shlex.split(line))
