"""Bad values are refused by name, before anything is installed; and an upgrade changes nothing that must not change."""

import json
import os
import re
import tempfile
import unittest

import yaml

import chart

MINIMAL = chart.HERE / "sets" / "minimal.yaml"
POOLS = "pools[0].name=ar,pools[0].role=ar,pools[1].name=dit,pools[1].role=dit"

# Arguments of helm, and what the message must say.
BAD = [
    ("routr.replicas=1", r"additional properties 'routr' not allowed"),
    ("router.replicass=1", r"at '/router': additional properties 'replicass'"),
    ("router.replicas=one", r"at '/router/replicas'"),
    ("router.replicas=0", r"at '/router/replicas'"),
    ("router.service.port=70000", r"at '/router/service/port'"),
    ("router.service.type=ExternalName", r"at '/router/service/type'"),
    ("router.resources.requests.memory=lots", r"at '/router/resources/requests/memory'"),
    ("router.settings.colour=blue", r"router\.settings\.colour: omni router has no such setting"),
    ("log.format=xml", r"at '/log/format'"),
    ("image.digest=sha256:12", r"at '/image/digest'"),
    ("image.pullPolicy=Sometimes", r"at '/image/pullPolicy'"),
    ("model.hostPath=", r"model: set exactly one of .*; none is set"),
    ("model.hostPath=var/model", r"at '/model/hostPath'"),
    ("model.pvc.claimName=x", r"model: set exactly one of .*; pvc\.claimName, hostPath are set"),
    ("model.loadSeconds=0", r"at '/model/loadSeconds'"),
    ("requests.longestSeconds=4000", r"at '/requests/longestSeconds'"),
    ("transfer.transport=pigeon", r"at '/transfer/transport'"),
    ("transfer.transport=shm", r"transfer\.transport: shm does not reach from pod to pod"),
    ("transfer.poolBytes=2GB", r"at '/transfer/poolBytes'"),
    ("transfer.settings.colour=blue", r"transfer\.settings\.colour: omni kv-transfer has no such setting"),
    ("network.ipFamily=IPX", r"at '/network/ipFamily'"),
    ("network.ucxPorts.first=7800", r"network\.ucxPorts\.first: must be below"),
    ("registry.etcd.install=true", r"registry\.etcd: is set, but registry\.kind is embedded"),
    ("registry.etcd.image=etcd", r"at '/registry/etcd/image'"),
    ("registry.etcd.replicas=2", r"at '/registry/etcd/replicas'"),
    ("router.replicas=2", r"router\.replicas: the embedded registry"),
    ("router.autoscaling.enabled=true", r"router\.autoscaling\.enabled: the embedded registry"),
    ("pools[0].name=ar,pools[0].role=ar", r"at '/pools'"),
    (POOLS + ",pools[1].role=vae", r"at '/pools/1/role'"),
    (POOLS + ",pools[1].name=Dit", r"at '/pools/1/name'"),
    (POOLS + ",pools[1].name=router", r"at '/pools/1/name'"),
    (POOLS + ",pools[1].name=ar", r"pools\[1\]\.name: ar is used twice"),
    (POOLS + ",pools[1].role=ar", r"pools: there is no pool with role dit"),
    (POOLS + ",pools[1].gpu=1", r"at '/pools/1': additional properties 'gpu'"),
    (POOLS + ",pools[1].plan.tpp=2", r"at '/pools/1/plan': additional properties 'tpp'"),
    (POOLS + ",pools[1].settings.max_rowz=2", r"pools\[1\]\.settings\.max_rowz: omni dit-worker has no such setting"),
    (POOLS + ",pools[1].kvPool=kv", r"pools\[1\]\.kvPool: only ar pools publish"),
    (POOLS + ",pools[0].kvPool=kv", r"pools\[0\]\.kvPool: there is no kv pool kv"),
    (POOLS + ",pools[2].name=kv,pools[2].role=kv,pools[0].kvPool=kv,pools[0].replicas=2", r"pools\[0\]\.kvPool: kv has fewer replicas"),
    (POOLS + ",pools[0].poolBytes=1GiB", r"pools\[0\]\.poolBytes: only kv pools"),
    (POOLS + ",pools[2].name=kv,pools[2].role=kv,pools[2].hosts=2", r"pools\[2\]: a kv pool has no gpus, hosts or plan"),
    (POOLS + ",pools[1].autoscaling.enabled=true", r"pools\[1\]\.autoscaling\.enabled: keda\.prometheusAddress must be set"),
    ("tls.mode=maybe", r"at '/tls/mode'"),
    ("tls.adminPorts=clear", r"at '/tls/adminPorts'"),
    (POOLS + ",pools[1].name=monitor", r"at '/pools/1/name'"),
    ("networkPolicy.clients[0].pods=x", r"at '/networkPolicy/clients/0': additional properties 'pods'"),
    ("monitoring.interval=often", r"at '/monitoring/interval'"),
    ("security.user=0", r"at '/security/user'"),
    ("test.timeoutSeconds=0", r"at '/test/timeoutSeconds'"),
]

