"""Rendering the chart with helm, and looking at what comes out."""

import functools
import json
import os
import pathlib
import shutil
import subprocess
import tempfile

import yaml

HERE = pathlib.Path(__file__).resolve().parent
CHART = HERE.parent.parent / "helm" / "omni"
RELEASE, NAMESPACE = "demo", "pictures"
SETS = sorted(path.stem for path in (HERE / "sets").glob("*.yaml"))

# Sets that need more of the binary than it has today, and how the chart refuses them until it has it. They are rendered
# with a copy of the chart whose files/binary.json has these entries added.
AHEAD = {
    "gpu-hosts": "transfer.transport",
}
STAGE_SETTINGS = ["hosts", "host_index", "leader"]


class Refused(Exception):
    """Helm did not render; the text is its message."""


def helm(*arguments):
    """Runs helm and returns its standard output."""
    command = [os.environ["HELM"], *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        raise Refused(done.stderr + done.stdout)
    return done.stdout


def copy_of_chart(where, edit):
    """A copy of the chart below `where`, after `edit` changed its files."""
    target = pathlib.Path(where) / "omni"
    shutil.copytree(CHART, target)
    edit(target)
    return target


def widen(chart):
    """Adds to binary.json what the sets of AHEAD need."""
    path = chart / "files" / "binary.json"
    binary = json.loads(path.read_text())

    def add(to, values):
        to.extend(value for value in values if value not in to)

    for role, settings in binary["settings"].items():
        if role in ("ar-stage", "dit-worker"):
            add(settings, STAGE_SETTINGS)
    add(binary["transports"], ["rdma"])
    add(binary["registries"], ["etcd"])
    add(binary["devices"], ["cuda"])
    path.write_text(json.dumps(binary))


@functools.cache
def wide_chart():
    """The chart as it would be with a binary that has everything."""
    folder = tempfile.TemporaryDirectory()
    wide_chart.folder = folder  # lives as long as the process
    return copy_of_chart(folder.name, widen)


def chart_of(name):
    """Path of the chart that a value set is rendered with."""
    return wide_chart() if name in AHEAD else CHART


@functools.cache
def text_of(name):
    """What `helm template` prints for a value set."""
    return template(chart_of(name), HERE / "sets" / f"{name}.yaml")


def template(chart, values, *more):
    """`helm template` with every kind of API present."""
    return helm("template", RELEASE, chart, "--namespace", NAMESPACE, "--values", values, *more)


def objects(text):
    """The objects of a rendered text."""
    return [document for document in yaml.safe_load_all(text) if document]


@functools.cache
def objects_of(name):
    """The objects of a value set."""
    return objects(text_of(name))


def title(thing):
    """How messages name an object."""
    return f"{thing['kind']}/{thing['metadata']['name']}"


def pod_templates(things):
    """Pairs of (object, pod metadata and spec) of everything that runs pods."""
    for thing in things:
        spec = thing.get("spec", {})
        if thing["kind"] == "Pod":
            yield thing, thing
        elif thing["kind"] in ("Deployment", "StatefulSet"):
            yield thing, spec["template"]
        elif thing["kind"] == "LeaderWorkerSet":
            for key in ("leaderTemplate", "workerTemplate"):
                if key in spec["leaderWorkerTemplate"]:
                    yield thing, spec["leaderWorkerTemplate"][key]


def containers(template_):
    """All containers of a pod template, sidecars included."""
    spec = template_["spec"]
    return spec.get("initContainers", []) + spec["containers"]


def environment(container):
    """The plain variables of a container."""
    return {entry["name"]: entry.get("value") for entry in container.get("env", [])}
