"""Every object is what the API server would accept, and looks as it did when somebody last looked."""

import json
import os
import pathlib
import re
import unittest

import jsonschema
import kubernetes_validate

import chart

VERSIONS = ("1.32", "1.37")
CRDS = {path.stem: json.loads(path.read_text()) for path in (chart.HERE / "crds").glob("*.json")}


def validate(thing):
    """Raises for an object that is not valid."""
    if thing["kind"] in CRDS:
        schema = CRDS[thing["kind"]]
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.validate(thing, schema)
        for _, template in chart.pod_templates([thing]):
            validate({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template})
        return
    for version in VERSIONS:
        kubernetes_validate.validate(thing, version, strict=True)


class Schemas(unittest.TestCase):
    def test_every_object_of_every_set_is_valid(self):
        kinds = set()
        for name in chart.SETS:
            for thing in chart.objects_of(name):
                with self.subTest(set=name, object=chart.title(thing)):
                    validate(thing)
                    kinds.add(thing["kind"])
        self.assertGreaterEqual(kinds, set(CRDS), "kinds with a schema of our own that no set renders")

    def test_the_validation_catches_what_it_should(self):
        for kind, path in [
            ("Deployment", ("spec", "replicass")),
            ("StatefulSet", ("spec", "template", "spec", "containerz")),
            ("LeaderWorkerSet", ("spec", "leaderWorkerTemplate", "workerTemplate", "spec", "nodeSelektor")),
            ("ServiceMonitor", ("spec", "endpoint")),
        ]:
            thing = next(o for name in chart.SETS for o in chart.objects_of(name) if o["kind"] == kind)
            broken = json.loads(json.dumps(thing))
            at = broken
            for key in path[:-1]:
                at = at[key]
            at[path[-1]] = 1
            with self.subTest(kind=kind), self.assertRaises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
                validate(broken)

    def test_sets_render_as_their_snapshots(self):
        for name in chart.SETS:
            path = chart.HERE / "snapshots" / f"{name}.yaml"
            # Rules and dashboard stand in files of their own, which other tests read.
            text = re.sub(r"(  omni\.json: \|-\n)(    .*\n|\n)+", r"\1    ...\n", chart.text_of(name))
            if os.environ.get("UPDATE_SNAPSHOTS"):
                path.write_text(text)
            with self.subTest(set=name):
                self.assertTrue(path.exists(), f"{path} is missing: run with UPDATE_SNAPSHOTS=1")
                self.assertEqual(text.splitlines(), path.read_text().splitlines())

    def test_the_chart_lints(self):
        for name in chart.SETS:
            with self.subTest(set=name):
                chart.helm("lint", "--strict", chart.chart_of(name), "--values", chart.HERE / "sets" / f"{name}.yaml")

    def test_no_snapshot_is_left_over(self):
        left = {path.stem for path in pathlib.Path(chart.HERE / "snapshots").glob("*.yaml")} - set(chart.SETS)
        self.assertFalse(left)


if __name__ == "__main__":
    unittest.main()