# What the schema knows but the binary may not have yet: refused unless files/binary.json says that it has it.
NOT_YET = [
    ("registry.kind=etcd,registry.etcd.install=true", ("registries", "etcd"), r"registry\.kind: omni \S+ has no etcd registry"),
    ("transfer.transport=rdma", ("transports", "rdma"), r"transfer\.transport: omni \S+ moves KV over"),
    ("rdma.enabled=true", ("transports", "rdma"), r"rdma\.enabled: omni \S+ moves KV over"),
    (POOLS + ",pools[1].gpus=1", ("devices", "cuda"), r"pools\[1\]\.gpus: omni \S+ computes on the CPU"),
    (POOLS + ",pools[1].hosts=2", ("settings", "dit-worker", "hosts"), r"pools\[1\]\.hosts: dit-worker of omni \S+ runs on one host"),
]

# Refused even by a chart whose binary has everything.
BAD_LATER = [
    ("registry.kind=etcd", r"registry\.etcd\.endpoints: name at least one"),
    ("registry.kind=etcd,registry.etcd.install=true,registry.etcd.endpoints[0]=a:1", r"registry\.etcd\.endpoints: must be empty"),
    ("registry.kind=etcd,registry.etcd.endpoints[0]=a", r"at '/registry/etcd/endpoints/0'"),
    ("rdma.enabled=true", r"rdma\.enabled: goes with transfer\.transport=rdma"),
    ("transfer.transport=rdma", r"rdma\.enabled: goes with transfer\.transport=rdma"),
    ("registry.kind=etcd,registry.etcd.install=true,registry.etcd.user.name=omni", r"registry\.etcd\.tls, registry\.etcd\.user: are for"),
    ("registry.kind=etcd,registry.etcd.install=true,networkPolicy.enabled=false", r"registry\.etcd\.install: needs networkPolicy\.enabled"),
    ("registry.kind=etcd,registry.etcd.endpoints[0]=a:1,registry.etcd.user.name=omni", r"registry\.etcd\.user\.passwordSecret: must be set"),
    ("tls.mode=certManager", r"tls\.certManager\.issuer\.name: must be set"),
    ("router.apiKeysSecret=keys", r"router\.apiKeysSecret: needs tls\.mode"),
    ("tls.mode=existingSecret", r"tls\.existingSecret: must be set"),
    (POOLS + ",pools[1].gpus=4,pools[1].plan.tp=2", r"pools\[1\]\.plan: has 2 ranks, but the pool has 4 GPUs"),
    (POOLS + ",pools[1].gpus=2,pools[1].hosts=2,pools[1].plan.tp=2", r"pools\[1\]\.plan: has 2 ranks, but the pool has 4 GPUs"),
]

# Fields that the API server refuses to change.
IMMUTABLE = {
    "Deployment": ["selector"],
    "StatefulSet": ["selector", "serviceName", "podManagementPolicy", "volumeClaimTemplates"],
    "Service": ["clusterIP"],
}


def identity(things):
    """Of each object what an upgrade must not change."""
    return {chart.title(thing): {key: thing["spec"].get(key) for key in IMMUTABLE[thing["kind"]]}
            for thing in things if thing["kind"] in IMMUTABLE}


