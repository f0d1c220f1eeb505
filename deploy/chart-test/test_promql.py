"""Expressions are PromQL. Which metrics and labels they may use is tested with the table of metrics, in Rust."""

import json
import unittest

import promql_parser
import yaml

import chart

FILES = chart.CHART / "files"


class Expressions(unittest.TestCase):
    def parses(self, text):
        # Variables of Grafana stand where a duration or a value does.
        with self.subTest(expression=text):
            promql_parser.parse(text.replace("$__rate_interval", "5m"))

    def test_rules_are_promql(self):
        rules = [r for g in yaml.safe_load((FILES / "alerts" / "omni.yaml").read_text())["groups"] for r in g["rules"]]
        self.assertGreaterEqual(len(rules), 10)
        for rule in rules:
            self.parses(rule["expr"])
            if "alert" in rule:
                self.assertIn(rule["labels"]["severity"], ("warning", "critical"))
                self.assertGreaterEqual(rule["annotations"].keys(), {"summary", "description"})

    def test_the_dashboard_is_promql(self):
        panels = json.loads((FILES / "grafana" / "omni.json").read_text())["panels"]
        expressions = [t["expr"] for p in panels for t in p.get("targets", [])]
        self.assertGreaterEqual(len(expressions), 20)
        for expression in expressions:
            self.parses(expression)

    def test_autoscaling_is_promql(self):
        queries = [trigger["metadata"]["query"] for name in chart.SETS for thing in chart.objects_of(name)
                   if thing["kind"] == "ScaledObject" for trigger in thing["spec"]["triggers"]]
        self.assertTrue(queries)
        for query in queries:
            self.parses(query)

    def test_what_is_no_promql_is_noticed(self):
        for wrong in ("sum by (le (x)", "rate(x[oops])", "histogram_quantile(0.9 x)"):
            with self.assertRaises(ValueError):
                promql_parser.parse(wrong)

    def test_the_chart_carries_the_files_of_deploy(self):
        for folder in ("grafana", "alerts"):
            self.assertEqual((chart.HERE.parent / folder).resolve(), FILES / folder)
        things = {thing["kind"]: thing for thing in chart.objects_of("production")}
        dashboard = json.loads((chart.HERE.parent / "grafana" / "omni.json").read_text())
        self.assertEqual(json.loads(things["ConfigMap"]["data"]["omni.json"]), dashboard)
        rules = yaml.safe_load((chart.HERE.parent / "alerts" / "omni.yaml").read_text())
        self.assertEqual(things["PrometheusRule"]["spec"], rules)


if __name__ == "__main__":
    unittest.main()