class Refusals(unittest.TestCase):
    def refuse(self, where, setting, message):
        with self.subTest(values=setting):
            with self.assertRaises(chart.Refused) as refused:
                chart.template(where, MINIMAL, "--set", setting)
            self.assertRegex(str(refused.exception), message)

    def test_bad_values_are_refused_by_the_name_of_the_field(self):
        for setting, message in BAD:
            self.refuse(chart.CHART, setting, message)

    def test_what_the_binary_does_not_have_is_refused_by_name(self):
        binary = json.loads((chart.CHART / "files" / "binary.json").read_text())
        for setting, path, message in NOT_YET:
            at = binary
            for key in path[:-1]:
                at = at[key]
            if path[-1] not in at:
                self.refuse(chart.CHART, setting, message)

    def test_rules_between_values_hold_with_any_binary(self):
        for setting, message in BAD_LATER:
            self.refuse(chart.wide_chart(), setting, message)

    def test_sets_of_the_future_are_refused_today(self):
        for name, field in chart.AHEAD.items():
            with self.subTest(set=name), self.assertRaises(chart.Refused) as refused:
                chart.template(chart.CHART, chart.HERE / "sets" / f"{name}.yaml")
            self.assertIn(field, str(refused.exception))

    def test_every_value_is_in_the_schema_and_every_object_is_closed(self):
        schema = json.loads((chart.CHART / "values.schema.json").read_text())
        values = yaml.safe_load((chart.CHART / "values.yaml").read_text())
        self.assertEqual(set(values) | {"global"}, set(schema["properties"]))

        def walk(node, path):
            if isinstance(node, dict):
                if "properties" in node:
                    self.assertIs(node.get("additionalProperties"), False, path)
                for key, value in node.items():
                    walk(value, f"{path}/{key}")

        walk(schema, "")


class Examples(unittest.TestCase):
    def test_the_example_of_the_chart_s_readme_renders(self):
        (example,) = re.findall(r"```yaml\n(.*?)```", (chart.CHART / "README.md").read_text(), re.DOTALL)
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as values:
            values.write(example)
            values.flush()
            rendered = chart.objects(chart.template(chart.wide_chart(), values.name, "--set", "model.hostPath=/m"))
        self.assertIn("StatefulSet/demo-omni-kv", map(chart.title, rendered))


class Defaults(unittest.TestCase):
    def test_a_pool_overrides_its_defaults_also_with_nothing(self):
        pools = {"model": {"hostPath": "/m"}, "poolDefaults": {"replicas": 3, "extraEnv": [{"name": "A", "value": "b"}]},
                 "pools": [{"name": "ar", "role": "ar"},
                           {"name": "dit", "role": "dit", "replicas": 0, "disruptionBudget": False, "extraEnv": [],
                            "resources": {"limits": {"memory": "9Gi"}, "requests": {"memory": "9Gi"}}}]}
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as values:
            yaml.safe_dump(pools, values)
            values.flush()
            things = {chart.title(thing): thing for thing in chart.objects(chart.template(chart.CHART, values.name))}
        self.assertIn("PodDisruptionBudget/demo-omni-ar", things)
        self.assertNotIn("PodDisruptionBudget/demo-omni-dit", things)
        for name, replicas, has_a in (("ar", 3, True), ("dit", 0, False)):
            spec = things[f"StatefulSet/demo-omni-{name}"]["spec"]
            (container,) = spec["template"]["spec"]["containers"]
            self.assertEqual((spec["replicas"], "A" in chart.environment(container)), (replicas, has_a))
        self.assertEqual(container["resources"], {"requests": {"cpu": "2", "memory": "9Gi"}, "limits": {"memory": "9Gi"}})


class Notes(unittest.TestCase):
    def notes(self, name):
        # `helm template` leaves the notes out; a dry run on the client's side prints them, without a cluster.
        text = chart.helm("install", chart.RELEASE, chart.chart_of(name), "--namespace", chart.NAMESPACE,
                          "--dry-run=client", "--values", chart.HERE / "sets" / f"{name}.yaml")
        return text[text.index("NOTES:"):]

    def test_settings_of_the_pools_of_prefixes_reach_sidecars_and_kv_pools(self):
        pools = ("pools[0].name=ar,pools[0].role=ar,pools[1].name=dit,pools[1].role=dit,pools[2].name=kv,pools[2].role=kv,"
                 "pools[2].settings.max_slots=7,transfer.settings.max_slots=5,transfer.settings.prefix_cache_bytes=1GiB")
        told = {}
        for thing, template in chart.pod_templates(chart.objects(chart.template(chart.CHART, MINIMAL, "--set", pools))):
            for container in chart.containers(template):
                if container["name"] == "kv-transfer":
                    values = chart.environment(container)
                    told[thing["metadata"]["name"]] = (values["OMNI_MAX_SLOTS"], values["OMNI_PREFIX_CACHE_BYTES"])
        self.assertEqual(told, {"demo-omni-ar": ("5", "1GiB"), "demo-omni-kv": ("7", "1GiB")})

    def test_the_annotations_are_what_artifact_hub_reads(self):
        about = yaml.safe_load((chart.CHART / "Chart.yaml").read_text())
        notes = about["annotations"]
        self.assertEqual(notes["artifacthub.io/category"], "ai-machine-learning")
        for change in yaml.safe_load(notes["artifacthub.io/changes"]):
            self.assertIn(change["kind"], ("added", "changed", "deprecated", "removed", "fixed", "security"))
            self.assertTrue(change["description"].endswith("."))
        images = yaml.safe_load(notes["artifacthub.io/images"])
        self.assertEqual([image["image"] for image in images], [f"omni:{about['appVersion']}"])

    def test_notes_name_the_endpoint_the_pools_and_what_is_open(self):
        notes = self.notes("production")
        for text in [f"http://demo-omni-router.{chart.NAMESPACE}.svc:7600", "helm -n pictures test demo",
                     "draw (dit): 2 to 8 replicas", "no TLS", "names no ipBlock", "LoadBalancer, which opens that port"]:
            self.assertIn(text, notes)
        self.assertIn("without the network policies", self.notes("image-volume"))


class Upgrades(unittest.TestCase):
    def test_a_new_version_changes_no_immutable_field_and_drops_no_object(self):
        def bump(path):
            text = (path / "Chart.yaml").read_text()
            (path / "Chart.yaml").write_text(re.sub(r"(?m)^(version|appVersion): .*$", r"\1: 9.9.9", text))

        for name in chart.SETS:
            with self.subTest(set=name), tempfile.TemporaryDirectory() as folder:
                def edit(path, name=name):
                    bump(path)
                    if name in chart.AHEAD:
                        chart.widen(path)

                newer = chart.objects(chart.template(chart.copy_of_chart(folder, edit), chart.HERE / "sets" / f"{name}.yaml"))
                older = chart.objects_of(name)
                self.assertEqual(list(map(chart.title, older)), list(map(chart.title, newer)))
                self.assertEqual(identity(older), identity(newer))
                self.assertNotEqual(older, newer, "the version shows nowhere")

    def test_an_upgrade_from_each_released_version_is_possible(self):
        current = {name: identity(chart.objects_of(name)) for name in chart.SETS}
        version = yaml.safe_load((chart.CHART / "Chart.yaml").read_text())["version"]
        here = chart.HERE / "released" / f"{version}.json"
        if os.environ.get("UPDATE_SNAPSHOTS") and not here.exists():
            here.write_text(json.dumps(current, indent=1, sort_keys=True) + "\n")
        self.assertTrue(here.exists(), "this version is not recorded: run with UPDATE_SNAPSHOTS=1")
        for path in (chart.HERE / "released").glob("*.json"):
            for name, old in json.loads(path.read_text()).items():
                for thing, fields in old.items():
                    with self.subTest(version=path.stem, set=name, object=thing):
                        self.assertEqual(current.get(name, {}).get(thing, fields), fields)


if __name__ == "__main__":
    unittest.main()
